"""Signs of life of every rank, and what each says it is doing.

Written by each rank's watcher to the store, four times a second; read only while somebody wants to know why a
collective failed. All methods that use the store are for the watcher thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["VitalSigns"]

_BEATS_MISSED = 5
_RANKS_SHOWN = 8


class VitalSigns:
    """One rank's view of all ranks.

    Args:
        store: Where the signs are.
        rank: This rank.
        others: All other ranks.
        period: Between two beats, in seconds.

    Attributes:
        doing: What this rank is at, in words.
    """

    def __init__(self, store: dist.Store, rank: int, others: Sequence[int], period: float) -> None:
        self.doing: Callable[[], str] = lambda: "in setup"
        self._store = store
        self._rank = rank
        self._others = others
        self._period = period
        self._told = ""
        self._examiners = 0
        self._locating = 0
        self._beats: dict[int, tuple[int, float]] = {}  # count, and when it was first seen
        self._doing: dict[int, str] = {}
        self._examined_at = 0.0

    def beat(self) -> None:
        """Show that this rank is alive; look at the others if somebody wants to know."""
        self._store.add(f"alive/{self._rank}", 1)
        doing = self.doing()
        if doing != self._told:
            self._store.set(f"doing/{self._rank}", doing)
            self._told = doing
        if self._examiners:
            self._examine()

    @contextmanager
    def examined(self, *, doing: bool = False) -> Iterator[None]:
        """Have :meth:`beat` look at the other ranks meanwhile; also at what they are ``doing``, if asked."""
        if not self._examiners:
            self._beats, self._doing = {}, {}
        self._examiners += 1
        self._locating += doing
        try:
            yield
        finally:
            self._examiners -= 1
            self._locating -= doing

    @property
    def examining(self) -> bool:
        """Whether somebody wants to know about the others."""
        return self._examiners > 0

    def silent(self, at_least: float = 0.0) -> list[int]:
        """Ranks that have missed five beats since the examination began, and none came for ``at_least`` seconds."""
        patience = max(_BEATS_MISSED * self._period, at_least)
        return [r for r, (_, since) in self._beats.items() if self._examined_at - since > patience]

    def located(self) -> bool:
        """Whether it is known what other ranks are doing."""
        return bool(self._doing)

    def whereabouts(self) -> str:
        """What the ranks are doing, those that do the same together; empty if nothing is known."""
        if not self._doing:
            return ""
        by_place: dict[str, list[int]] = {}
        for rank, place in sorted({**self._doing, self._rank: self.doing()}.items()):
            by_place.setdefault(place, []).append(rank)
        return "; ".join(f"{_ranks(ranks)} {place}" for place, ranks in by_place.items())

    def _examine(self) -> None:
        beats, doing = dict(self._beats), dict(self._doing)
        now = time.monotonic()
        for rank in self._others:
            count = self._store.add(f"alive/{rank}", 0)
            if rank not in beats or beats[rank][0] != count:
                beats[rank] = (count, now)
            if self._locating and self._store.check([f"doing/{rank}"]):
                doing[rank] = self._store.get(f"doing/{rank}").decode()
        self._beats, self._doing, self._examined_at = beats, doing, now


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    more = f" and {len(ranks) - _RANKS_SHOWN} more" if len(ranks) > _RANKS_SHOWN else ""
    return f"rank {shown}{more}:"
