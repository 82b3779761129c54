"""Where every slice stands in an epoch of the tracker, in arrays of 17 bytes a slice; and how that is saved.

The saved state is plain values and tensors, for ``torch.load(weights_only=True)``. It is checked when it is loaded.

The epochs that a tracker hands slices out of: the running one, and the next while the last slices are held.

The workers a tracker knows: what each holds and how fast it trains, whose lease runs out, and whom to relieve.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import TrackerStateError
from lightning_bytescheduler.slices.catalogue import DataOrder, SliceCatalogue, slice_order
from lightning_bytescheduler.slices.messages import Name, Natural
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.slice import SliceState

_INTERVALS = 15


@dataclass(eq=False, slots=True)
class TrackedWorker:
    """A worker, or after a restart of the tracker, what it left.

    Attributes:
        name: The worker's.
        deadline: When it is taken for dead unless it says something, on the tracker's clock.
        prefetch: Slices it may hold that it has not begun.
        session: None as long as the worker has not joined since a state was loaded.
        incarnation: Which process of that name.
        grants: By number, in the order in which they were made.
        keeps: How many slices it keeps that it has fetched.
        speed: How fast it trains.
    """

    name: str
    deadline: float
    prefetch: int
    session: int | None = None
    incarnation: str | None = None
    grants: dict[int, Grant] = field(default_factory=dict)
    keeps: int = 0
    speed: WorkerSpeed = field(default_factory=lambda: WorkerSpeed())
    _kept: dict[int, None] = field(default_factory=dict)  # the last ones of those that it was given
    _offers: list[int] = field(default_factory=list)  # what is still to be offered
    _offers_of: int = -1  # an epoch

    @property
    def ahead(self) -> list[Grant]:
        """Grants it has not begun."""
        return [grant for grant in self.grants.values() if not grant.begun]

    @property
    def training(self) -> bool:
        """Whether it has begun one that it holds."""
        return any(grant.begun for grant in self.grants.values())

    def keep(self, index: int) -> None:
        """It is given a slice, which it fetches and keeps."""
        self._kept.pop(index, None)
        self._kept[index] = None
        if len(self._kept) > self.keeps:
            del self._kept[next(iter(self._kept))]

    def offers(self, epoch: int, ranks: npt.NDArray[np.int32]) -> Iterator[int]:
        """Slices that it keeps, in the epoch's order; each is offered once an epoch, so no request looks at all."""
        if epoch != self._offers_of:
            self._offers, self._offers_of = sorted(self._kept, key=lambda index: -int(ranks[index])), epoch
        while self._offers:
            yield self._offers.pop()

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

    Attributes:
        next_session: Number of the next session; none is used twice.
    """

    def __init__(self) -> None:
        self.next_session = 1
        self._by_name: dict[str, TrackedWorker] = {}
        self._by_session: dict[int, TrackedWorker] = {}
        self._first_deadline = math.inf  # of them all, or one before it: messages put deadlines off

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
        self._first_deadline = min(self._first_deadline, record.deadline)

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

    def expired(self, now: float) -> list[TrackedWorker]:
        """Workers whose lease is over, for the caller to remove."""
        if now < self._first_deadline:
            return []
        self._first_deadline = min((record.deadline for record in self if record.deadline > now), default=math.inf)
        return [record for record in self if record.deadline <= now]


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


_VERSION = 4

_Saved = TypeVar("_Saved")


class EpochSlices:
    """States and positions of the slices, and which comes next.

    Slices are named by their index in the catalogue. A slice's *position* is the first sample not known to be trained
    on. At any time ``trained + dropped`` and what AVAILABLE and ASSIGNED slices have left add up to all samples.

    Args:
        samples: Samples of each slice.
        epoch: Which, from 0.
        seed: Of the order.
        shuffle: Whether the order is another one in each epoch.
        left_out: Slices that are quarantined as it begins.

    Attributes:
        epoch: As given.
        states: A :class:`SliceState` each.
        positions: In samples.
        ranks: Place of each slice in the epoch's order.
        available: Slices that are AVAILABLE.
        trained: Samples known to be trained on in this epoch, each counted once.
        dropped: Samples that this epoch will not train on.
        unfinished: Slices that are AVAILABLE or ASSIGNED.
        holders: Of ASSIGNED slices.
        returned: Slices that came back from workers that died or left, since the tracker was made.
        stolen: Slices taken from a slower worker that had not begun them, since the tracker was made.
    """

    def __init__(
        self, samples: npt.NDArray[np.int64], *, epoch: int, seed: int, shuffle: bool, left_out: Iterable[int] = ()
    ) -> None:
        self.samples = samples
        self.epoch = epoch
        self._order = slice_order(len(samples), seed=seed, epoch=epoch, shuffle=shuffle)
        self.ranks: npt.NDArray[np.int32] = np.empty_like(self._order)
        self.ranks[self._order] = np.arange(len(self._order), dtype=np.int32)
        self.states: npt.NDArray[np.uint8] = np.full(len(samples), SliceState.AVAILABLE, np.uint8)
        self.states[list(left_out)] = SliceState.QUARANTINED
        self.positions: npt.NDArray[np.int64] = np.zeros(len(samples), np.int64)
        self.cursor = 0  # place in the order; whatever is before it was looked at
        self.holders: dict[int, TrackedWorker] = {}
        self.returned = self.stolen = 0
        self._places: list[int] = []  # heap of what came back; some may have been handed out again by another way
        self._count()

    def restore(self, saved: SavedEpoch) -> None:
        """Take up where this epoch was saved; the values must have been checked."""
        self.states[:] = saved.states.numpy()
        self.positions[:] = saved.positions.numpy()
        self._count()

    def _count(self) -> None:
        left = self.samples - self.positions
        ended = self.states >= SliceState.USED
        self.trained = int(self.positions.sum())
        self.dropped = int(left[ended].sum())
        self.unfinished = int(len(ended) - np.count_nonzero(ended))
        self.available = int(np.count_nonzero(self.states == SliceState.AVAILABLE))

    def held_by(self, index: int) -> tuple[TrackedWorker, Grant] | None:
        """Who holds a slice, and how."""
        holder = self.holders.get(index)
        if holder is None:
            return None
        of = (self.epoch, index)
        return holder, next(grant for grant in holder.grants.values() if (grant.epoch, grant.index) == of)

    def saved(self, workers: Iterable[TrackedWorker]) -> SavedEpoch:
        """As it is to be saved."""
        return SavedEpoch(
            epoch=self.epoch,
            states=torch.from_numpy(self.states.copy()),
            positions=torch.from_numpy(self.positions.copy()),
            workers={record.name: record.held_of(self.epoch) for record in workers},
        )

    def left(self, index: int) -> int:
        """Samples of a slice that are not known to be trained on."""
        return int(self.samples[index]) - int(self.positions[index])

    def take(self, index: int) -> bool:
        """Assign a slice, if it is available."""
        if self.states[index] != SliceState.AVAILABLE:
            return False
        self.states[index] = SliceState.ASSIGNED
        self.available -= 1
        return True

    def take_returned(self) -> int | None:
        """Assign the first slice of those that came back; None if there is none."""
        while self._places:
            index = int(self._order[heapq.heappop(self._places)])
            if self.take(index):
                return index
        return None

    def take_next(self) -> int | None:
        """Assign the next slice in the epoch's order; None if none is available there."""
        while self.cursor < len(self._order):
            index = int(self._order[self.cursor])
            self.cursor += 1
            if self.take(index):
                return index
        return None

    def train(self, index: int, position: int) -> int:
        """Move a slice's position forward; returns by how many samples. A position behind it changes nothing."""
        gained = position - int(self.positions[index])
        if gained <= 0:
            return 0
        self.positions[index] = position
        self.trained += gained
        return gained

    def finish(self, index: int) -> int:
        """All of an assigned slice was trained on; returns how many samples that adds."""
        gained = self.train(index, int(self.samples[index]))
        self._end(index, SliceState.USED)
        return gained

    def give_back(self, index: int) -> None:
        """An assigned slice comes back at its position; if nothing is left of it, it is used."""
        if not self.left(index):
            self._end(index, SliceState.USED)
            return
        self.states[index] = SliceState.AVAILABLE
        self.available += 1
        self.returned += 1
        heapq.heappush(self._places, int(self.ranks[index]))

    def drop_rest(self, index: int) -> None:
        """What an assigned slice has left is not trained on in this epoch."""
        self.dropped += self.left(index)
        self._end(index, SliceState.USED)

    def leave_out(self, index: int) -> None:
        """Leave a slice out that is quarantined; changes nothing if its part in the epoch has ended."""
        if self.states[index] < SliceState.USED:
            self.available -= int(self.states[index] == SliceState.AVAILABLE)
            self.dropped += self.left(index)
            self._end(index, SliceState.QUARANTINED)

    def _end(self, index: int, state: SliceState) -> None:
        self.states[index] = state
        self.unfinished -= 1


