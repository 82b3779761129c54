"""The training data of a worker that goes at its own speed: how it reaches the tracker, and what its ranks share.

The batches of a worker of several ranks that train together are made by its first rank, which cuts them. Each rank gets
a part of every batch, as long as its share of the batch sizes, so that all take equally many steps. What the first rank
says at the beginning of a pass, where nobody is in a step, is a collective of the training threads. Parts are posted by
the thread that makes the batches, before the first rank can take its own: nobody waits for them in a step. The tracker
does not know of the other ranks: what they train on counts with the first rank's steps, which are their own too.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError, TrackerStateError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.slices.batches import SLICES_AHEAD, ReadReport, SliceBatch, cut_runs, samples_in
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import step_sizes
from lightning_bytescheduler.slices.messages import TrackerClient
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.tracked_plan import GOES_ON, WAITS, Idle, PlanThread, TrackerPlan
from lightning_bytescheduler.slices.tracker import SliceTracker

_AHEAD = 4  # slices that a worker holds to fetch them, which others may be glad of at the end of an epoch
_LOOK_S = 1.0
_PATIENCE = 3.0  # times the timeout: the first rank may wait that long for several answers of the tracker


class WorkerRanks(Protocol):
    """One rank's way to the others of its worker.

    Attributes:
        rank: This one, from 0, which leads.
        count: How many there are.
        timeout: Longest wait for the first rank, in seconds.
    """

    rank: int
    count: int
    timeout: float

    def tell(self, text: str = "") -> str:
        """The first rank's text, on all ranks: of the training threads, which all make the same calls."""

    def listen(self, heed: Callable[[str], object], on_error: Callable[[BaseException], object]) -> None:
        """Have what is posted to this rank heeded, in order, on a thread; once."""

    def post(self, rank: int, text: str) -> None:
        """Post a text to a rank, which need not listen yet. For one thread of a rank."""

    def check(self) -> None:
        """Raise what another rank has failed with, if any."""


