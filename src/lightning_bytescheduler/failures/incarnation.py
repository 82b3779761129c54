"""Which start of an elastic job this is: a name that its ranks share with nobody before them.

``torchrun``'s agent may keep one rendezvous store over all restarts of its workers. What an earlier start has written
there is found again under the same keys: gloo then connects to ports of processes that are gone, and waits for minutes.
The agent says how often it has restarted, but each agent counts for itself, and one that joins later begins at 0. So
the ranks agree on a name themselves, and use nothing of the store but what lies under it.

*Why no rank ends up with an earlier start's name.* Rank 0 writes a fresh name. Each other rank answers under the name
that it reads, with a fresh word of its own, and goes on once rank 0 has confirmed that word under that name. Words are
never used twice, so what confirms it was written after it, by a rank 0 that lives now. A rank that has read an older
name answers under that, is not confirmed, and looks again: rank 0 has written by then, or will.

*Why all take the same one.* Rank 0 goes on once all ranks have answered under its name, and a rank takes no name that
its word was not confirmed under.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from lightning_bytescheduler.exceptions import SchedulerTimeoutError

__all__ = ["agent_keeps_store", "name_incarnation"]

_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # between two looks
_PLACE = "bytescheduler-incarnation"


def agent_keeps_store() -> bool:
    """Whether the store outlives the ranks, and has what earlier ones have written."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def name_incarnation(
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    timeout: float,
    failure: Callable[[], BaseException | None] = lambda: None,
) -> str:
    """Agree on a name; every rank of a start calls this once.

    Args:
        store: Of the job.
        rank: This one.
        world_size: Number of ranks of this start.
        timeout: Longest wait for the others, in seconds.
        failure: Asked while others are waited for: why they will not come, if they will not.

    Raises:
        SchedulerTimeoutError: If they do not come in time; names them.
        BaseException: What ``failure`` says.
    """
    place = dist.PrefixStore(_PLACE, store)
    own, deadline, pause = uuid.uuid4().hex, time.monotonic() + timeout, _SHORTEST_S
    missing = set(range(1, world_size)) if rank == 0 else {0}
    answered = ""
    if rank == 0:
        place.set("name", own)
    while missing:
        if rank == 0:
            for other in [r for r in missing if place.check([f"{own}/{r}"])]:
                place.set(f"{own}/confirmed/{place.get(f'{own}/{other}').decode()}", "")
                missing.remove(other)
        elif place.check(["name"]):
            name = place.get("name").decode()
            if name != answered:
                place.set(f"{name}/{rank}", own)
                answered = name
            if place.check([f"{name}/confirmed/{own}"]):
                return name
        if not missing:
            break
        cause = failure()
        if cause is not None:
            raise cause
        if time.monotonic() >= deadline:
            who = ", ".join(map(str, sorted(missing)))
            raise SchedulerTimeoutError(
                f"Rank {rank} of {world_size} has waited {timeout:.0f} s at torchrun's store for rank {who}. Did its "
                "process start, and call fit?"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
    return own
