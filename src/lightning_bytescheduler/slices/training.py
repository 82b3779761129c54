"""The training data of a worker that goes at its own speed: how it reaches the tracker, and what its ranks share.

A thread, ``bytescheduler-slice-plan``, asks for slices, begins them and makes batches of them ahead of need, and
reports what was trained on: no call to the tracker waits in a step. The training takes batches that are there, and
leaves notes. It waits for the thread where it waits for the data themselves (a pass has begun, or the tracker is slower
than the training), and where it asks how things stand: at the end of a round or an epoch, and before a position is
saved. One lock; nothing is called with it held.

The batches of a worker of several ranks that train together are taken by its first rank, which tells the others of
each: a collective of the training threads, which are in step anyhow. Each takes a part, as long as its share of the
batch sizes, so that all take equally many steps. The tracker does not know of the other ranks: what they train on
counts with the first rank's steps, which are their own too.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError, TrackerStateError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.slices.batches import SLICES_AHEAD, ReadReport, SliceBatch, cut_runs, samples_in
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import EpochPlan, step_sizes
from lightning_bytescheduler.slices.messages import TrackerClient
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.tracked_plan import TrackerPlan
from lightning_bytescheduler.slices.tracker import SliceTracker

_T = TypeVar("_T")
_NAME = "bytescheduler-slice-plan"
_AHEAD = 4  # slices that a worker holds to fetch them, which others may be glad of at the end of an epoch
_LOOK_S = 1.0
_MOMENT_S = 0.2
_ANSWER_S = 1800.0  # longest wait for the tracker where something is asked
_LEAVE_S = 5.0
_FEWEST, _MOST = 2, 64  # batches that are made ahead of need
_WAITS = "waits"  # what ranks are told in place of a batch, or of the end of a pass
_TURN: msgspec.json.Decoder[SliceBatch | str | None] = msgspec.json.Decoder(SliceBatch | str | None)


class Idle(Protocol):
    """Whoever has to know that a worker has nothing to train on. Called by the training thread, without a lock."""

    def waits(self) -> bool:
        """Others hold what is left, and have for a moment; called again and again. Returns whether to give up."""

    def goes_on(self) -> None:
        """There is something again."""


class WorkerRanks(Protocol):
    """The ranks of one worker, for their training threads, which all make the same calls."""

    def tell(self, text: str = "") -> str:
        """The first rank's text, on all ranks."""

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of all ranks' numbers, on all ranks."""


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
        ranks: May be left out, or ``None``: a ``WorkerRanks``, where several ranks train together as this worker and
            share its batches. Then ``connect`` is called on the first of them alone.
        idle: May be left out, or ``None``: an ``Idle``, told while a pass that has begun waits.
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
    """The batches of one worker. The tracker is at worker 0, which saves it too.

    For the training thread, but for :meth:`halt`.

    Args:
        host: The way to the tracker.
        store: Of the training data.
        options: Of the tracker.
        batch_sizes: Samples of a batch, of each rank of this worker.
        rank: This one of them.

    Attributes:
        epoch: The epoch of the data that is trained on.

    Raises:
        Exception: What the tracker or its transport has raised, from whatever is called next.
    """

    batches = None  # nobody knows

    def __init__(
        self,
        host: TrackerHost,
        store: SliceStore,
        *,
        options: TrackerOptions,
        batch_sizes: Sequence[int],
        rank: int = 0,
    ) -> None:
        self.epoch = 0
        self._host = host
        self._store = store
        self._options = options
        self._idle: Idle | None = getattr(host, "idle", None)
        self._ranks: WorkerRanks | None = getattr(host, "ranks", None)
        self._batch_sizes = tuple(batch_sizes)
        self._rank = rank
        self._corrupt: dict[str, str] = {}  # that this rank has found, and the first one does not know of
        self._tracker: SliceTracker | None = None
        self._pending: Mapping[str, Any] | None = None
        self._plan: TrackerPlan | None = None  # at the first rank, when there was a loader; is its thread's alone
        self._untrained = 0  # batches that were taken
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # What follows changes under it.
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
        """A rank that left out a batch would leave the others of its worker alone in a step."""
        return self._ranks is not None

    def open(self, trainer: pl.Trainer | None) -> None:
        """Reach the tracker, once."""
        if self._plan is None and self._rank == 0:
            self._plan = TrackerPlan(
                self._host.connect(self._make_tracker),
                worker=_name(self._host.worker),
                incarnation=uuid.uuid4().hex,
                batch_size=sum(self._batch_sizes),
                ahead=min(self._store.depth, _AHEAD),
                slices=self._store.source.slices,
                keeps=self._store.keeps,
                waits=self._host.waits,
            )

    def __iter__(self) -> Iterator[SliceBatch]:
        own = self._begin()
        has_given = has_waited = False
        while (turn := self._turn(own, has_given)) is not None:
            if isinstance(turn, SliceBatch):
                if has_waited and self._idle is not None:
                    self._idle.goes_on()
                has_waited, has_given = False, True
                self._untrained += 1
                self.epoch = turn.epoch
                yield turn
            elif self._idle is not None and not has_given:
                has_waited = True
                if self._idle.waits():
                    return
        if has_waited and self._idle is not None:
            self._idle.goes_on()

    def _begin(self) -> int:
        self._share_corrupt()
        self._untrained = 0
        with self._changed:
            self._pass += 1
            own = self._pass
            self._ready.clear()
            self._is_over = False

        def begin(plan: TrackerPlan) -> None:
            if own == self._pass:
                plan.begin_pass()
                self._made_for = own

        self._note(begin)
        return own

    def _share_corrupt(self) -> None:
        """Have the first rank know what others have found; where no rank is in a step."""
        found, self._corrupt = self._corrupt, {}
        if self._ranks is None or not self._ranks.total([float(bool(found))])[0]:
            return
        slices = self._store.source.slices
        marks = self._ranks.total([float(slice_.key in found) for slice_ in slices])
        known = {slice_.key: found.get(slice_.key, "Another rank found it to be corrupt.") for slice_ in slices}
        marked = [(slice_.key, known[slice_.key]) for slice_, mark in zip(slices, marks, strict=True) if mark]
        self._note(lambda plan: plan.quarantine(marked))

    def _turn(self, own: int, has_given: bool) -> SliceBatch | str | None:
        """What is next, for all ranks alike: this one's batch, the news that there is none for now, or the end."""
        turn = self._await_turn(own, has_given) if self._rank == 0 else None
        if self._ranks is not None:
            turn = _TURN.decode(self._ranks.tell(msgspec.json.encode(turn).decode()))
            if isinstance(turn, SliceBatch):
                return cut_batch(turn, self._batch_sizes)[self._rank]
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
        """Readers have answered for the next batch that was taken."""
        if report.is_empty:
            self._untrained -= 1
        if self._rank:
            self._corrupt.update(report.corrupt)
        self._note(lambda plan: plan.received(report))

    def trained(self) -> None:
        """The first batch that was taken and not trained on has been; nothing if there is none."""
        if self._untrained:
            self._untrained -= 1
            self._note(TrackerPlan.trained)

    def keep_alive(self) -> None:
        """Renew the lease in time."""
        if not self._notes:
            self._note(TrackerPlan.keep_alive)

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """The tracker says when an epoch of the data is over."""

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

    def awaits_others(self) -> bool:
        """Whether other workers hold all that is left of the epoch."""
        return bool(self._ask(TrackerPlan.awaits_others))

    def end_epoch(self) -> None:
        """Go on to the next epoch of the data, if nothing is left of this one: for all workers at the same moment."""
        self._ask(TrackerPlan.end_epoch)

    def settle(self) -> None:
        """Wait until the tracker knows all that this worker has trained on."""
        if self._thread is not None:
            self._ask(TrackerPlan.report)

    def leave(self) -> None:
        """Give back what this worker holds, while the tracker can be reached. A pass after this joins again."""
        with self._changed:
            self._pass += 1  # whoever iterates gets no more
            self._ready.clear()
            self._is_over = True
            if self._thread is None or self._error is not None:
                return
        with suppress(SchedulerTimeoutError):  # else the lease runs out
            self._ask(TrackerPlan.leave, timeout=_LEAVE_S)

    def halt(self, timeout: float = _LEAVE_S) -> bool:
        """End the plan's thread after what was noted; idempotent. Returns whether it ended in time.

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
        """Give back what this worker holds; the training is over."""
        try:
            self.leave()
        finally:
            self.halt()
            self._plan = None

    def _ask(self, question: Callable[[TrackerPlan], _T], *, timeout: float = _ANSWER_S) -> _T | None:
        """The thread's answer; none at a rank that has no plan."""
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
        """Make batches as long as there is room; returns the seconds after which to ask again."""
        while True:
            with self._changed:
                self._changed.notify_all()  # questions were answered, or a batch is there
                if not self._makes or self._stopping:
                    return 0.0
                number = self._pass
            found = plan.poll()
            if isinstance(found, float):
                return found
            with self._changed:
                if self._pass == number:
                    self._is_over = found is None
                    if found is not None:
                        self._ready.append(found)

    # ------------------------------------------------------------------ the position

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


Plan: TypeAlias = EpochPlan | TrackedTraining
"""The batches of a rank or worker in training, and its position: what was trained on, not what was handed out."""
