"""The plan of a worker that takes slices from a tracker, on a thread of its own: nothing of it waits in a step.

The thread, ``bytescheduler-slice-plan``, asks for slices, begins them and makes batches of them ahead of need, and
reports what was trained on. The training takes batches that are there, and leaves notes. It waits for the thread where
it waits for the data themselves (a pass has begun, or the tracker is slower than the training), and where it asks how
things stand: at the end of a round or an epoch, and before a position is saved.

What the tracker is promised holds as before, as the plan is the same: a slice's begin was accepted before a batch with
its first sample is there to be taken.

One lock; nothing is called with it held.

The batches of a worker of several ranks that train together: its first rank has them made, and cuts them.

Each rank gets a part of every batch, as long as its share of the batch sizes, so that all take equally many steps.
What the first rank says at the beginning of a pass, where nobody is in a step, is a collective of the training threads.
Parts are posted by the thread that makes the batches, before the first rank can take its own: nobody waits for them in
a step.

The plan of a rank that is not the first of its worker: takes its part of each batch that the first rank has made.

The tracker does not know of it. What it trains on counts with the first rank's steps, which are its own too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError
from lightning_bytescheduler.slices.batches import SLICES_AHEAD, ReadReport, SampleRun, SliceBatch, cut_batches
from lightning_bytescheduler.slices.lock_step import LockStepShares
from lightning_bytescheduler.slices.tracked_batches import TrackerPlan

__all__ = [
    "GOES_ON",
    "WAITS",
    "CorruptSlices",
    "FollowingPlan",
    "Idle",
    "LeadingRank",
    "Part",
    "PassOver",
    "PlanThread",
    "WorkerRanks",
    "cut_batch",
    "read",
]

WAITS, GOES_ON = "waits", "goes on"  # what is said besides the number of a pass that has a batch


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


class _Letter(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class Part(_Letter, frozen=True):
    """One rank's part of a batch: the pass, and what a ``SliceBatch`` has."""

    number: int
    epoch: int
    runs: list[tuple[int, int, int]]
    ahead: list[int]

    @property
    def batch(self) -> SliceBatch:
        """As readers are asked for it."""
        runs = tuple(SampleRun(slice_index=index, start=start, stop=stop) for index, start, stop in self.runs)
        return SliceBatch(self.epoch, runs, tuple(self.ahead))


class PassOver(_Letter, frozen=True):
    """A pass has no more batches."""

    number: int


class CorruptSlices(_Letter, frozen=True):
    """What a rank's readers have found: reasons by key."""

    found: dict[str, str]


_Any: TypeAlias = Part | PassOver | CorruptSlices
_DECODER: msgspec.json.Decoder[_Any] = msgspec.json.Decoder(_Any)


def read(text: str) -> _Any:
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
    samples = sum(run.stop - run.start for run in batch.runs)
    if samples >= len(batch_sizes):
        sizes = LockStepShares.of(samples, batch_sizes, shortage="pad").samples
        parts = list(cut_batches(batch.epoch, batch.runs, sizes))
    else:
        each = [
            SampleRun(slice_index=run.slice_index, start=sample, stop=sample + 1)
            for run in batch.runs
            for sample in range(run.start, run.stop)
        ]
        parts = [SliceBatch(batch.epoch, (each[rank % samples],)) for rank in range(len(batch_sizes))]
    # What the other ranks have of this batch may be this one's in the next.
    return [part._replace(ahead=tuple(dict.fromkeys((*part.ahead, *batch.ahead)))[:SLICES_AHEAD]) for part in parts]


