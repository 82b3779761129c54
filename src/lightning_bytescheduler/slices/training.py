"""The training data of a worker that runs at its own speed: its way to the tracker, and what its ranks share.

A thread, ``bytescheduler-slice-plan``, requests slices, begins them, makes batches of them ahead of need, and reports
what was trained on: no step waits for the tracker. The training takes available batches and leaves notes. It waits for
the thread where it waits for data (a pass has begun, or the tracker is slower than the training), and where it needs an
answer: at the end of a round or an epoch, and before a position is saved. There is one lock; nothing is called with it
held.

If a worker has several ranks that train together, its first rank takes the batches and sends each to the others, by a
collective of the training threads, which are in step. Each rank takes a part, in proportion to the batch sizes, so that
all take equally many steps. The tracker does not know the other ranks: what they train on counts with the first rank's
steps.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import msgspec

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import CoordinatorError, OptionError, SchedulerTimeoutError, TrackerStateError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.slices.catalogue import corrupt_on_any
from lightning_bytescheduler.slices.epoch_plan import (
    SLICES_AHEAD,
    EpochPlan,
    ReadReport,
    SampleRun,
    SliceBatch,
    cut_runs,
    ends_restored_epoch,
    samples_in,
    step_sizes,
)
from lightning_bytescheduler.slices.slice import Runs, Slice, joined, samples_of, without
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.tracker import (
    AskLater,
    Assignment,
    Call,
    HeldSlice,
    JoinAgain,
    Joined,
    JoinTracker,
    QuarantineSlice,
    Receipt,
    ReportProgress,
    RequestSlice,
    SliceTracker,
    TrackerClient,
    TrainedRun,
    WaitReason,
    by_slice,
)

_T = TypeVar("_T")
_NAME = "bytescheduler-slice-plan"
_AHEAD = 4  # slices that a worker holds to fetch them; others may need them at the end of an epoch
_LOOK_S = 1.0
_MOMENT_S = 0.2
_ANSWER_S = 1800.0  # longest wait for an answer of the tracker
_STOP_S = 5.0
_FEWEST, _MOST = 2, 64  # batches that are made ahead of need
_AGAIN = 0.25  # seconds before the tracker is asked again after it had nothing
_GIVEN_OUT = (WaitReason.OVER, WaitReason.MERGING, WaitReason.HELD)  # nothing of the epoch is available now
_WAITS = "waits"  # sent to ranks in place of a batch, or of the end of a pass
_TURN: msgspec.json.Decoder[SliceBatch | str | None] = msgspec.json.Decoder(SliceBatch | str | None)


class Idle(Protocol):
    """Learns that a worker has nothing to train on. Called by the training thread, without a lock."""

    def waits(self) -> bool:
        """Called repeatedly while others hold what is left. Returns whether to give up."""

    def goes_on(self) -> None:
        """Called when there is data again."""


class WorkerRanks(Protocol):
    """The ranks of one worker, for their training threads, which all make the same calls."""

    def tell(self, text: str = "") -> str:
        """Return the first rank's text on all ranks."""

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of all ranks' numbers on all ranks."""


def cut_batch(batch: SliceBatch, batch_sizes: Sequence[int]) -> list[SliceBatch]:
    """Return the part of each rank, none of them empty.

    Args:
        batch: Batch of all ranks together, at most the sum of their batch sizes.
        batch_sizes: Batch size of each rank; parts are in proportion. With fewer samples than ranks, some are repeated.
    """
    samples, left = samples_in(batch.runs), deque(batch.runs)
    parts = [cut_runs(left, size) for size in step_sizes(samples, batch_sizes)]
    found = []
    for rank in range(len(parts)):
        own = parts[rank % samples]
        # The other ranks' slices of this batch may be this rank's in the next.
        ahead = dict.fromkeys((*(run.slice_index for part in parts[rank + 1 :] for run in part), *batch.ahead))
        ahead.pop(own[-1].slice_index, None)
        found.append(SliceBatch(batch.epoch, own, tuple(ahead)[:SLICES_AHEAD]))
    return found


