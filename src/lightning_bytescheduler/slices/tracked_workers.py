"""The workers a tracker knows: what each holds and how fast it trains, whose lease runs out, and whom to relieve."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

__all__ = ["Grant", "Holder", "TrackedWorker", "WorkerRegistry", "WorkerSpeed", "holder_to_relieve"]

_INTERVALS = 15


class TrackedWorker:
    """A worker, or after a restart of the tracker, what it left.

    Attributes:
        name: The worker's.
        session: None as long as the worker has not joined since a state was loaded.
        incarnation: Which process of that name.
        deadline: When it is taken for dead unless it says something, on the tracker's clock.
        prefetch: Slices it may hold that it has not begun.
        grants: By number, in the order in which they were made.
        taken: Numbers of the open epochs' grants that were taken from it.
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

    def held_of(self, epoch: int) -> list[tuple[int, bool]]:
        """What it holds of an epoch, in order: the slice, and whether it was begun."""
        return [(grant.index, grant.begun) for grant in self.grants.values() if grant.epoch == epoch]


@dataclass(kw_only=True, slots=True)
class Grant:
    """A slice in a worker's hands.

    Attributes:
        number: Never used twice.
        epoch: The slice is to be used in it.
        index: The slice's, in the catalogue.
        begun: The worker trains on it, or may.
        told: The worker is known to know of it.
    """

    number: int
    epoch: int
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


class WorkerSpeed:
    """Median over the last reports, so that one long pause (a checkpoint, a validation) says nothing.

    Time in which the worker has no slice begun is not counted. A worker that falls silent gets slower by the second.
    """

    def __init__(self) -> None:
        self._intervals: deque[tuple[int, float]] = deque(maxlen=_INTERVALS)
        self._since: float | None = None
        self._samples = 0  # reported since then; several reports may come at one reading of the clock

    def begin(self, now: float) -> None:
        """The worker trains from now on, if it did not already. ``now`` in seconds."""
        if self._since is None:
            self._since, self._samples = now, 0

    def report(self, samples: int, now: float) -> None:
        """The worker trained on so many samples since its last report."""
        if self._since is None:
            return
        self._samples += samples
        if self._samples > 0 and now > self._since:
            self._intervals.append((self._samples, now - self._since))
            self._since, self._samples = now, 0

    def pause(self) -> None:
        """The worker has nothing to train on."""
        self._since = None

    def samples_per_second(self, now: float) -> float | None:
        """The speed, more than 0, or None if there was no report to tell it from."""
        if not self._intervals:
            return None
        speed = median(samples / seconds for samples, seconds in self._intervals)
        if self._since is not None and now > self._since:
            usual = median(samples for samples, _ in self._intervals)
            speed = min(speed, usual / (now - self._since))
        return speed


class WorkerRegistry:
    """Workers and their leases.

    Any message renews a worker's lease, so that is an assignment only; the queue of deadlines keeps one entry per
    worker, which is corrected when it comes up.

    Attributes:
        next_session: Number of the next session; none is used twice.
    """

    def __init__(self) -> None:
        self.next_session = 1
        self._by_name: dict[str, TrackedWorker] = {}
        self._by_session: dict[int, TrackedWorker] = {}
        self._deadlines: list[tuple[float, int, TrackedWorker]] = []
        self._entries = 0  # breaks ties between deadlines

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[TrackedWorker]:
        return iter(self._by_name.values())

    def named(self, name: str) -> TrackedWorker | None:
        """The worker of a name, joined or not."""
        return self._by_name.get(name)

    def of_session(self, session: int) -> TrackedWorker | None:
        """The worker of a session, or None if that is over."""
        return self._by_session.get(session)

    def add(self, record: TrackedWorker) -> None:
        """Keep a worker whose name is not known, and watch its lease."""
        self._by_name[record.name] = record
        self._watch(record)

    def open_session(self, record: TrackedWorker) -> int:
        """Number of a new session of a worker that has none."""
        record.session = self.next_session
        self._by_session[record.session] = record
        self.next_session += 1
        return record.session

    def remove(self, record: TrackedWorker) -> None:
        """Forget a worker."""
        del self._by_name[record.name]
        if record.session is not None:
            del self._by_session[record.session]

    def expired(self, now: float) -> Iterator[TrackedWorker]:
        """Workers whose lease is over; whoever iterates removes each."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, record = heapq.heappop(self._deadlines)
            if self._by_name.get(record.name) is not record:
                continue  # it was removed before
            if record.deadline > now:
                self._watch(record)
            else:
                yield record

    def _watch(self, record: TrackedWorker) -> None:
        self._entries += 1
        heapq.heappush(self._deadlines, (record.deadline, self._entries, record))


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A worker at an epoch's end.

    Attributes:
        left: Samples left in all slices it holds.
        last: Samples left in the last slice it holds and has not begun; 0 if there is none.
        speed: Samples per second, or None if it is not known.
    """

    left: int
    last: int
    speed: float | None


def holder_to_relieve(asking: Holder, others: Sequence[Holder]) -> int | None:
    """Index of the holder that would be done last, if the asking worker would be done with that slice sooner.

    An unknown speed is taken for the median of the known ones. As the time at which the slice is done gets strictly
    shorter, workers of constant speed never take a slice back and forth.
    """
    known = [holder.speed for holder in (asking, *others) if holder.speed is not None]
    usual = median(known) if known else 1.0

    def seconds(samples: int, holder: Holder) -> float:
        return samples / (usual if holder.speed is None else holder.speed)

    candidates = [index for index, holder in enumerate(others) if holder.last]
    if not candidates:
        return None
    slowest = max(candidates, key=lambda index: (seconds(others[index].left, others[index]), -index))
    victim = others[slowest]
    sooner = seconds(asking.left + victim.last, asking) < seconds(victim.left, victim)
    return slowest if sooner else None