class LeadingRank:
    """What the first rank tells the others.

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
        if batch is None:
            for rank in range(1, self._ranks.count):
                self._post(rank, PassOver(number))
            return None
        own, *others = cut_batch(batch, self._batch_sizes)
        for rank, part in enumerate(others, start=1):
            runs = [(run.slice_index, run.start, run.stop) for run in part.runs]
            self._post(rank, Part(number, part.epoch, runs, list(part.ahead)))
        return own

    def _post(self, rank: int, letter: _Letter) -> None:
        self._ranks.post(rank, msgspec.json.encode(letter).decode())


_T = TypeVar("_T")
_NAME = "bytescheduler-slice-plan"
_LOOK_S = 1.0
_MOMENT_S = 0.2
_FEWEST, _MOST = 2, 64  # batches that are made ahead of need
_LEAVE_S = 5.0
_TRAINED = object()  # a note that a batch was trained on


class Idle(Protocol):
    """Whoever has to know that a worker has nothing to train on. Called by the training thread, without a lock."""

    def waits(self) -> bool:
        """Others hold what is left, and have for a moment; called again and again. Returns whether to give up."""

    def goes_on(self) -> None:
        """There is something again."""


class PlanThread:
    """A ``BatchPlan`` that is ahead of need. For the training thread, but for :meth:`stop` and :meth:`quarantine`.

    Args:
        plan: Is this thread's alone from now on.
        timeout: Longest wait for the tracker where something is asked, in seconds.
        idle: Told while a pass that has begun waits, and when it goes on.
        others: The ranks that this one trains with, which do as it does and get parts of its batches.

    Raises:
        Exception: What the tracker or its transport has raised, from whatever is called next.
    """

    def __init__(
        self, plan: TrackerPlan, *, timeout: float = 1800.0, idle: Idle | None = None, others: LeadingRank | None = None
    ) -> None:
        self._plan = plan
        self._idle = idle
        self._others = others
        self._timeout = timeout
        self._changed = threading.Condition()
        # What follows changes under it.
        self._notes: deque[Any] = deque()  # _TRAINED, what readers report, or what is to be called
        self._ready: deque[SliceBatch] = deque()
        self._pass = 0
        self._is_over = True
        self._depth = _FEWEST
        self._untrained = 0  # batches that were taken
        self._error: BaseException | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the data that is trained on."""
        return self._plan.epoch

    @property
    def batch_size(self) -> int:
        """Samples of the batches that are made from now on; may be changed at any time."""
        return self._plan.batch_size

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self._plan.batch_size = size

    def __iter__(self) -> Iterator[SliceBatch]:
        with self._changed:
            self._pass += 1
            own = self._pass
            self._ready.clear()
            self._is_over = False
            self._untrained = 0
        self._note(lambda: self._begin_pass(own))
        has_given = has_waited = False
        while True:
            with self._changed:
                if has_given and not self._ready and not self._is_over:
                    self._depth = min(2 * self._depth, _MOST)  # the training is faster than the tracker answers
                is_there = self._await_batch(own, _LOOK_S if has_given or self._idle is None else _MOMENT_S)
            if not is_there:
                if self._idle is not None and not has_given:
                    has_waited = True
                    self._say(WAITS)
                    if self._idle.waits():
                        return
                continue
            if has_waited and self._idle is not None:
                has_waited = False
                self._say(GOES_ON)
                self._idle.goes_on()
            if not has_given:
                self._say(str(own))
            with self._changed:
                if self._pass != own or not self._ready:
                    return
                batch = self._ready.popleft()
                self._untrained += 1
                self._changed.notify_all()
            has_given = True
            yield batch

    def _say(self, text: str) -> None:
        if self._others is not None:
            self._others.say(text)

    def _await_batch(self, own: int, seconds: float) -> bool:
        """Wait for a batch, or the end of the pass; returns whether either is there. With the lock held."""
        deadline = time.monotonic() + seconds
        while not self._ready and not self._is_over and self._pass == own and not self._stopping:
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(left)
        self._check()
        return True

    # ------------------------------------------------------------------ notes

    def received(self, report: ReadReport) -> None:
        """Readers have answered for the next batch that was taken."""
        if report.is_empty:
            with self._changed:
                self._untrained -= 1
        self._note(report)

    def quarantine(self, corrupt: Iterable[tuple[str, str]]) -> None:
        """Readers of another rank have found corrupt slices: key and reason of each. For any thread."""
        self._note(lambda: self._plan.quarantine(corrupt))

    def trained(self) -> None:
        """The first batch that was taken and not trained on has been; nothing if there is none."""
        with self._changed:
            if not self._untrained:
                return
            self._untrained -= 1
        self._note(_TRAINED)

    def keep_alive(self) -> None:
        """Renew the lease, if nothing was said for a good part of it."""
        if not self._notes:
            self._note(self._plan.keep_alive)

    # ------------------------------------------------------------------ questions

    def settle(self) -> None:
        """Wait until the tracker knows all that was trained on."""
        if self._thread is not None:
            self._ask(lambda: None)

    def awaits_others(self) -> bool:
        """See ``TrackerPlan``."""
        return self._ask(self._plan.awaits_others)

    def end_epoch(self) -> None:
        """See ``TrackerPlan``."""
        self._ask(self._plan.end_epoch)

    def leave(self) -> None:
        """Give back what is held, where it stands. An iteration after this joins again."""
        with self._changed:
            self._pass += 1  # whoever iterates gets no more
            self._ready.clear()
            self._is_over = True
            if self._thread is None or self._error is not None:
                return
        with suppress(SchedulerTimeoutError):  # else the lease runs out
            self._ask(self._plan.leave, timeout=_LEAVE_S)

    def stop(self, timeout: float = _LEAVE_S) -> bool:
        """End the thread after what was noted. For any thread; idempotent.

        Returns:
            Whether it ended within ``timeout`` seconds.
        """
        self._plan.stop()
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

    def _note(self, note: Any) -> None:
        with self._changed:
            self._check()
            self._notes.append(note)
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _ask(self, question: Callable[[], _T], *, timeout: float | None = None) -> _T:
        answers: list[_T] = []
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        self._note(lambda: answers.append(question()))
        with self._changed:
            while not answers:
                self._check()
                left = deadline - time.monotonic()
                if left <= 0 or self._stopping:
                    raise SchedulerTimeoutError("The tracker of slices has not answered in time.")
                self._changed.wait(min(left, _LOOK_S))
        return answers[0]

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            wait = 0.0
            while True:
                with self._changed:
                    if not self._notes and wait > 0:
                        self._changed.wait(min(wait, _LOOK_S))
                    while not self._notes and not self._makes and not self._stopping:
                        self._changed.wait(_LOOK_S)
                    notes, self._notes = self._notes, deque()
                    if self._stopping and not notes:
                        return
                self._heed(notes)
                wait = self._make()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    @property
    def _makes(self) -> bool:
        return not self._is_over and self._made_for == self._pass and len(self._ready) < self._depth

    _made_for = 0  # the pass that the plan is in

    def _heed(self, notes: deque[Any]) -> None:
        trained = 0
        for note in notes:
            if note is _TRAINED:
                trained += 1
            elif isinstance(note, ReadReport) and not note.corrupt:
                self._plan.received(note)  # no call, and batches on either side of it may be reported together
            else:
                if trained:
                    self._plan.trained(trained)
                    trained = 0
                self._plan.received(note) if isinstance(note, ReadReport) else note()
        if trained:
            self._plan.trained(trained)
        if notes:
            with self._changed:
                self._changed.notify_all()

    def _begin_pass(self, number: int) -> None:
        if number == self._pass:
            self._plan.begin_pass()
            self._made_for = number

    def _make(self) -> float:
        """Make batches as long as there is room; returns the seconds after which to ask again."""
        while True:
            with self._changed:
                if not self._makes or self._stopping:
                    return 0.0
                number = self._pass
            found = self._plan.poll()
            if self._others is not None and not isinstance(found, float):
                found = self._others.hand_out(number, found)  # before it can be taken here
            with self._changed:
                if self._pass == number:
                    if isinstance(found, SliceBatch):
                        self._ready.append(found)
                    elif found is None:
                        self._is_over = True
                    self._changed.notify_all()
            if isinstance(found, float):
                return found


_PATIENCE = 3.0  # times the timeout: the first rank may wait that long for several answers of the tracker


class FollowingPlan:
    """A ``BatchPlan`` of parts. For the training thread; what is posted comes on a thread of the ranks.

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
        self._parts: deque[Part | PassOver] = deque()
        self._error: BaseException | None = None
        ranks.listen(self._heed, self._fail)

    def __iter__(self) -> Iterator[SliceBatch]:
        number = self._begin()
        if number is None:
            return
        while isinstance(part := self._next(number), Part):
            self.epoch = part.epoch
            yield part.batch

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

    def _next(self, number: int) -> Part | PassOver:
        limit = _PATIENCE * self._ranks.timeout
        deadline = time.monotonic() + limit
        with self._changed:
            while True:
                while self._parts and self._parts[0].number < number:  # of a pass that was given up
                    self._parts.popleft()
                if self._parts:
                    return self._parts.popleft()
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
        if not isinstance(letter, CorruptSlices):
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
