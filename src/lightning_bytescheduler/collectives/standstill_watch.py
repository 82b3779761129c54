"""Finds out, while this rank waits, whether the ranks wait for each other for good.

For the fault board's thread. A rank tells where it stands four times a second, but looks at the others only when it has
been waiting for a while itself, so that a training which goes on costs the store nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from lightning_bytescheduler.collectives.standing import Standing, Standstill, find_standstill

__all__ = ["StandstillWatch"]

_CURIOUS_S = 1.0  # of waiting, before the others are looked at
_CERTAIN_S = 3.0
_UNCERTAIN_S = 15.0
_FRESH_BEATS = 8
_LOOK_S = 0.5


class StandstillWatch:
    """One rank's view of where all ranks stand.

    Args:
        store: Where the ranks tell it.
        rank: This rank.
        others: All other ranks.
        period: Between two beats, in seconds.
    """

    def __init__(self, store: dist.Store, rank: int, others: Sequence[int], period: float) -> None:
        self._store = store
        self._rank = rank
        self._others = others
        self._fresh = _FRESH_BEATS * period
        self._every = max(_LOOK_S, len(others) / 64)  # spares the store's host when there are many ranks
        self.told: dict[int, Standing] = {}  # by all ranks, as of the last survey
        self._told: Standing | None = None
        self._told_at = 0.0
        self._looked_at = 0.0
        self._stands: dict[int, tuple[bytes, float]] = {}  # and since when it has been the same
        self._beats: dict[int, tuple[int, float]] = {}  # and when it was first seen

    def tell(self, standing: Standing) -> None:
        """Tell the others where this rank stands; before the beat, so that whoever sees the beat sees this."""
        if standing != self._told:
            self._store.set(f"stands/{self._rank}", standing.encode())
            self._told, self._told_at = standing, time.monotonic()

    def survey(self) -> None:
        """Note where all ranks have told that they stand, for :meth:`told`."""
        found = {}
        for rank in self._others:
            if self._store.check([f"stands/{rank}"]):
                found[rank] = Standing.decode(self._store.get(f"stands/{rank}"))
        if found and self._told is not None:
            self.told = {**found, self._rank: self._told}

    def look(self) -> Standstill | None:
        """Look whether the ranks wait for each other for good; seldom does anything."""
        now = time.monotonic()
        if self._told is None or not self._told.waits or now < self._told_at + _CURIOUS_S:
            self._stands, self._beats = {}, {}
            return None
        if now < self._looked_at + self._every:
            return None
        self._looked_at = now
        keys = [f"stands/{rank}" for rank in self._others]
        if not self._store.check(keys):
            return None  # somebody is not there yet
        for rank, key in zip(self._others, keys, strict=True):
            count = self._store.add(f"alive/{rank}", 0)
            text = self._store.get(key)
            if rank not in self._stands or self._stands[rank][0] != text:
                self._stands[rank] = text, now
            if rank not in self._beats or self._beats[rank][0] != count:
                self._beats[rank] = count, now
        return self._conclude(now)

    def _conclude(self, now: float) -> Standstill | None:
        standings = {rank: Standing.decode(text) for rank, (text, _) in self._stands.items()}
        if any(now > self._beats[rank][1] + self._fresh for rank, one in standings.items() if not one.ended):
            return None  # what was told may be out of date
        if self._told is None:
            return None
        standstill = find_standstill({**standings, self._rank: self._told})
        if standstill is None:
            return None
        same_since = max(self._told_at, *(since for _, since in self._stands.values()))
        patience = _CERTAIN_S if standstill.certain else _UNCERTAIN_S
        return standstill if now >= same_since + patience else None