class SavedEpoch(msgspec.Struct, kw_only=True):
    """An epoch as it is saved: nine bytes a slice.

    Attributes:
        epoch: Which.
        states: A :class:`SliceState` for each slice.
        positions: In samples, of each.
        workers: By name, what each holds of it, in order: the slice, and whether it was begun.
    """

    epoch: Natural
    states: torch.Tensor
    positions: torch.Tensor
    workers: dict[Name, list[tuple[Natural, bool]]]

    def __post_init__(self) -> None:
        self.states, self.positions = self.states.cpu(), self.positions.cpu()


class SavedTracker(msgspec.Struct, kw_only=True):
    """A tracker as it is saved.

    Attributes:
        order: Of the slices.
        epochs: The running one, and the next if it is open; each names the same workers.
        quarantined: Reason by slice.
        next_grant: Number of the next grant.
        next_session: Number of the next session.
    """

    order: DataOrder
    epochs: Annotated[list[SavedEpoch], msgspec.Meta(min_length=1, max_length=2)]
    quarantined: dict[Natural, str]
    next_grant: Natural
    next_session: Natural


def pack(saved: SavedTracker) -> dict[str, Any]:
    """State of a tracker: plain values and tensors."""
    return {
        "version": _VERSION,
        **msgspec.structs.asdict(saved),
        "order": msgspec.structs.asdict(saved.order),
        "epochs": [msgspec.structs.asdict(epoch) for epoch in saved.epochs],
    }