def require_same(trainer: pl.Trainer, option: str, here: str, given: object = "") -> None:
    """Compare an option's result on all ranks, which call this together.

    Args:
        trainer: The Trainer.
        option: The option.
        here: Its result on this rank.
        given: What it was made from on this rank, which may differ.

    Raises:
        OptionError: On every rank, if it differs from rank 0's on one.
    """
    if trainer.world_size == 1:
        return
    there, first = trainer.strategy.broadcast((here, given))
    if not trainer.strategy.reduce_boolean_decision(here == there, all=True):
        raise OptionError(option, f"{given} {here}".strip(), f"the same on every rank: it is {first} {there} on rank 0")


class TrackerHost(Protocol):
    """One worker's way to the run's slice tracker; see :meth:`~lightning_bytescheduler.SliceDataModule.bind_tracker`.

    Attributes:
        worker: Number of this worker, from 0; the same after a restart.
        workers: Number of workers at the start. Others may join later.
        waits: Whether each Lightning epoch of a worker is of the next epoch of the data, and waits in its loader until
            that can begin. If not, the strategy ends epochs of the data for all workers, with ``training.rest()`` and
            ``training.end_epoch()``. A Lightning epoch is empty where other workers have taken all there is.
        counts_merged: Optional, ``False``: whether the tracker counts a sample when it is part of the run's weights,
            and ``training.merged`` and ``training.reset`` are called.
        ranks: Optional, or ``None``: a ``WorkerRanks``, if several ranks train together as this worker and share its
            batches. Then ``connect`` is called only on the first of them.
        idle: Optional, or ``None``: an ``Idle``, called while a pass that has begun waits.
    """

    worker: int
    workers: int
    waits: bool

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        """Connect to the tracker.

        Called once in a fit, when the first batch is requested, after a checkpoint was loaded. On worker 0 it calls
        ``make``, offers the tracker to the others and returns it, or a proxy. On others it waits, for a bounded time,
        until worker 0 offers its tracker.

        Raises:
            Exception: If the tracker cannot be reached.
        """


@dataclass(eq=False, kw_only=True, slots=True)
class _Held:
    """A slice of this worker.

    Attributes:
        todo: Samples that were not handed out to readers.
        out: Samples that were handed out, but not trained on.
        unmerged: Samples that were trained on, but that the tracker does not count yet.
        told: How many trained samples were last reported to the tracker; ``None`` before the first report.
    """

    grant: int
    slice: Slice
    todo: Runs
    out: Runs = field(default_factory=list)
    unmerged: Runs = field(default_factory=list)
    begun: bool = False
    told: int | None = None

    @property
    def trained(self) -> int:
        """Samples of it that are trained on, by this worker or before."""
        return self.slice.samples - samples_of(self.todo) - samples_of(self.out)

    @property
    def is_done(self) -> bool:
        """Whether all of it is trained on and counts."""
        return not (self.todo or self.out or self.unmerged)


@dataclass(eq=False, slots=True)
class _Pass:
    """One pass of a plan over its data.

    Attributes:
        repeats: Whether it trains on slices of the last pass's epoch that have come back.
        may_end: Whether it ends where it finds no batch, instead of waiting.
        goes_on: Reasons for finding no batch with which it goes on to the next epoch.
        has_ended: Whether it ended as all data up to its epoch was given out.
        is_cut: Whether it ended before that, as the tracker was taken back.
    """

    repeats: bool = False
    may_end: bool = False
    goes_on: Sequence[WaitReason] = ()
    has_ended: bool = False
    is_cut: bool = False


class EpochOfRun(NamedTuple):
    """An epoch of the data, and the tracker that counts it."""

    run: str
    epoch: int