class Part(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """One rank's part of a batch of a pass; None as the pass has no more."""

    number: int
    batch: SliceBatch | None


class CorruptSlices(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """What a rank's readers have found: reasons by key."""

    found: dict[str, str]


_DECODER: msgspec.json.Decoder[Part | CorruptSlices] = msgspec.json.Decoder(Part | CorruptSlices)


def read(text: str) -> Part | CorruptSlices:
    """What was posted.

    Raises:
        OptionError: If it is damaged.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise OptionError("text", text, f"one that a rank has posted ({error})") from error


def cut_batch(batch: SliceBatch, batch_sizes: Sequence[int]) -> list[SliceBatch]:
    """The part of each rank, none of them empty.

    Args:
        batch: Of all ranks together, no larger than their batch sizes.
        batch_sizes: Of each rank; parts are in proportion. With fewer samples than ranks, some are in several parts.
    """
    samples, left = samples_in(batch.runs), deque(batch.runs)
    parts = [cut_runs(left, size) for size in step_sizes(samples, batch_sizes)]
    found = []
    for rank in range(len(parts)):
        own = parts[rank % samples]
        # What the other ranks have of this batch may be this one's in the next.
        ahead = dict.fromkeys((*(run.slice_index for part in parts[rank + 1 :] for run in part), *batch.ahead))
        ahead.pop(own[-1].slice_index, None)
        found.append(SliceBatch(batch.epoch, own, tuple(ahead)[:SLICES_AHEAD]))
    return found


class LeadingRank:
    """What the first rank tells the others: ``OtherRanks``.

    Args:
        ranks: The way to them.
        batch_sizes: Of each rank.
    """

    def __init__(self, ranks: WorkerRanks, batch_sizes: Sequence[int]) -> None:
        self._ranks = ranks
        self._batch_sizes = tuple(batch_sizes)

    def listen(self, quarantine: Callable[[Iterable[tuple[str, str]]], None]) -> None:
        """Hear of corrupt slices: of keys and reasons, on a thread."""

        def heed(text: str) -> None:
            letter = read(text)
            if isinstance(letter, CorruptSlices):
                quarantine(letter.found.items())

        self._ranks.listen(heed, lambda error: None)  # what ends it ends the training too, which says so

    def say(self, text: str) -> None:
        """Say what is done next; on the training thread."""
        self._ranks.tell(text)

    def hand_out(self, number: int, batch: SliceBatch | None) -> SliceBatch | None:
        """Post the other ranks' parts; on the thread that makes the batches. Returns this rank's.

        Args:
            number: Of the pass.
            batch: Of all ranks together; ``None`` if the pass is over.
        """
        parts = None if batch is None else cut_batch(batch, self._batch_sizes)
        for rank in range(1, self._ranks.count):
            part = Part(number, None if parts is None else parts[rank])
            self._ranks.post(rank, msgspec.json.encode(part).decode())
        return None if parts is None else parts[0]


class FollowingPlan:
    """A further rank's batches: parts. For the training thread; what is posted comes on a thread of the ranks.

    Args:
        ranks: The way to the first rank.
        batch_size: Samples of this rank's parts.
        idle: Told what the first rank's is told, at the same moments.

    Attributes:
        batch_size: As given; the first rank's counts.
        epoch: The epoch of the data that is trained on.
    """

    def __init__(self, ranks: WorkerRanks, *, batch_size: int, idle: Idle | None = None) -> None:
        self.batch_size = batch_size
        self.epoch = 0
        self._ranks = ranks
        self._idle = idle
        self._changed = threading.Condition()
        # What follows changes under it.
        self._parts: deque[Part] = deque()
        self._error: BaseException | None = None
        ranks.listen(self._heed, self._fail)

    def __iter__(self) -> Iterator[SliceBatch]:
        number = self._begin()
        if number is None:
            return
        while (batch := self._next(number)) is not None:
            self.epoch = batch.epoch
            yield batch

    def _begin(self) -> int | None:
        """Do as the first rank does until there is a batch; returns the number of the pass, unless it is given up."""
        while True:
            said = self._ranks.tell()
            if said == WAITS:
                if self._idle is not None and self._idle.waits():
                    return None
            elif said == GOES_ON:
                if self._idle is not None:
                    self._idle.goes_on()
            else:
                return int(said)

    def _next(self, number: int) -> SliceBatch | None:
        limit = _PATIENCE * self._ranks.timeout
        deadline = time.monotonic() + limit
        with self._changed:
            while True:
                while self._parts and self._parts[0].number < number:  # of a pass that was given up
                    self._parts.popleft()
                if self._parts:
                    return self._parts.popleft().batch
                self._ranks.check()
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SchedulerTimeoutError(
                        f"The worker's first rank made no batch for {limit:.0f} s. Raise the strategy's timeout if the "
                        "coordinator may be away for longer."
                    )
                self._changed.wait(min(left, _LOOK_S))

    def _heed(self, text: str) -> None:
        letter = read(text)
        if isinstance(letter, Part):
            with self._changed:
                self._parts.append(letter)
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def received(self, report: ReadReport) -> None:
        """Tell the first rank what is corrupt."""
        if report.corrupt:
            self._ranks.post(0, msgspec.json.encode(CorruptSlices(dict(report.corrupt))).decode())

    def trained(self) -> None:
        """The first rank reports the step."""

    def keep_alive(self) -> None:
        """The first rank renews the lease."""

    def settle(self) -> None:
        """The first rank knows where the worker is."""

    def leave(self) -> None:
        """Nothing is held here."""

    def stop(self) -> bool:
        """There is no thread here."""
        return True


def require_same(trainer: pl.Trainer, option: str, here: str) -> None:
    """Compare what an option comes to on all ranks; called by all of them.

    Raises:
        OptionError: At every rank, if it is something else on one than on rank 0.
    """
    if trainer.world_size == 1:
        return
    there = trainer.strategy.broadcast(here)
    if not trainer.strategy.reduce_boolean_decision(here == there, all=True):
        raise OptionError(option, here, f"the same on every rank: on rank 0 it is {there}, on some other it is not")


def require_tracker_host(host: object) -> None:
    """Require a way to a tracker.

    Raises:
        OptionError: If it is none.
    """
    worker, workers = getattr(host, "worker", None), getattr(host, "workers", None)
    is_host = callable(getattr(host, "connect", None)) and isinstance(getattr(host, "waits", None), bool)
    if not is_host or not is_whole(workers, 1) or not is_whole(worker) or worker >= workers:
        allowed = "a TrackerHost: an object with worker (from 0), workers, waits (a bool) and connect(make)"
        raise OptionError("host", host, f"{allowed}; strategy='diloco' makes one by itself")


class TrackerHost(Protocol):
    """One worker's way to the run's slice tracker; see :meth:`~lightning_bytescheduler.SliceDataModule.bind_tracker`.

    Attributes:
        worker: Number of this worker, from 0; the same after a restart.
        workers: How many there are at the start. Others may join later.
        waits: Whether a worker that finds nothing for now when its epoch begins waits in its loader, and goes on to the
            next epoch of the data by itself. If not, its epoch of Lightning may be empty, and the strategy ends epochs
            of the data for all workers, with ``training.awaits_others()`` and ``training.end_epoch()``.
        ranks: May be left out, or ``None``: the ranks of this worker, where several train together and share its
            batches. Then ``connect`` is called on the first of them alone.
    """

    worker: int
    workers: int
    waits: bool

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        """Reach the tracker.

        Called once in a fit, when the first batch is wanted, which is after a checkpoint was loaded. At worker 0 it
        calls ``make``, offers the result to the others and returns it, or something that leads there. Elsewhere it does
        not call ``make``, and waits, for a bounded time, until worker 0 offers its tracker.

        Raises:
            Exception: If the tracker cannot be reached.
        """


class TrackedTraining:
    """The ``Plan`` of one worker. The tracker is at worker 0, which saves it too.

    Args:
        host: The way to the tracker.
        store: Of the training data.
        options: Of the tracker.
        batch_sizes: Samples of a batch, of each rank of this worker.
    """

    def __init__(
        self,
        host: TrackerHost,
        store: SliceStore,
        *,
        options: TrackerOptions,
        batch_sizes: Sequence[int],
    ) -> None:
        self._host = host
        self._store = store
        self._options = options
        self._ranks: WorkerRanks | None = getattr(host, "ranks", None)
        self._batch_sizes = tuple(batch_sizes)
        self._tracker: SliceTracker | None = None
        self._pending: Mapping[str, Any] | None = None
        self._plan: PlanThread | FollowingPlan | None = None

    @property
    def fills(self) -> bool:
        """A rank that left out a batch would leave the others of its worker alone in a step."""
        return self._ranks is not None

    @property
    def plan(self) -> PlanThread | FollowingPlan:
        """The batches of this worker.

        Raises:
            OptionError: Before there was a loader.
        """
        if self._plan is None:
            raise OptionError("plan", None, "asked for after train_dataloader()")
        return self._plan

    def __iter__(self) -> Iterator[SliceBatch]:
        return iter(self.plan)

    @property
    def epoch(self) -> int:
        """See ``Plan``."""
        return 0 if self._plan is None else self._plan.epoch

    @property
    def batches(self) -> None:
        """Nobody knows."""
        return None

    @property
    def tracker(self) -> SliceTracker | None:
        """The tracker, where it is."""
        return self._tracker

    def open(self, trainer: pl.Trainer | None) -> None:
        """Reach the tracker, once."""
        if self._plan is not None:
            return
        idle, ranks = getattr(self._host, "idle", None), self._ranks
        if ranks is not None and ranks.rank > 0:
            self._plan = FollowingPlan(ranks, batch_size=self._batch_sizes[ranks.rank], idle=idle)
            return
        leading = None if ranks is None else LeadingRank(ranks, self._batch_sizes)
        self._plan = plan = PlanThread(
            TrackerPlan(
                self._host.connect(self._make_tracker),
                worker=_name(self._host.worker),
                incarnation=uuid.uuid4().hex,
                batch_size=sum(self._batch_sizes),
                ahead=min(self._store.depth, _AHEAD),
                slices=self._store.source.slices,
                cached=self._store.cached,
                waits=self._host.waits,
            ),
            idle=idle,
            others=leading,
        )
        if leading is not None:
            leading.listen(plan.quarantine)

    def received(self, report: ReadReport) -> None:
        """Tell the tracker what is corrupt."""
        self.plan.received(report)

    def trained(self) -> None:
        """Tell the tracker where this worker is."""
        self.plan.trained()

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """The tracker says when an epoch of the data is over."""

    def keep_alive(self) -> None:
        """Renew the lease in time."""
        if self._plan is not None:
            self._plan.keep_alive()

    def awaits_others(self) -> bool:
        """Whether other workers hold all that is left of the epoch."""
        plan = self.plan
        return isinstance(plan, PlanThread) and plan.awaits_others()

    def end_epoch(self) -> None:
        """Go on to the next epoch of the data, if nothing is left of this one: for all workers at the same moment."""
        if isinstance(self.plan, PlanThread):
            self.plan.end_epoch()

    def leave(self) -> None:
        """Give back what this worker holds, while the tracker can be reached."""
        if self._plan is not None:
            self._plan.leave()

    def halt(self, timeout: float) -> bool:
        """End the plan's thread, as after a failure, when nothing can be given back; returns whether it ended in time.

        Args:
            timeout: In seconds.
        """
        return not isinstance(self._plan, PlanThread) or self._plan.stop(timeout)

    def close(self) -> None:
        """Give back what this worker holds."""
        plan, self._plan = self._plan, None
        if plan is not None:
            try:
                plan.leave()
            finally:
                plan.stop()

    def settle(self) -> None:
        """Wait until the tracker knows all that this worker has trained on."""
        if self._plan is not None:
            self._plan.settle()

    def state_dict(self) -> dict[str, Any]:
        """The tracker's at worker 0, with all that was trained on here; elsewhere nothing."""
        self.settle()
        if self._tracker is not None:
            return {"tracker": self._tracker.state_dict()}
        return {} if self._pending is None else dict(self._pending)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved; heeded where the tracker is.

        Raises:
            TrackerStateError: If it was saved by ranks that step together, or does not fit.
        """
        if state and "tracker" not in state:
            raise TrackerStateError(
                "The state of the slices was saved by ranks that step together. Resume with the strategy that it was "
                "saved with, or load only the weights."
            )
        self._pending = dict(state) or None
        if self._tracker is not None:
            self._load(self._tracker)

    def _make_tracker(self) -> SliceTracker:
        if self._tracker is None:
            catalogue = SliceCatalogue(self._store.source.slices)
            tracker = SliceTracker(catalogue, self._options, clock=time.monotonic)
            self._load(tracker)
            self._tracker = tracker
        return self._tracker

    def _load(self, tracker: SliceTracker) -> None:
        if self._pending is not None:
            workers = [_name(number) for number in range(self._host.workers)]
            tracker.load_state_dict(self._pending["tracker"], workers=workers)
            self._pending = None
            report = tracker.report()
            if report.over and not self._host.waits:  # nobody goes on to the next one by itself
                tracker.start_epoch(report.epoch + 1)


def _name(worker: int) -> str:
    return f"worker-{worker}"