def read_state(state: object, kind: type[_Saved], *, version: int, what: str) -> _Saved:
    """A saved state, typed and checked.

    Args:
        state: As it was saved.
        kind: What it should be.
        version: That this release reads.
        what: It is, to begin a sentence with.

    Raises:
        TrackerStateError: If it is of another version, or damaged.
    """
    found = state.get("version") if isinstance(state, Mapping) else None
    if not is_whole(found) or found != version:
        raise TrackerStateError(
            f"{what} is of version {found!r}, and this release reads version {version}: "
            "resume with the release that saved it."
        )
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise TrackerStateError(f"{what} is damaged: {error}.") from error


def unpack(state: Mapping[str, Any], order: DataOrder, samples: npt.NDArray[np.int64]) -> SavedTracker:
    """The tracker that was saved.

    Args:
        state: From :func:`pack`.
        order: Of the slices here.
        samples: Of each of them.

    Raises:
        TrackerStateError: If the state does not belong to these slices and this order, or is damaged.
    """
    saved = read_state(state, SavedTracker, version=_VERSION, what="The state")
    difference = order.difference(saved.order)
    if difference is not None:
        raise TrackerStateError(
            f"The state is of other slices or another order: {difference}. Resume on the slices and options it was "
            "saved with, or start anew."
        )
    if any(index >= len(samples) for index in saved.quarantined):
        raise _damaged("quarantined", "names slices that are not there")
    first = saved.epochs[0]
    for place, epoch in enumerate(saved.epochs):
        _require_whole(epoch, samples)
        if epoch.epoch != first.epoch + place or epoch.workers.keys() != first.workers.keys():
            raise _damaged("epochs", "do not follow each other, or name different workers")
    return saved


