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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import msgspec

from lightning_bytescheduler.checks import is_whole, require_whole
from lightning_bytescheduler.exceptions import CoordinatorError, OptionError, SchedulerTimeoutError, TrackerStateError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.slices.batches import SLICES_AHEAD, ReadReport, SampleRun, SliceBatch, cut_runs, samples_in
from lightning_bytescheduler.slices.catalogue import corrupt_on_any
from lightning_bytescheduler.slices.epoch_plan import EpochPlan, step_sizes
from lightning_bytescheduler.slices.messages import (
    AskLater,
    Assignment,
    Call,
    HeldSlice,
    JoinAgain,
    Joined,
    JoinTracker,
    LeaveTracker,
    QuarantineSlice,
    Receipt,
    RenewLease,
    ReportProgress,
    RequestSlice,
    TrackerClient,
    TrainedRun,
    WaitReason,
    by_slice,
)
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.slice import Runs, Slice, joined, samples_of, without
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.tracker import SliceTracker

_T = TypeVar("_T")
_NAME = "bytescheduler-slice-plan"
_AHEAD = 4  # slices that a worker holds to fetch them; others may need them at the end of an epoch
_LOOK_S = 1.0
_MOMENT_S = 0.2
_ANSWER_S = 1800.0  # longest wait for an answer of the tracker
_LEAVE_S = 5.0
_FEWEST, _MOST = 2, 64  # batches that are made ahead of need
_AGAIN = 0.25  # seconds before the tracker is asked again after it had nothing
_RENEWALS = 4  # per lease, while there is nothing else to report
_GIVEN_OUT = (WaitReason.OVER, WaitReason.MERGING, WaitReason.HELD)  # nothing of the epoch is available now
_EPOCH = "epoch"  # of the data; in a checkpoint of a coordinator's run
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


def require_same(trainer: pl.Trainer, option: str, here: str) -> None:
    """Compare an option's result on all ranks, which call this together.

    Raises:
        OptionError: On every rank, if it differs from rank 0's on one.
    """
    if trainer.world_size == 1:
        return
    there = trainer.strategy.broadcast(here)
    if not trainer.strategy.reduce_boolean_decision(here == there, all=True):
        raise OptionError(option, here, f"the same on every rank: on rank 0 it is {there}, on some other it is not")