@dataclass(eq=False)
class TrackerPlan:
    """The batches of a worker that trains at its own speed. For one thread.

    It requests slices from the tracker one at a time, some ahead of need, begins each before its first sample is handed
    out, and reports what was trained on.

    A pass ends, with a smaller batch if necessary, when nothing of its epoch is available *now*: others may hold what
    is left, or have trained on all of it, so that a pass may have no batch. The next pass is of the next epoch, which
    the tracker opens then. So each pass has slices of one epoch, and of the previous one only what has come back from
    others; no batch has samples of both. Workers that begin with the same epoch and make as many passes train on as
    many epochs. Where a tracker was taken back to an earlier epoch, a pass goes through that and those that follow,
    until the one that it was in. A pass does not wait while one of its batches may be untrained, as others may wait for
    that. So only a pass that has just begun waits if its epoch cannot be opened yet. With ``waits=False`` a pass does
    not go on to another epoch, and the code that ends epochs for all workers together calls ``rest`` and ``end_epoch``.

    A checkpoint says which epoch of which tracker comes next. Another tracker counts its epochs by itself, so there the
    first pass is of the newest one, or goes on if all of that counts.

    Args:
        ahead: Slices to hold that are not begun, so that they can be fetched.
        waits: Whether each pass is of the next epoch, and waits for it.
        resumes: Whether its training goes on from a checkpoint.
        begins: The position of that checkpoint, if it has one.
        counts_merged: Whether a slice is held until all of it is known to be in the weights.
        clock: Returns monotonic seconds.

    Raises:
        OptionError: If the batch size is not allowed; from ``poll``, if the tracker has other slices.

    Attributes:
        batch_size: Samples of the batches from the next one on; may be changed at any time.
        epoch: The epoch of the data that is requested; each batch has its own.
    """

    client: TrackerClient
    _: KW_ONLY
    worker: str
    incarnation: str
    batch_size: int
    ahead: int = 2
    slices: Sequence[Slice]
    waits: bool = True
    resumes: InitVar[bool] = False
    begins: InitVar[EpochOfRun | None] = None
    counts_merged: bool = False
    clock: Callable[[], float] = time.monotonic
    epoch: int = field(default=0, init=False)

    def __post_init__(self, resumes: bool, begins: EpochOfRun | None) -> None:
        require_whole("batch_size", self.batch_size, 1)
        self._lags: int | None = self.waits and not resumes  # epochs behind the tracker's at the first joining
        self._run = None if begins is None else begins.run
        self._last_epoch = -1 if begins is None else begins.epoch - 1  # the one that the pass has to reach
        self._pass = _Pass(has_ended=True)  # before the first one
        self._session = 0  # 0: not joined
        self._held: dict[tuple[int, int], _Held] = {}  # by epoch and slice
        self._reason: WaitReason | None = None  # why there was no slice of this epoch
        self._ask_at = 0.0

    def begin_pass(self, *, repeats: bool = False) -> None:
        """Begin a pass, which hands out again what was not trained on.

        Args:
            repeats: Whether it trains only on slices of the last pass's epoch that have come back.
        """
        self.report()
        is_through = self._is_through
        for held in self._held.values():
            held.todo, held.out = joined([*held.todo, *held.out]), []
        last, self._pass = self._pass, _Pass(repeats, may_end=repeats or not self.waits)
        if self.waits and not repeats:
            if is_through:
                self._last_epoch += 1
            elif last.may_end and not last.is_cut:  # a limit has ended the pass, maybe just where its epoch ended
                self._pass.goes_on = _GIVEN_OUT

    def poll(self) -> SliceBatch | float | None:
        """Return the next batch, the seconds after which to ask again, or ``None`` if the pass is over."""
        own = self._pass
        while (batch := self._next()) is None:
            is_given_out = self._reason in _GIVEN_OUT
            if (is_given_out and self.epoch < self._last_epoch) or self._reason in own.goes_on:
                self._go_on()
                continue
            # Others may say in a moment, after a restart of the tracker, that they hold less than it knows.
            if is_given_out or (own.may_end and self._reason is not WaitReason.SOON):
                own.has_ended = is_given_out
                own.is_cut = self.waits and not own.repeats and not is_given_out
                return None
            return max(self._ask_at - self.clock(), 0.0)
        own.may_end, own.goes_on = True, ()
        return batch

    @property
    def is_cut(self) -> bool:
        """Whether the last pass ended before all of its epoch was given out, as the tracker was taken back."""
        return self._pass.is_cut

    @property
    def _is_through(self) -> bool:
        """Whether the pass was trained to its end; a limit may leave a batch that was handed out ahead."""
        return self._pass.has_ended and not any(held.out for held in self._held.values())

    @property
    def position(self) -> EpochOfRun | None:
        """The epoch of the data with which a training goes on from here; ``None`` if passes belong to no epoch."""
        if self._run is None or not self.waits:
            return None
        return EpochOfRun(self._run, self._last_epoch + self._is_through)

    # ------------------------------------------------------------------ reports of the training

    def quarantine(self, corrupt: Iterable[tuple[str, str]]) -> None:
        """Report slices that readers have found corrupt."""
        self.report()
        for key, reason in corrupt:
            self._drop(held.grant for held in self._held.values() if held.slice.key == key)
            if self._session:
                self._tell(QuarantineSlice(session=self._session, key=key, reason=reason))

    def trained(self, batch: SliceBatch) -> None:
        """Record that a batch was trained on. Samples that were taken from this worker do not count."""
        for run in batch.runs:
            if (held := self._held.get((batch.epoch, run.slice_index))) is not None:
                left = without(held.out, [(run.start, run.stop)])
                held.unmerged += without(held.out, left)
                held.out = left

    def report(self) -> None:
        """Report to the tracker how far each slice is trained on."""
        for place, held in list(self._held.items()):
            if held.begun and held.told != held.trained and self._held.get(place) is held:  # not taken away since
                self._trains(place, held)

    def merged(self, runs: Iterable[TrainedRun]) -> None:
        """Record that samples are part of the weights."""
        for place, own in by_slice(runs).items():
            if (held := self._held.get(place)) is not None:
                held.unmerged = without(held.unmerged, own)
                if held.is_done:
                    del self._held[place]

    def reset(self, unmerged: Iterable[TrainedRun]) -> None:
        """Find out from the tracker what is left to train on: updates made of some samples are lost, or may be.

        Args:
            unmerged: Samples that this worker has trained on and that are still to become part of the weights.
        """
        known = by_slice(unmerged)
        for place, held in self._held.items():
            held.unmerged = known.get(place, [])
        if self._session:
            self._join()

    def rest(self) -> bool | None:
        """Whether anything is left to train on up to the epoch of this pass; ``None`` if all samples count.

        Where all workers end an epoch together, this takes no slice from another worker: its pass has ended.
        """
        self.report()
        self._reason = None  # it may have been over before the tracker was taken back
        # Samples that were handed out have been trained on when this is called, or will be handed out again.
        while not any(held.todo or held.out for held in self._held.values()):
            if not self._ask(looks=not self.waits):
                if self._reason not in _GIVEN_OUT or self.epoch >= self._last_epoch:
                    return None if self._reason is WaitReason.OVER else False
                self._go_on()
        return True

    def end_epoch(self) -> None:
        """Go on to the next epoch, if nothing is left of this one."""
        if self.rest() is None:
            self._go_on()

    # ------------------------------------------------------------------ internal

    def _next(self) -> SliceBatch | None:
        runs: list[SampleRun] = []
        missing = self.batch_size
        begins = None  # the session and the epoch
        while missing and (found := self._current()) is not None:
            (epoch, index), held = found
            if runs and (self._session, epoch) != begins:
                break
            begins = self._session, epoch
            start, end = held.todo[0]
            stop = min(end, start + missing)
            held.todo[:1] = [(stop, end)] if stop < end else []
            held.out.append((start, stop))
            runs.append(SampleRun(index, start, stop))
            missing -= stop - start
        if begins is None:
            return None
        while len(self._waiting()) < self.ahead and self.clock() >= self._ask_at and self._ask():
            pass
        return SliceBatch(begins[1], tuple(runs), tuple(self._waiting()))

    def _current(self) -> tuple[tuple[int, int], _Held] | None:
        """Return the slice to train on, begun, with its place."""
        while True:
            # Slices of the previous epoch come first, as others may wait for them.
            for place, held in sorted(self._held.items(), key=lambda item: (not item[1].begun, item[0][0])):
                if self._held.get(place) is held and held.todo:
                    held.begun = held.begun or self._trains(place, held)
                    if held.begun:
                        return place, held
            if not self._ask():
                return None

    def _waiting(self) -> list[int]:
        """Return slices that are held ahead of need."""
        waiting = [place for place, held in self._held.items() if held.todo and not held.begun]
        return [index for _, index in sorted(waiting, key=lambda place: place[0])]

    def _trains(self, place: tuple[int, int], held: _Held) -> bool:
        """Report a slice's position; returns whether this worker may train on it. Drops it if not, or if all counts."""
        held.told = held.trained
        accepted = self._tell(ReportProgress(session=self._session, grant=held.grant, trained=held.trained))
        if accepted is None:  # this worker has joined again, with another grant if the slice is still its own
            return held.begun and self._held.get(place) is held
        if accepted and not self.counts_merged:
            held.unmerged = []
        if not accepted or held.is_done:
            self._drop((held.grant,))
        return accepted

    def _go_on(self) -> None:
        self.epoch += 1
        self._last_epoch = max(self._last_epoch, self.epoch)
        self._reason, self._ask_at = None, 0.0

    def _ask(self, *, looks: bool = False) -> bool:
        """Request one more slice; returns whether something has changed."""
        if not self._session:
            self._join()
        elif self._reason is WaitReason.OVER:
            return False
        holding = tuple(held.grant for held in self._held.values())
        request = RequestSlice(session=self._session, epoch=self.epoch, holding=holding, looks=looks)
        answer = cast(Assignment | AskLater | JoinAgain, self._call(request, Assignment, AskLater, JoinAgain))
        if isinstance(answer, JoinAgain):
            self._join()
            return True
        self._drop(answer.revoked)
        if isinstance(answer, Assignment):
            self._hold(answer)
            self._reason = None
            return True
        self._reason, self._ask_at = answer.reason, self.clock() + _AGAIN
        return False

    def _join(self) -> None:
        """Join, or join again, and go on with slices that are still this worker's."""
        former = dict(self._held)
        holds = tuple(HeldSlice(*place, held.begun) for place, held in former.items())
        joined = self._call(JoinTracker(worker=self.worker, incarnation=self.incarnation, holds=holds), Joined)
        self._session, self._reason, self._ask_at = joined.session, None, 0.0
        if self._lags is not None and joined.run != self._run:
            first = max(joined.epoch - self._lags, 0)
            self._last_epoch = first - (self.waits and self._pass.has_ended)  # one less where no pass has begun
            self._pass.goes_on = (WaitReason.OVER,) if self.waits else ()
        self._lags, self._run = None, joined.run
        self.epoch = max(min(joined.epoch, self._last_epoch), 0)
        self._held.clear()
        for answer in joined.held:
            self._hold(answer, former.get((answer.epoch, answer.slice_index)))

    def _hold(self, answer: Assignment, held: _Held | None = None) -> None:
        """Hold a slice; ``held`` is the same, if it was held before."""
        index = answer.slice_index
        here = self.slices[index] if index < len(self.slices) else None
        if here is None or (here.key, here.samples) != (answer.key, answer.samples):
            there = f"{answer.key!r}, of {answer.samples} samples"
            raise OptionError("slices", here, f"the tracker's at every worker, where slice {index} is {there}")
        if held is None:
            held = _Held(grant=answer.grant, slice=here, todo=[])
        held.grant, held.told = answer.grant, None
        held.todo = without(answer.todo, [*held.out, *held.unmerged])
        self._held[answer.epoch, index] = held

    def _tell(self, message: Call) -> bool | None:
        """Returns whether a message counts, or ``None`` if this worker had to join again."""
        reply = cast(Receipt | JoinAgain, self._call(message, Receipt, JoinAgain))
        if isinstance(reply, JoinAgain):
            self._join()
            return None
        return reply.accepted

    def _call(self, message: Call, *kinds: type[_T]) -> _T:
        reply = self.client.answer(message)
        if not isinstance(reply, kinds):
            raise CoordinatorError(f"The tracker answers {type(reply).__name__} to {type(message).__name__}.")
        return reply

    def _drop(self, grants: Iterable[int]) -> None:
        gone = set(grants)
        self._held = {place: held for place, held in self._held.items() if held.grant not in gone}


