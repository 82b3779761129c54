"""What the tracker knows of one worker."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.data.worker_speed import WorkerSpeed

__all__ = ["CachedSlices", "Grant", "WorkerRecord"]


@dataclass(kw_only=True, slots=True)
class Grant:
    """A slice in a worker's hands.

    Attributes:
        number: Never used twice.
        index: The slice's, in the catalogue.
        begun: The worker trains on it, or may.
        told: The worker is known to know of it.
    """

    number: int
    index: int
    begun: bool = False
    told: bool = False


class CachedSlices:
    """The slices a worker has locally, and which of them to offer it next.

    Each is offered once an epoch, in the epoch's order, whether or not it is still to be had: what is told of a slice
    is paid for once, and no request looks through all of them.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._offers: list[tuple[int, int]] = []  # heap of place in the order and index
        self._epoch = -1

    def add(self, indices: Iterable[int], ranks: npt.NDArray[np.int32]) -> None:
        """Slices the worker has got."""
        for index in indices:
            if index not in self._known:
                self._known.add(index)
                heapq.heappush(self._offers, (int(ranks[index]), index))

    def discard(self, index: int) -> None:
        """A slice that the worker has no longer."""
        self._known.discard(index)

    def offers(self, epoch: int, ranks: npt.NDArray[np.int32]) -> Iterable[int]:
        """Slices to try, first the one that comes first in the epoch; each one taken from here is not offered again."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._offers = sorted((int(ranks[index]), index) for index in self._known)
        while self._offers:
            _, index = heapq.heappop(self._offers)
            if index in self._known:
                yield index


class WorkerRecord:
    """A worker, or after a restart of the tracker, what it left.

    Attributes:
        name: The worker's.
        session: None as long as the worker has not joined since a state was loaded.
        incarnation: Which process of that name.
        deadline: When it is taken for dead unless it says something, on the tracker's clock.
        prefetch: Slices it may hold that it has not begun.
        grants: By number, in the order in which they were made.
        taken: Numbers of this epoch's grants that were taken from it.
        cached: What it has locally.
        speed: How fast it trains.
    """

    def __init__(
        self, name: str, *, session: int | None, incarnation: str | None, deadline: float, prefetch: int
    ) -> None:
        self.name = name
        self.session = session
        self.incarnation = incarnation
        self.deadline = deadline
        self.prefetch = prefetch
        self.grants: dict[int, Grant] = {}
        self.taken: set[int] = set()
        self.cached = CachedSlices()
        self.speed = WorkerSpeed()

    @property
    def ahead(self) -> list[Grant]:
        """Grants it has not begun."""
        return [grant for grant in self.grants.values() if not grant.begun]

    @property
    def training(self) -> bool:
        """Whether it has begun one that it holds."""
        return any(grant.begun for grant in self.grants.values())