def _require_whole(saved: SavedEpoch, samples: npt.NDArray[np.int64]) -> None:
    for name, dtype in (("states", torch.uint8), ("positions", torch.int64)):
        value = getattr(saved, name)
        if value.dtype != dtype or value.shape != samples.shape:
            raise _damaged(name, f"is not a column of {dtype}, one for each slice")
    states, positions = saved.states.numpy(), saved.positions.numpy()
    if int(states.max()) > max(SliceState):
        raise _damaged("states", "holds a value that is no state")
    if ((positions < 0) | (positions > samples)).any():
        raise _damaged("positions", "has one outside its slice")
    held = sorted(index for pairs in saved.workers.values() for index, _ in pairs)
    if held != np.nonzero(states == SliceState.ASSIGNED)[0].tolist():
        raise _damaged("workers", "does not hold each assigned slice once")


def _damaged(name: str, how: str) -> TrackerStateError:
    return TrackerStateError(f"The state is damaged: its {name!r} {how}.")


_MOST = 2  # so that no slice is left behind by more than one epoch


class OpenEpochs:
    """One epoch, or two that follow each other.

    Args:
        catalogue: All slices.
        options: Their order.

    Attributes:
        quarantined: Reason by slice; what is in it as an epoch begins is left out of it.
    """

    def __init__(self, catalogue: SliceCatalogue, options: TrackerOptions) -> None:
        self.quarantined: dict[int, str] = {}
        self._catalogue = catalogue
        self._options = options
        self._open = [self._begun(0)]

    def __iter__(self) -> Iterator[EpochSlices]:
        return iter(self._open)

    @property
    def running(self) -> EpochSlices:
        """The first one of which something may be left."""
        return self._open[0]

    @property
    def newest(self) -> EpochSlices:
        """The next one if it is open, or the running one."""
        return self._open[-1]

    @property
    def over(self) -> bool:
        """Whether nothing is left of the running one."""
        return self.running.unfinished == 0

    def of(self, grant: Grant) -> EpochSlices:
        """The one that a grant is of, which is not over as long as somebody has it."""
        return self._open[grant.epoch - self.running.epoch]

    def up_to(self, epoch: int) -> Sequence[EpochSlices]:
        """Those up to an epoch, itself included."""
        return [one for one in self._open if one.epoch <= epoch]

    def open_for(self, epoch: int) -> bool:
        """Open an epoch, if it is the next one and all that is left before it is in workers' hands."""
        newest = self.newest
        if epoch != newest.epoch + 1 or len(self._open) == _MOST or newest.available:
            return False
        self._open.append(self._begun(epoch))
        return True

    def roll(self) -> bool:
        """Let the next one be the running one, if it is open and nothing is left of that; returns whether it is now."""
        if len(self._open) == 1 or not self.over:
            return False
        del self._open[0]
        return True

    def restore(self, state: SavedTracker) -> None:
        """Take up what was saved, but for who holds what; the values must have been checked."""
        self.quarantined = dict(state.quarantined)
        self._open = []
        for saved in state.epochs:
            one = self._begun(saved.epoch)
            one.restore(saved)
            self._open.append(one)

    def _begun(self, epoch: int) -> EpochSlices:
        return EpochSlices(
            self._catalogue.samples,
            epoch=epoch,
            seed=self._options.seed,
            shuffle=self._options.shuffle,
            left_out=self.quarantined,
        )
