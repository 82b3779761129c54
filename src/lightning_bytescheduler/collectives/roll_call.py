"""Whether everyone is in the same training: asked over the rendezvous store, before ranks wait for each other in it.

Each rank introduces itself with a few facts, as JSON, and reads what all others say. A fact that has to be equal and is
not is an error on every rank, which names ranks, hosts and values. A rank that does not come, as one that runs plain
DDP, is named after half a minute. All of it goes through the training thread's own connection, in requests that do not
block; nothing is sent through process groups.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from lightning_bytescheduler.exceptions import RanksDifferError, SchedulerTimeoutError

__all__ = ["Introduction", "hold_roll_call", "names_of", "require_alike"]

log = logging.getLogger(__name__)

_WARN_S = 30.0
_SHORTEST_S, _LONGEST_S = 0.002, 0.25  # between two looks
_RANKS_SHOWN = 16
_ABSENT = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a rank says of itself.

    Attributes:
        rank: Which it is.
        host: Where it runs.
        facts: By name: what has to be the same on all ranks.
        noted: By name: what may differ, but is worth saying.
    """

    rank: int
    facts: Mapping[str, str]
    noted: Mapping[str, str] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def decode(cls, text: bytes | str) -> Introduction:
        """Read what :meth:`encode` wrote."""
        fields = json.loads(text)
        return cls(rank=fields["rank"], host=fields["host"], facts=fields["facts"], noted=fields["noted"])

    def encode(self) -> str:
        """As text for the store."""
        return json.dumps({"rank": self.rank, "host": self.host, "facts": dict(self.facts), "noted": dict(self.noted)})


def hold_roll_call(
    store: dist.Store,
    own: Introduction,
    *,
    world_size: int,
    timeout: float,
    failure: Callable[[], BaseException | None] = lambda: None,
    warn_after: float | None = None,
) -> list[Introduction]:
    """Introduce this rank, and wait until all others have done so.

    Args:
        store: A view of the rendezvous store, which every rank uses for this roll call only.
        own: This rank's.
        world_size: Number of ranks.
        timeout: Longest wait for the others, in seconds.
        failure: Asked while others are waited for: why they will not come, if they will not.
        warn_after: Seconds until missing ranks are named, and again after twice as long, and so on; 30 if left out.

    Returns:
        All introductions, by rank.

    Raises:
        SchedulerTimeoutError: If ranks are still missing; names them.
        BaseException: What ``failure`` says.
    """
    store.set(str(own.rank), own.encode())
    started, pause, warn_at = time.monotonic(), _SHORTEST_S, _WARN_S if warn_after is None else warn_after
    keys = [str(rank) for rank in range(world_size)]
    while not store.check(keys):
        cause = failure()
        if cause is not None:
            raise cause
        waited = time.monotonic() - started
        if waited >= min(warn_at, timeout):
            here = [rank for rank, key in enumerate(keys) if store.check([key])]
            missing = [rank for rank in range(world_size) if rank not in here]
            hosts = sorted({Introduction.decode(store.get(keys[rank])).host for rank in here})
            text = _missing(missing, here, hosts, waited)
            if waited >= timeout:
                raise SchedulerTimeoutError(text)
            if missing and here[0] == own.rank:
                log.warning("bytescheduler: %s", text)
            warn_at *= 2
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_S)
    return [Introduction.decode(text) for text in _values(store, keys)]


def require_alike(introductions: Sequence[Introduction], *, warn: Callable[[str], object] | None = None) -> None:
    """Make sure that all ranks are in the same training.

    Args:
        introductions: Of all ranks, by rank.
        warn: Told what differs and may.

    Raises:
        RanksDifferError: Names each fact that differs, and who says what.
    """
    differences = _differences(introductions, [one.facts for one in introductions])
    noted = _differences(introductions, [one.noted for one in introductions])
    if differences:
        also = f" ({'; '.join(noted)})" if noted else ""
        raise RanksDifferError(
            f"The ranks are not in the same training: {'; '.join(differences)}{also}. "
            "Start all of them with the same packages, the same code, the same options and variables."
        )
    if noted and warn is not None:
        warn(f"bytescheduler: not the same on all ranks: {'; '.join(noted)}.")


def names_of(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 1, 2 and 7 more``."""
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _missing(missing: Sequence[int], here: Sequence[int], hosts: Sequence[str], waited: float) -> str:
    return (
        f"{names_of(missing)} of {len(missing) + len(here)} did not join this training within {waited:.0f} s "
        f"(here: {names_of(here)}, on {', '.join(hosts[:_RANKS_SHOWN])}). Is it started there, and with the same "
        "strategy? A process with strategy='ddp' waits for others without joining."
    )


def _values(store: dist.Store, keys: Sequence[str]) -> list[bytes]:
    if getattr(store, "has_extended_api", lambda: False)():
        return list(store.multi_get(list(keys)))  # one request, however many ranks there are
    return [store.get(key) for key in keys]


def _differences(introductions: Sequence[Introduction], said: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for facts in said for name in facts)
    differences = []
    for name in names:
        by_value: dict[str, list[Introduction]] = {}
        for one, facts in zip(introductions, said, strict=True):
            by_value.setdefault(facts.get(name, _ABSENT), []).append(one)
        if len(by_value) > 1:
            parts = [f"{value} on {_who(ones)}" for value, ones in by_value.items()]
            differences.append(f"{name} is {', but '.join(parts)}")
    return differences


def _who(introductions: Sequence[Introduction]) -> str:
    hosts = sorted({one.host for one in introductions})[:_RANKS_SHOWN]
    return f"{names_of([one.rank for one in introductions])} ({', '.join(hosts)})"
