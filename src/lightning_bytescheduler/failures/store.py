"""The rendezvous store: a connection that nothing else uses, whether it is gone, and a part for this start alone.

Asking a TCPStore whose host has died makes torch print a stack trace of C++ frames. The kernel knows it earlier and
says it quietly: an idle TCP connection to the same port ends when the process at the other end does.

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

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError, RanksDifferError, SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import FaultNotice

__all__ = ["StorePresence", "agent_keeps_store", "connect_to_store", "name_incarnation", "open_board"]

_TIMEOUT = timedelta(seconds=15)
_REUNION_S = 8.0  # longer than a rank that noticed nothing of a failure is left alive


_SHORTEST_S, _LONGEST_S = 0.002, 0.05  # between two looks
_PLACE = "bytescheduler-incarnation"
_PATIENCE_S = 120.0  # until the third hint of the rendezvous
_PLAIN = "default_pg/0//cpu//0/{}"  # where torch's own process group has the address of a rank of gloo


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
    patience: float = _PATIENCE_S,
) -> str:
    """Agree on a name; every rank of a start calls this once.

    Args:
        store: Of the job.
        rank: This one.
        world_size: Number of ranks of this start.
        timeout: Longest wait for the others, in seconds.
        failure: Asked while others are waited for: why they will not come, if they will not.
        patience: Longest wait for one that has made a process group without asking for the name, in seconds.

    Raises:
        SchedulerTimeoutError: If they do not come in time; names them.
        RanksDifferError: If they run something else, such as plain DDP.
        BaseException: What ``failure`` says.
    """
    place = dist.PrefixStore(_PLACE, store)
    own, started, pause = uuid.uuid4().hex, time.monotonic(), _SHORTEST_S
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
        waited = time.monotonic() - started
        plain = [other for other in missing if waited >= patience and store.check([_PLAIN.format(other)])]
        if plain:
            raise RanksDifferError(
                f"Rank {plain[0]} has waited for {waited:.0f} s in a process group of its own, as with strategy='ddp', "
                f"and rank {rank} runs another strategy. Give all ranks the same one."
            )
        if waited >= timeout:
            who = ", ".join(map(str, sorted(missing)))
            raise SchedulerTimeoutError(
                f"Rank {rank} of {world_size} has waited {timeout:.0f} s at torchrun's store for rank {who}. Did its "
                "process start, and call fit?"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
    return own


class StorePresence:
    """Tells whether a store's host is still there, without asking the store.

    Args:
        host: Where the store is; ``None`` for a store without connections, which is always there.
        port: Where the store is.

    Raises:
        OSError: If nobody listens there.
    """

    def __init__(self, host: str | None = None, port: int = 0) -> None:
        self._socket: socket.socket | None = None
        if host is not None:
            self._socket = socket.create_connection((host, port), timeout=_TIMEOUT.total_seconds())
            self._socket.setblocking(False)

    @property
    def own_address(self) -> str:
        """This machine's address on the way there; empty for a store without connections."""
        return "" if self._socket is None else str(self._socket.getsockname()[0])

    def gone(self) -> bool:
        """Whether the host has ended; at once, never blocks."""
        if self._socket is None:
            return False
        try:
            return self._socket.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None


def connect_to_store(store: dist.Store) -> tuple[dist.Store, StorePresence]:
    """Connect to the store that ``store`` is a view of; a store without connections is shared.

    What is returned has a name space of its own: a store of ``torchrun``'s agent outlives the workers, and whatever an
    earlier attempt wrote to it.

    Args:
        store: The default group's store.

    Raises:
        RankFailedError: If the store is gone, as after a failed fit in the same process.
    """
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    presence = StorePresence()
    if isinstance(base, dist.TCPStore):
        presence = _find(base)  # first: torch would knock at a closed door for minutes
    own_name = uuid.uuid4().hex
    name = store.compare_set("bytescheduler", "", own_name).decode()
    if isinstance(base, dist.TCPStore):
        base = dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    return dist.PrefixStore(f"bytescheduler/{name}", base), presence


def _find(store: dist.TCPStore) -> StorePresence:
    try:
        return StorePresence(store.host, store.port)
    except OSError as error:
        rank = 0 if not agent_keeps_store() else None
        raise RankFailedError(rank, f"the rendezvous store at {store.host}:{store.port} is gone ({error})") from error


def open_board(store: dist.Store, presence: StorePresence, *, rank: int, world_size: int) -> dist.Store:
    """A part of the store for one more run; every rank opens them in the same order.

    After a failed run the ranks wait for one another here, not in a collective: those that have not noticed yet are
    still inside one of the failed run, and gloo ends the process when two different collectives meet.

    Args:
        store: From :func:`connect_to_store`.
        presence: From :func:`connect_to_store`.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        RankFailedError: If the run before failed, and a rank does not come to train again.
    """
    instance = store.add(f"boards/{rank}", 1)
    before = f"{instance - 1}/fault"
    if instance > 1 and store.check([before]):
        cause = FaultNotice.decode(store.get(before)).as_error()
        deadline = time.monotonic() + _REUNION_S
        missing = [r for r in range(world_size) if r != rank]
        while missing:
            if presence.gone() or time.monotonic() > deadline:
                lost = 0 if presence.gone() and not agent_keeps_store() else missing[0]
                raise RankFailedError(lost, f"it does not train again after this: {cause}")
            missing = [r for r in missing if store.add(f"boards/{r}", 0) < instance]
            time.sleep(0.05)
    return dist.PrefixStore(str(instance), store)