@dataclass(eq=False, slots=True)
class _Ahead:
    """Batches that are made ahead for one pass of the training.

    Attributes:
        ready: Batches that were made and not taken.
        has_begun: Whether the plan has begun the pass.
        is_over: Whether no more batches will be made.
    """

    ready: deque[SliceBatch] = field(default_factory=deque)
    has_begun: bool = False
    is_over: bool = False


class _PlanThread:
    """Runs the training's notes to its plan on a separate thread, in order, and makes batches ahead in between.

    Its methods are for the training thread. They raise the error with which the separate thread has ended.

    Attributes:
        plan: As given; used only by the thread.
    """

    def __init__(self, plan: TrackerPlan) -> None:
        self.plan = plan
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # Guarded by the condition above.
        self._notes: deque[Callable[[TrackerPlan], object]] = deque()
        self._pass = _Ahead(is_over=True)
        self._depth = _FEWEST
        self._error: BaseException | None = None
        self._stopping = False

    def note(self, note: Callable[[TrackerPlan], object]) -> None:
        """Run ``note`` on the thread, later."""
        with self._changed:
            self._check()
            self._notes.append(note)
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def ask(self, question: Callable[[TrackerPlan], _T]) -> _T:
        """Run ``question`` on the thread, and wait for its result.

        Raises:
            SchedulerTimeoutError: If that takes too long, or the thread has ended.
        """
        answers: list[_T] = []
        self.note(lambda plan: answers.append(question(plan)))
        with self._changed:
            self._changed.wait_for(lambda: answers or self._error or self._stopping, _ANSWER_S)
            self._check()
            if not answers:
                raise SchedulerTimeoutError("The tracker of slices has not answered in time.")
        return answers[0]

    def position(self) -> EpochOfRun | None:
        """Return the plan's position. A thread that was halted is not asked: it may still wait for its tracker."""
        with self._changed:
            is_halted = self._stopping
        return self.plan.position if is_halted else self.ask(lambda plan: plan.position)

    def begin(self, *, repeats: bool) -> _Ahead:
        """Begin a pass, which ends the one before."""
        with self._changed:
            own = self._pass = _Ahead()

        def begin(plan: TrackerPlan) -> None:
            if self._pass is own:
                plan.begin_pass(repeats=repeats)
                own.has_begun = True

        self.note(begin)
        return own

    def take(self, own: _Ahead, *, has_given: bool, timeout: float) -> SliceBatch | str | None:
        """Return the next batch of a pass, ``_WAITS`` if there is none yet, or ``None`` if the pass is over."""
        with self._changed:
            if has_given and not own.ready and not own.is_over:
                self._depth = min(2 * self._depth, _MOST)  # the training is faster than the tracker answers
            is_known = self._changed.wait_for(
                lambda: own.ready or own.is_over or self._pass is not own or self._error or self._stopping, timeout
            )
            self._check()
            if not is_known:
                return _WAITS
            if self._pass is not own or not own.ready:
                return None
            self._changed.notify_all()
            return own.ready.popleft()

    def halt(self, timeout: float) -> bool:
        """End the thread after its notes; idempotent. Returns whether it ended in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def _makes(self) -> bool:
        return self._pass.has_begun and not self._pass.is_over and len(self._pass.ready) < self._depth

    def _run(self) -> None:
        try:
            wait = 0.0  # before the tracker is asked again
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._notes or self._stopping, wait)
                    self._changed.wait_for(lambda: self._notes or self._stopping or self._makes)
                    notes, self._notes = self._notes, deque()
                    if self._stopping and not notes:
                        return
                for note in notes:
                    note(self.plan)
                self.plan.report()
                with self._changed:
                    self._changed.notify_all()  # questions were answered
                    own, makes = self._pass, self._makes and not self._stopping
                found = self.plan.poll() if makes else 0.0
                with self._changed:
                    wait = found if isinstance(found, float) else 0.0
                    own.is_over = own.is_over or found is None
                    if isinstance(found, SliceBatch):
                        own.ready.append(found)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


@dataclass(eq=False)
class TrackedTraining:
    """The batches of one worker. The tracker is at worker 0, which also saves it, or at a coordinator.

    For the training thread, except :meth:`halt`.

    Raises:
        Exception: Errors of the tracker or its transport, from the next call.
    """

    batches = None  # unknown in advance
    mixture = None
    host: TrackerHost
    store: SliceStore
    _: KW_ONLY
    batch_sizes: Sequence[int]
    seed: int = 0
    shuffle: bool = True
    rank: int = 0

    def __post_init__(self) -> None:
        self._idle: Idle | None = getattr(self.host, "idle", None)
        self._ranks: WorkerRanks | None = getattr(self.host, "ranks", None)
        self.fills = self._ranks is not None  # whether lost samples are replaced, as others of the worker would wait
        self._counts_merged: bool = getattr(self.host, "counts_merged", False)
        self._corrupt: dict[str, str] = {}  # found by this rank, and unknown to the first one
        self._tracker: SliceTracker | None = None
        self._pending: Mapping[str, Any] | None = None
        self._thread: _PlanThread | None = None  # on the first rank, once there was a loader
        self._repeats = False  # whether the next pass trains on slices of this pass's epoch that have come back
        self._only_ends = False  # whether Lightning only ends the epoch of a checkpoint, and needs no batch
        self._drawn: deque[SliceBatch] = deque()  # batches of all ranks that readers have
        self._untrained: deque[SliceBatch] = deque()  # that the training has
        self._unsent: list[SliceBatch] = []  # trained on, but in no update yet; only where merged samples count

    def open(self, trainer: pl.Trainer | None) -> None:
        """Connect to the tracker, once."""
        self._only_ends = self.host.waits and trainer is not None and ends_restored_epoch(trainer)
        if self._thread is None and self.rank == 0:
            begins, pending = None, self._pending or {}
            if self.host.waits and "run" in pending:
                begins, self._pending = EpochOfRun(**pending), None  # for this fit only
            plan = TrackerPlan(
                self.host.connect(self._make_tracker),
                worker=_name(self.host.worker),
                incarnation=uuid.uuid4().hex,
                batch_size=sum(self.batch_sizes),
                ahead=min(self.store.depth, _AHEAD),
                slices=self.store.source.slices,
                waits=self.host.waits,
                resumes=trainer is not None and trainer.global_step > 0,
                begins=begins,
                counts_merged=self._counts_merged,
            )
            self._thread = _PlanThread(plan)

    def __iter__(self) -> Iterator[SliceBatch]:
        if self._only_ends:  # a pass would be taken for the next epoch's
            self._only_ends = False
            return
        self._share_corrupt()
        self._drawn.clear()
        self._untrained.clear()
        own = None if self._thread is None else self._thread.begin(repeats=self._repeats)
        self._repeats = has_given = has_waited = False
        while (turn := self._turn(own, has_given)) is not None:
            if isinstance(turn, SliceBatch):
                if has_waited and self._idle is not None:
                    self._idle.goes_on()
                has_waited, has_given = False, True
                self._drawn.append(turn)
                yield turn if self._ranks is None else cut_batch(turn, self.batch_sizes)[self.rank]
            elif self._idle is not None and not has_given:
                has_waited = True
                if self._idle.waits():
                    return
        if has_waited and self._idle is not None:
            self._idle.goes_on()

    def _share_corrupt(self) -> None:
        """Tell the first rank what others have found corrupt; called when no rank is in a step."""
        found, self._corrupt = self._corrupt, {}
        if self._ranks is not None:
            known = corrupt_on_any(self.store.source.slices, found, self._ranks.total)
            self._note(lambda plan: plan.quarantine(known.items()))

    def _turn(self, own: _Ahead | None, has_given: bool) -> SliceBatch | str | None:
        """Return the next batch of all ranks, ``_WAITS`` if there is none yet, or the end; the same on all ranks."""
        turn = None
        if self._thread is not None and own is not None:
            timeout = _LOOK_S if has_given or self._idle is None else _MOMENT_S
            turn = self._thread.take(own, has_given=has_given, timeout=timeout)
        if self._ranks is not None:
            turn = _TURN.decode(self._ranks.tell(msgspec.json.encode(turn).decode()))
        return turn

    # ------------------------------------------------------------------ notes

    def received(self, report: ReadReport) -> None:
        """Record the readers' report on the next batch that was taken."""
        batch = self._drawn.popleft()
        if not report.is_empty:  # else it cannot be trained on, as its slices are corrupt
            self._untrained.append(batch)
        if self.rank:
            self._corrupt.update(report.corrupt)
        elif report.corrupt:
            self._note(lambda plan: plan.quarantine(report.corrupt))

    def trained(self) -> None:
        """Record that the first untrained batch was trained on; does nothing if there is none."""
        if self._untrained:
            batch = self._untrained.popleft()
            if self._counts_merged and self.rank == 0:
                self._unsent.append(batch)
            self._note(lambda plan: plan.trained(batch))

    def take_trained(self) -> list[TrainedRun]:
        """Return what all ranks of the worker have trained on since the last call."""
        batches, self._unsent = self._unsent, []
        return [TrainedRun(batch.epoch, *run) for batch in batches for run in batch.runs]

    def merged(self, runs: Iterable[TrainedRun]) -> None:
        """Record that samples are part of the run's weights."""
        self._note(lambda plan: plan.merged(runs))

    def reset(self, unmerged: Iterable[TrainedRun]) -> None:
        """Let lost samples be trained on again.

        Args:
            unmerged: Samples from ``take_trained`` that are still to become part of the run's weights.
        """
        kept = [*unmerged, *(TrainedRun(batch.epoch, *run) for batch in self._unsent for run in batch.runs)]
        self._note(lambda plan: plan.reset(kept))

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """Do nothing: the tracker decides when an epoch of the data is over."""

    def _note(self, note: Callable[[TrackerPlan], object]) -> None:
        if self._thread is not None:
            self._thread.note(note)

    # ------------------------------------------------------------------ questions

    def _ask(self, question: Callable[[TrackerPlan], _T]) -> _T | None:
        return None if self._thread is None else self._thread.ask(question)

    def end_epoch(self) -> None:
        """Go on to the next epoch of the data, if nothing is left of this one; for all workers at the same moment."""
        self._ask(TrackerPlan.end_epoch)

    @property
    def is_cut(self) -> bool:
        """Whether the last pass ended before all of its epoch was given out, as the tracker was taken back."""
        return self._thread is not None and self._thread.plan.is_cut

    def rest(self) -> bool | None:
        """Whether anything of the epoch is left to train on; ``None`` if all samples count."""
        return self._ask(TrackerPlan.rest)

    def train_on_rest(self) -> None:
        """Let the next pass train on slices of this pass's epoch that have come back."""
        self._repeats = True

    def settle(self) -> None:
        """Wait until the tracker knows all that this worker has trained on."""
        self._ask(TrackerPlan.report)

    def halt(self, timeout: float = _STOP_S) -> bool:
        """End the plan's thread after its notes; idempotent. Returns whether it ended in time.

        Args:
            timeout: In seconds.
        """
        return self._thread is None or self._thread.halt(timeout)

    def close(self) -> None:
        """Report what was trained on, at the end of the training, while the tracker can be reached."""
        self.halt()
        self._thread = None

    # ------------------------------------------------------------------ the position

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's state at worker 0, with all that was trained on here; empty on others.

        With a coordinator, which has the tracker, return the epoch that comes next.
        """
        if self._tracker is not None:
            self.settle()
            return {"tracker": self._tracker.state_dict()}
        if self._thread is not None and self.host.waits:
            position = self._thread.position()
            return {} if position is None else position._asdict()
        return {} if self._pending is None else dict(self._pending)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was saved; used where the tracker is.

        Raises:
            TrackerStateError: If it was saved by ranks that step together, or does not fit.
        """
        if state and not state.keys() & {"tracker", "epoch"}:
            raise TrackerStateError(
                "The state of the slices was saved by ranks that step together. Resume with the strategy that it was "
                "saved with, or load only the weights."
            )
        self._pending = dict(state) or None
        if self._tracker is not None:
            self._load(self._tracker)

    def _make_tracker(self) -> SliceTracker:
        if self._tracker is None:
            catalogue = self.store.source.catalogue
            tracker = SliceTracker(catalogue, seed=self.seed, shuffle=self.shuffle, clock=time.monotonic)
            self._load(tracker)
            self._tracker = tracker
        return self._tracker

    def _load(self, tracker: SliceTracker) -> None:
        if self._pending is not None and "tracker" in self._pending:
            workers = [_name(number) for number in range(self.host.workers)]
            tracker.load_state_dict(self._pending["tracker"], workers=workers)
            self._pending = None


def _name(worker: int) -> str:
    return f"worker-{worker}"


Plan: TypeAlias = EpochPlan | TrackedTraining
"""The batches of a rank or worker in training, and its position: what was trained on, not what was handed out."""