def require_tracker_host(host: object) -> None:
    """Require a way to a tracker.

    Raises:
        OptionError: If it is not one.
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


@dataclass(eq=False, slots=True)
class _Held:
    """A slice of this worker.

    Attributes:
        todo: What of it was not handed out to readers.
        unmerged: What was trained on and the tracker does not count yet.
        trained: Samples of it that are trained on, by this worker or before.
    """

    grant: int
    epoch: int
    slice_index: int
    slice: Slice
    todo: Runs
    unmerged: Runs
    trained: int
    begun: bool = False

    @property
    def is_trained(self) -> bool:
        return self.trained == self.slice.samples


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

    Args:
        ahead: Slices to hold that are not begun, so that they can be fetched.
        waits: Whether each pass is of the next epoch, and waits for it.
        resumes: Whether its training goes on from a checkpoint.
        begins: The epoch of the data that comes next by that checkpoint, if known.
        counts_merged: Whether a slice is held until all of it is known to be in the weights.
        clock: Returns monotonic seconds.

    Raises:
        OptionError: If the batch size is not allowed; from ``poll``, if the tracker has other slices.

    Attributes:
        batch_size: Samples of the batches from the next one on; may be changed at any time.
        epoch: The epoch of the data that is requested; each batch has its own.
        is_cut: Whether the last pass ended before all of its epoch was given out, as the tracker was taken back.
    """

    def __init__(
        self,
        client: TrackerClient,
        *,
        worker: str,
        incarnation: str,
        batch_size: int,
        ahead: int = 2,
        slices: Sequence[Slice],
        keeps: int = 0,
        waits: bool = True,
        resumes: bool = False,
        begins: int | None = None,
        counts_merged: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_size = require_whole("batch_size", batch_size, 1)
        self.epoch = 0
        self._client = client
        self._joins = JoinTracker(worker=worker, incarnation=incarnation, keeps=keeps, prefetch=max(ahead, 1))
        self._ahead = ahead
        self._slices = slices
        self._waits = waits
        self._resumes = resumes
        self._begins = begins
        self._counts_merged = counts_merged
        self._clock = clock
        self._last_epoch = -1  # that a pass is to come to
        self._has_ended = False  # the pass, as all until that epoch was given out
        self._repeats = False  # this pass trains on what has come back of the last epoch
        self._goes_on: Sequence[WaitReason] = ()  # where a pass without a batch is of the epoch after that
        self.is_cut = False
        self._may_end = False  # this pass does not wait
        self._session = 0  # 0: not joined
        self._lease = 0.0
        self._heard = 0.0  # when the tracker last heard of this worker
        self._held: dict[int, _Held] = {}
        self._ask_at = 0.0
        self._reason: WaitReason | None = None  # why there was no slice of this epoch
        # by number of the batch: what it is made of
        self._out: dict[int, list[tuple[_Held, int, int]]] = {}
        self._reached: dict[_Held, None] = {}  # trained further than the tracker knows
        self._handed = self._received = 0

    def begin_pass(self, *, repeats: bool = False) -> None:
        """Begin a pass, which hands out again what was not trained on.

        Args:
            repeats: Whether it only trains on what has come back of the last pass's epoch.
        """
        self.report()
        has_ended = self._is_through
        for parts in self._out.values():
            for held, start, stop in parts:
                held.todo = joined([*held.todo, (start, stop)])
        self._out.clear()
        self._received = self._handed
        self._goes_on = ()
        if self._waits and not repeats:
            if has_ended:
                self._last_epoch += 1
            elif self._last_epoch < 0:
                # As before this training; a checkpoint says how many passes there were.
                self._goes_on = () if self._begins is not None else (WaitReason.OVER,)
            elif self._may_end and not self.is_cut:  # a limit has ended the pass, maybe just where its epoch ended
                self._goes_on = _GIVEN_OUT
        self._may_end = repeats or not self._waits
        self._repeats, self.is_cut, self._has_ended = repeats, False, False

    def poll(self) -> SliceBatch | float | None:
        """Return the next batch, the seconds after which to ask again, or ``None`` if the pass is over."""
        while (batch := self._next()) is None:
            is_given_out = self._reason in _GIVEN_OUT
            if (is_given_out and self.epoch < self._last_epoch) or self._reason in self._goes_on:
                self._go_on()
                continue
            if is_given_out or (self._may_end and self._reason is not WaitReason.SOON):
                self._has_ended = is_given_out
                self.is_cut = self._waits and not self._repeats and not is_given_out
                return None
            return max(self._ask_at - self._clock(), 0.0)
        self._may_end, self._goes_on = True, ()
        return batch

    @property
    def _is_through(self) -> bool:
        """Whether the pass was trained to its end; a limit may leave a batch that was handed out ahead."""
        return self._has_ended and not any(self._out.values())

    @property
    def next_epoch(self) -> int | None:
        """The epoch of the data that a training goes on with from here; ``None`` if it has not begun."""
        return None if self._last_epoch < 0 or not self._waits else self._last_epoch + self._is_through

    # ------------------------------------------------------------------ reports of the training

    def received(self, report: ReadReport) -> None:
        """Record the readers' report on the next batch that was handed out."""
        number, self._received = self._received, self._received + 1
        if report.is_empty:  # it cannot be trained on
            self._out.pop(number, None)
        if report.corrupt:
            self.quarantine(report.corrupt)

    def quarantine(self, corrupt: Iterable[tuple[str, str]]) -> None:
        """Report slices that readers have found corrupt."""
        self.report()
        for key, reason in corrupt:
            self._drop(held.grant for held in list(self._held.values()) if held.slice.key == key)
            if self._session:
                self._tell(QuarantineSlice(session=self._session, key=key, reason=reason))

    def trained(self) -> None:
        """Record that the first untrained batch was trained on; does nothing if there is none."""
        number = next(iter(self._out), None)
        if number is not None:
            for held, start, stop in self._out.pop(number):
                held.trained += stop - start
                held.unmerged.append((start, stop))
                self._reached[held] = None

    def report(self) -> None:
        """Report to the tracker how far each slice is trained on."""
        reached, self._reached = self._reached, {}
        for held in reached:
            if self._held.get(held.grant) is held:  # else it was taken away
                self._trains(held)

    def merged(self, runs: Iterable[TrainedRun]) -> None:
        """Record that samples are part of the weights."""
        known = by_slice(runs)
        for held in list(self._held.values()):
            if (own := known.get((held.epoch, held.slice_index))) is not None:
                held.unmerged = without(held.unmerged, own)
                if held.is_trained and not held.unmerged:
                    self._drop((held.grant,))

    def reset(self, unmerged: Iterable[TrainedRun]) -> None:
        """Find out from the tracker what is left to train on: what was made of some samples is lost, or may be.

        Args:
            unmerged: What is still to become part of the weights of what this worker has trained on.
        """
        known = by_slice(unmerged)
        for held in self._held.values():
            held.unmerged = known.get((held.epoch, held.slice_index), [])
        if self._session:
            self._join()

    def rest(self) -> bool | None:
        """Whether there is something to train on of the epochs until this pass's; ``None`` if all of it counts.

        Where all workers end an epoch together, this takes no slice from another worker: its pass has ended.
        """
        self.report()
        self._reason = None  # the epoch may have been over before the tracker was taken back
        while not self._has_todo:
            if not self._ask(looks=not self._waits):
                if self._reason not in _GIVEN_OUT or self.epoch >= self._last_epoch:
                    return None if self._reason is WaitReason.OVER else False
                self._go_on()
        return True

    def keep_alive(self) -> None:
        """Renew the lease if nothing was sent for long, as during a validation."""
        if self._session and self._clock() - self._heard > self._lease / _RENEWALS:
            self._tell(RenewLease(session=self._session))

    @property
    def _has_todo(self) -> bool:
        # What was handed out is trained on by now where this is asked, or is to be handed out again.
        return any(held.todo for held in self._held.values()) or any(self._out.values())

    def end_epoch(self) -> None:
        """Go on to the next epoch, if nothing is left of this one."""
        if self.rest() is None:
            self._go_on()

    def leave(self) -> None:
        """Give back held slices at their positions. A later pass joins again."""
        self.report()
        if session := self._session:
            self._session = 0
            self._reason = None
            self._held.clear()
            self._out = {number: [] for number in self._out}  # still to come from readers, with nothing to report
            self._client.answer(LeaveTracker(session=session))

    # ------------------------------------------------------------------ internal

    def _next(self) -> SliceBatch | None:
        runs: list[SampleRun] = []
        parts: list[tuple[_Held, int, int]] = []
        missing = self.batch_size
        session, epoch = None, self.epoch
        while missing and (held := self._current()) is not None:
            if runs and (self._session != session or held.epoch != epoch):
                break  # another epoch, or a new session
            session, epoch = self._session, held.epoch
            start, end = held.todo[0]
            stop = min(end, start + missing)
            held.todo[:1] = [(stop, end)] if stop < end else []
            runs.append(SampleRun(slice_index=held.slice_index, start=start, stop=stop))
            parts.append((held, start, stop))
            self._out[self._handed] = parts  # to be known while the tracker is asked for more
            missing -= stop - start
        if not runs:
            return None
        while len(self._waiting()) < self._ahead and self._clock() >= self._ask_at and self._ask():
            pass
        self._handed += 1
        return SliceBatch(epoch, tuple(runs), tuple(held.slice_index for held in self._waiting()))

    def _current(self) -> _Held | None:
        while True:
            # Slices of the previous epoch come first, as others may wait for them.
            for held in sorted(self._held.values(), key=lambda held: (not held.begun, held.epoch)):
                if held.grant in self._held and held.todo and self._begin(held):
                    return held
            if not self._ask():
                return None

    def _waiting(self) -> list[_Held]:
        waiting = [held for held in self._held.values() if held.todo and not held.begun]
        return sorted(waiting, key=lambda held: held.epoch)

    def _begin(self, held: _Held) -> bool:
        held.begun = held.begun or self._trains(held)
        return held.begun

    def _trains(self, held: _Held) -> bool:
        """Report a slice's position; returns whether this worker may train on it. Drops it if not, or if all counts."""
        accepted = self._tell(ReportProgress(session=self._session, grant=held.grant, trained=held.trained))
        if accepted is None:  # this worker has joined again, with another grant if the slice is still its own
            return held.begun and self._held.get(held.grant) is held
        if accepted and not self._counts_merged:
            held.unmerged = []
        if not accepted or (held.is_trained and not held.unmerged):
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
        request = RequestSlice(session=self._session, epoch=self.epoch, holding=tuple(self._held), looks=looks)
        answer = cast(Assignment | AskLater | JoinAgain, self._call(request, Assignment, AskLater, JoinAgain))
        if isinstance(answer, JoinAgain):
            self._join()
            return True
        self._drop(answer.revoked)
        if isinstance(answer, Assignment):
            self._require_same_slice(answer)
            self._hold(answer)
            self._reason = None
            return True
        self._reason = answer.reason
        self._ask_at = self._clock() + _AGAIN
        return False

    def _join(self) -> None:
        """Join, or join again, and go on with what is still this worker's."""
        former = {(held.epoch, held.slice_index): held for held in self._held.values()}
        holds = tuple(HeldSlice(*place, held.begun) for place, held in former.items())
        joined = self._call(msgspec.structs.replace(self._joins, holds=holds), Joined)
        self._session, self._lease = joined.session, joined.lease
        if self._last_epoch < 0:
            # Others may have begun the next epoch since this worker's training began.
            first = joined.epoch - (self._waits and not self._resumes) if self._begins is None else self._begins
            if first > joined.epoch:  # not open yet, or never, as the tracker has begun anew
                self._goes_on = _GIVEN_OUT
            self._last_epoch = min(max(first, 0), joined.epoch)
        self.epoch = min(joined.epoch, self._last_epoch)
        self._reason, self._ask_at = None, 0.0
        self._held.clear()
        for answer in joined.held:
            self._hold(answer, former.get((answer.epoch, answer.slice_index)))

    def _hold(self, answer: Assignment, held: _Held | None = None) -> None:
        """Hold a slice; ``held`` is the same, if it was held before."""
        if held is None:
            held = _Held(answer.grant, answer.epoch, answer.slice_index, answer.slice, todo=[], unmerged=[], trained=0)
        held.grant = answer.grant
        out = [(start, stop) for parts in self._out.values() for one, start, stop in parts if one is held]
        held.todo = without(answer.todo, [*out, *held.unmerged])
        held.trained = held.slice.samples - samples_of(held.todo) - samples_of(out)
        if held.begun:
            self._reached[held] = None
        self._held[held.grant] = held

    def _require_same_slice(self, answer: Assignment) -> None:
        index = answer.slice_index
        here = self._slices[index].key if index < len(self._slices) else None
        if here != answer.slice.key:
            raise OptionError(
                "slices", here, f"the tracker's at every worker, where slice {index} is {answer.slice.key!r}"
            )

    def _tell(self, message: Call) -> bool | None:
        """Returns whether a message counts, or ``None`` if this worker had to join again."""
        reply = cast(Receipt | JoinAgain, self._call(message, Receipt, JoinAgain))
        if isinstance(reply, JoinAgain):
            self._join()
            return None
        return reply.accepted

    def _call(self, message: Call, *kinds: type[_T]) -> _T:
        reply = self._client.answer(message)
        if not isinstance(reply, kinds):
            raise CoordinatorError(f"The tracker answers {type(reply).__name__} to {type(message).__name__}.")
        self._heard = self._clock()
        return reply

    def _drop(self, grants: Iterable[int]) -> None:
        for grant in grants:
            self._held.pop(grant, None)


class TrackedTraining:
    """The batches of one worker. The tracker is at worker 0, which also saves it.

    For the training thread, except :meth:`halt`.

    Raises:
        Exception: Errors of the tracker or its transport, from the next call.
    """

    batches = None  # unknown in advance
    is_cut = False  # the last pass ended before all of its epoch was given out, as the tracker was taken back

    def __init__(
        self,
        host: TrackerHost,
        store: SliceStore,
        *,
        options: TrackerOptions,
        batch_sizes: Sequence[int],
        rank: int = 0,
    ) -> None:
        self._host = host
        self._store = store
        self._options = options
        self._idle: Idle | None = getattr(host, "idle", None)
        self._ranks: WorkerRanks | None = getattr(host, "ranks", None)
        self._batch_sizes = tuple(batch_sizes)
        self._rank = rank
        self._corrupt: dict[str, str] = {}  # found by this rank, and unknown to the first one
        self._tracker: SliceTracker | None = None
        self._pending: Mapping[str, Any] | None = None
        self._plan: TrackerPlan | None = None  # on the first rank, once there was a loader; used only by its thread
        self._repeats = False  # the next pass trains on what has come back of this one's epoch
        self._untrained: dict[int, SliceBatch] = {}  # batches of all ranks, taken and not trained on
        self._taken = self._received = 0  # batches
        self._counts_merged: bool = getattr(host, "counts_merged", False)
        self._unsent: list[SliceBatch] = []  # trained on, and part of no update; where merged samples count
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # Guarded by the condition above.
        self._notes: deque[Callable[[TrackerPlan], object]] = deque()
        self._ready: deque[SliceBatch] = deque()
        self._pass = 0
        self._made_for = 0  # the pass that the plan is in
        self._is_over = True
        self._depth = _FEWEST
        self._error: BaseException | None = None
        self._stopping = False

    @property
    def fills(self) -> bool:
        """Whether lost samples are replaced: if a rank skipped a batch, the worker's other ranks would wait for it."""
        return self._ranks is not None

    def open(self, trainer: pl.Trainer | None) -> None:
        """Connect to the tracker, once."""
        if self._plan is None and self._rank == 0:
            pending = dict(self._pending or {})
            begins = pending.pop(_EPOCH, None)  # of this fit, and not of a further one
            self._pending = pending or None
            self._plan = TrackerPlan(
                self._host.connect(self._make_tracker),
                worker=_name(self._host.worker),
                incarnation=uuid.uuid4().hex,
                batch_size=sum(self._batch_sizes),
                ahead=min(self._store.depth, _AHEAD),
                slices=self._store.source.slices,
                keeps=self._store.keeps,
                waits=self._host.waits,
                resumes=trainer is not None and trainer.global_step > 0,
                begins=begins,
                counts_merged=self._counts_merged,
            )

    def __iter__(self) -> Iterator[SliceBatch]:
        own = self._begin()
        has_given = has_waited = False
        while (turn := self._turn(own, has_given)) is not None:
            if isinstance(turn, SliceBatch):
                if has_waited and self._idle is not None:
                    self._idle.goes_on()
                has_waited, has_given = False, True
                self._untrained[self._taken] = turn
                self._taken += 1
                yield turn if self._ranks is None else cut_batch(turn, self._batch_sizes)[self._rank]
            elif self._idle is not None and not has_given:
                has_waited = True
                if self._idle.waits():
                    return
        if has_waited and self._idle is not None:
            self._idle.goes_on()

    def _begin(self) -> int:
        self._share_corrupt()
        self._untrained.clear()
        self._received = self._taken
        repeats, self._repeats = self._repeats, False
        with self._changed:
            self._pass += 1
            own = self._pass
            self._ready.clear()
            self._is_over = False

        def begin(plan: TrackerPlan) -> None:
            if own == self._pass:
                plan.begin_pass(repeats=repeats)
                self._made_for = own

        self._note(begin)
        return own

    def _share_corrupt(self) -> None:
        """Tell the first rank what others have found corrupt; called when no rank is in a step."""
        found, self._corrupt = self._corrupt, {}
        if self._ranks is not None:
            known = corrupt_on_any(self._store.source.slices, found, self._ranks.total)
            self._note(lambda plan: plan.quarantine(known.items()))

    def _turn(self, own: int, has_given: bool) -> SliceBatch | str | None:
        """Return the next batch of all ranks, the news that there is none now, or the end; the same on all of them."""
        turn = self._await_turn(own, has_given) if self._rank == 0 else None
        if self._ranks is not None:
            turn = _TURN.decode(self._ranks.tell(msgspec.json.encode(turn).decode()))
        return turn

    def _await_turn(self, own: int, has_given: bool) -> SliceBatch | str | None:
        with self._changed:
            if has_given and not self._ready and not self._is_over:
                self._depth = min(2 * self._depth, _MOST)  # the training is faster than the tracker answers
            deadline = time.monotonic() + (_LOOK_S if has_given or self._idle is None else _MOMENT_S)
            while not self._ready and not self._is_over and self._pass == own and not self._stopping:
                self._check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return _WAITS
                self._changed.wait(left)
            self._check()
            if self._pass != own or not self._ready:
                return None
            self._changed.notify_all()
            return self._ready.popleft()

    # ------------------------------------------------------------------ notes

    def received(self, report: ReadReport) -> None:
        """Record the readers' report on the next batch that was taken."""
        number, self._received = self._received, self._received + 1
        if report.is_empty:
            self._untrained.pop(number, None)
        if self._rank:
            self._corrupt.update(report.corrupt)
        self._note(lambda plan: plan.received(report))

    def trained(self) -> None:
        """Record that the first untrained batch was trained on; does nothing if there is none."""
        number = next(iter(self._untrained), None)
        if number is not None:
            batch = self._untrained.pop(number)
            if self._counts_merged and self._rank == 0:
                self._unsent.append(batch)
            self._note(TrackerPlan.trained)

    def take_trained(self) -> list[TrainedRun]:
        """Return what all ranks of the worker have trained on since the last call."""
        batches, self._unsent = self._unsent, []
        return [TrainedRun(batch.epoch, *run) for batch in batches for run in batch.runs]

    def merged(self, runs: Iterable[TrainedRun]) -> None:
        """Record that samples are part of the run's weights."""
        self._note(lambda plan: plan.merged(runs))

    def reset(self, unmerged: Iterable[TrainedRun]) -> None:
        """Have what is lost trained on again.

        Args:
            unmerged: What was trained on and is still to become part of the run's weights, of what was taken.
        """
        kept = [*unmerged, *(TrainedRun(batch.epoch, *run) for batch in self._unsent for run in batch.runs)]
        self._note(lambda plan: plan.reset(kept))

    def keep_alive(self) -> None:
        """Renew the lease in time."""
        if not self._notes:
            self._note(TrackerPlan.keep_alive)

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """Do nothing: the tracker decides when an epoch of the data is over."""

    def _note(self, note: Callable[[TrackerPlan], object]) -> None:
        with self._changed:
            self._check()
            if self._plan is None:
                return
            self._notes.append(note)
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, args=(self._plan,), name=_NAME, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ questions

    def end_epoch(self) -> None:
        """Go on to the next epoch of the data, if nothing is left of this one; for all workers at the same moment."""
        self._ask(TrackerPlan.end_epoch)

    def rest(self) -> bool | None:
        """Whether there is something to train on of the epoch; ``None`` if all of it counts."""
        return self._ask(TrackerPlan.rest)

    def train_on_rest(self) -> None:
        """Let the next pass train on what has come back of this one's epoch."""
        self._repeats = True

    def settle(self) -> None:
        """Wait until the tracker knows all that this worker has trained on."""
        if self._thread is not None:
            self._ask(TrackerPlan.report)

    def leave(self) -> None:
        """Give back this worker's slices, while the tracker can be reached. A later pass joins again."""
        with self._changed:
            self._pass += 1  # ends a running iteration
            self._ready.clear()
            self._is_over = True
            if self._thread is None or self._error is not None:
                return
        with suppress(SchedulerTimeoutError):  # otherwise the lease runs out
            self._ask(TrackerPlan.leave, timeout=_LEAVE_S)

    def halt(self, timeout: float = _LEAVE_S) -> bool:
        """End the plan's thread after its notes; idempotent. Returns whether it ended in time.

        Args:
            timeout: In seconds.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def close(self) -> None:
        """Give back this worker's slices at the end of the training."""
        try:
            self.leave()
        finally:
            self.halt()
            self._plan = None

    def _ask(self, question: Callable[[TrackerPlan], _T], *, timeout: float = _ANSWER_S) -> _T | None:
        answers: list[_T] = []
        if self._plan is None:
            return None
        deadline = time.monotonic() + timeout
        self._note(lambda plan: answers.append(question(plan)))
        with self._changed:
            while not answers:
                self._check()
                left = deadline - time.monotonic()
                if left <= 0 or self._stopping:
                    raise SchedulerTimeoutError("The tracker of slices has not answered in time.")
                self._changed.wait(min(left, _LOOK_S))
        return answers[0]

    # ------------------------------------------------------------------ the thread

    def _run(self, plan: TrackerPlan) -> None:
        try:
            wait = 0.0
            while True:
                with self._changed:
                    if not self._notes and wait > 0:
                        self._changed.wait(min(wait, _LOOK_S))
                    while not (self._notes or self._makes or self._stopping):
                        self._changed.wait(_LOOK_S)
                    notes, self._notes = self._notes, deque()
                    if self._stopping and not notes:
                        return
                for note in notes:
                    note(plan)
                plan.report()
                wait = self._make(plan)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    @property
    def _makes(self) -> bool:
        return not self._is_over and self._made_for == self._pass and len(self._ready) < self._depth

    def _make(self, plan: TrackerPlan) -> float:
        """Make batches while there is room; returns the seconds after which to ask again."""
        while True:
            with self._changed:
                self._changed.notify_all()  # questions were answered, or a batch is ready
                if not self._makes or self._stopping:
                    return 0.0
                number = self._pass
            found = plan.poll()
            if isinstance(found, float):
                return found
            with self._changed:
                if self._pass == number:
                    self._is_over, self.is_cut = found is None, plan.is_cut
                    if found is not None:
                        self._ready.append(found)

    # ------------------------------------------------------------------ the position

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's state at worker 0, with all that was trained on here; empty on others.

        With a coordinator, whose tracker it is, it is the epoch that comes next.
        """
        self.settle()
        if self._tracker is not None:
            return {"tracker": self._tracker.state_dict()}
        if self._thread is not None and (epoch := self._ask(lambda plan: plan.next_epoch)) is not None:
            return {_EPOCH: epoch}
        return {} if self._pending is None else dict(self._pending)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was saved; used where the tracker is.

        Raises:
            TrackerStateError: If it was saved by ranks that step together, or does not fit.
        """
        if state and not state.keys() & {"tracker", _EPOCH}:
            raise TrackerStateError(
                "The state of the slices was saved by ranks that step together. Resume with the strategy that it was "
                "saved with, or load only the weights."
            )
        self._pending = dict(state) or None
        if self._tracker is not None:
            self._load(self._tracker)

    def _make_tracker(self) -> SliceTracker:
        if self._tracker is None:
            tracker = SliceTracker(self._store.source.catalogue, self._options, clock=time.monotonic)
            self._load(tracker)
            self._tracker = tracker
        return self._tracker

    def _load(self, tracker: SliceTracker) -> None:
        if self._pending is not None and "tracker" in self._pending:
            workers = [_name(number) for number in range(self._host.workers)]
            tracker.load_state_dict(self._pending["tracker"], workers=workers)
            self._pending = None


def _name(worker: int) -> str:
    return f"worker-{worker}"


Plan: TypeAlias = EpochPlan | TrackedTraining
"""The batches of a rank or worker in training, and its position: what was trained on, not what was handed out."""
