"""What is under way between a backward pass and the next: waiting for gradients, stepping with them, opening gates.

A gate opens after its bucket's step, so that whoever touches a parameter of it meanwhile, on another thread, waits.
Buckets that have arrived are stepped while a thread waits for another one; their gates stay closed until a touch, as
touches tell the order of use, and what is read unseen.

Lock order: the lock of this class, then a task's or the core's. Threads of the scheduler never take it. A thread that
touches a parameter while another one applies its bucket waits for the lock, with whatever locks it holds itself. Nobody
waits for those while holding this one: under it there is only the wait for a task, which scheduler threads, an abort or
the timeout end, and the optimizer's own arithmetic; ``on_early_wait``, which may log, is called without it. A failure
anywhere aborts the core, so each of these waits ends with an error, one thread after the other.

The stream that a training's optimizer steps belong to.

A gate may be opened on any stream and thread: by a forward pass, by a callback that copies weights on a stream of its
own. The step is then enqueued where ``optimizer.step()`` was called, behind all else of the training, and the stream
that opened the gate waits for it.

Its limit: a gate opens for all parameters of a bucket. Who reads another one of them on a stream that is neither the
training's nor the one that opened the gate has to make it wait for the training's, and after the gate was opened; a
wait at the start of the forward pass is too early.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.transport import GradientTransport
from lightning_bytescheduler.ddp.entry_points import before_forks
from lightning_bytescheduler.ddp.gates import Opening, OpeningKind
from lightning_bytescheduler.ddp.partial_step import (
    BucketUpdate,
    DueStep,
    UpdateState,
    open_state,
    plain_mode,
    profiled,
)
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.step_transforms import StepTransforms
from lightning_bytescheduler.ddp.unseen_reads import UnseenReads
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask
from lightning_bytescheduler.timeline.timeline import GATE, Timeline

__all__ = ["PendingUpdates", "TrainingStream"]

_HERE: AbstractContextManager[None] = nullcontext()


class TrainingStream:
    """See the module; on a CPU nothing happens.

    Args:
        device: Where the parameters live.
        cuda: Streams; replaced by tests.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream: Any = None

    def note(self) -> None:
        """The training goes on where the caller is; called by whoever trains."""
        if self._device.type == "cuda":
            self._stream = self._cuda.current_stream(self._device)

    def entered(self) -> AbstractContextManager[None]:
        """Enqueue on the training's stream; afterwards the caller's stream waits for that."""
        return _HERE if self._stream is None else self._moved()

    @contextmanager
    def _moved(self) -> Iterator[None]:
        here = self._cuda.current_stream(self._device)
        if here == self._stream:
            yield
            return
        try:
            with self._cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)


_LANE = "training thread"


class PendingUpdates(ABC):
    """See the module; what any thread uses of :class:`~lightning_bytescheduler.ddp.engine.GradientEngine`.

    Args:
        transport: What a task's result is waited for with.
        device: Where gradients live.
        timeout: Longest wait for one bucket, in seconds.
        statistics: Counters to keep.
        timeline: Where spans go, if anywhere.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        core: ByteCore,
        transport: GradientTransport,
        device: torch.device,
        timeout: float,
        statistics: SchedulerStatistics,
        timeline: Timeline | None,
        clock: Callable[[], float],
    ) -> None:
        self.statistics = statistics
        self.gated_at_forward_start: set[int] = set()  # ids of parameters whose touches cannot be seen
        self.on_early_wait: Callable[[], None] | None = None  # when somebody waits between two forward passes
        self.opened_for: Counter[str] = Counter()  # what needed all gates open at once, in how many steps
        self.on_open: Callable[[Opening], None] | None = None  # told of each gate that opens; for diagnoses, costs time
        self._core = core
        self._transport = transport
        self._device = device
        self._timeout = timeout
        self._timeline = timeline
        self._clock = clock
        self._lock = threading.RLock()
        self._stream = TrainingStream(device)
        self._step_number = 0  # backward passes that communicate; equal on all ranks, so it keys tasks
        self._updates: list[BucketUpdate] = []
        self._transforms = StepTransforms(None, (), self._wait)
        self._optimizer: Optimizer | None = None
        self._due: DueStep | None = None
        self._gates_closed = False
        self._torn = 0  # parameters whose step broke off
        self._reads = UnseenReads()
        self._training_thread = threading.get_ident()
        self._touched_buckets: list[int] = []
        self._in_forward = False
        self._read_early = False  # somebody has waited since the last forward pass
        self._waiting = False  # for a task
        before_forks(self)

    @abstractmethod
    def close(self) -> None:
        """Drop what is still due and make every parameter plain again; after an error, or after a flush."""

    @abstractmethod
    def _step_bucket(self, update: BucketUpdate) -> None:
        """Take the step of a bucket that has arrived."""

    def flush(self) -> None:
        """Wait for all gradients and apply all updates that are due; afterwards everything is final."""
        with self._lock:
            self._land()
            self._transforms.settle()

    def _land(self) -> None:
        for update in self._updates:
            if update.state is UpdateState.REDUCING:
                self._await_gradient(update, "flush")
        self._apply_all("flush")

    def before_fork(self) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Forkable`."""
        self._lock.acquire()  # who has it waits for a task at most, which ends with an abort or the timeout
        if self._gates_closed:
            with suppress(Exception):  # the training thread meets it at its next touch
                self.flush()

    def after_fork(self, *, in_child: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Forkable`."""
        if in_child:
            self._lock = threading.RLock()
            self.close()
        else:
            self._lock.release()

    def touched(self, update: BucketUpdate, gradient_only: bool) -> None:
        """A gated parameter of ``update`` is about to be used, on any thread."""
        with self._lock:
            waits = update.state is UpdateState.DUE or (update.state is UpdateState.REDUCING and gradient_only)
            early = waits and self._first_early_wait()
        if early and self.on_early_wait is not None:
            self.on_early_wait()  # without the lock: it logs, and a logging handler may be what touches elsewhere
        if update.state is UpdateState.DUE and self._transport.streams is None:
            self._step_while_waiting(update.task)
            self._wait(update.task)  # without the lock, so that other threads get at buckets that have arrived
        with self._lock:
            if update.state in (UpdateState.DUE, UpdateState.STEPPED):
                self._apply(update, "touch")
            elif update.state is UpdateState.REDUCING and gradient_only:
                self._await_gradient(update, "gradient")
            elif update.state in (UpdateState.REDUCED, UpdateState.DONE):
                with self._stream.entered():  # another thread has enqueued the step there
                    update.open_gate()

    def open_all(self, reason: str) -> None:
        """Something begins that must find all weights final and no gate closed, on any thread.

        Args:
            reason: What begins, in words.
        """
        with self._lock:
            if not any(update.is_closed for update in self._updates):
                return
            self.opened_for[reason] += 1
            early = self._first_early_wait()
        if early and self.on_early_wait is not None:
            self.on_early_wait()
        self.flush()

    def _first_early_wait(self) -> bool:
        early = not self._in_forward and not self._read_early
        self._read_early = self._read_early or early
        return early

    def _unseen(self, update: BucketUpdate) -> bool:
        return not update.gateable() or any(id(p) in self.gated_at_forward_start for p in update.parameters)

    def _apply_all(self, why: OpeningKind) -> None:
        with self._lock:
            for update in self._updates:
                if update.state in (UpdateState.DUE, UpdateState.STEPPED):
                    self._apply(update, why)
            if self._due is not None:
                self._due.complete()
                self._due = None
                for update in self._updates:
                    update.due = None  # it leads to the optimizer's state, and who holds that is counted
            if self._optimizer is not None:
                open_state(self._optimizer)
                self._transforms.settle()

    def _await_gradient(self, update: BucketUpdate, why: OpeningKind) -> None:
        with self._stream.entered():
            self._wait(update.task)
            with (
                self._opening(update, UpdateState.REDUCED, why),
                plain_mode(self._device, torch.get_default_dtype()),
            ):
                self._transforms.apply(update)
                self._transforms.handed_out(update)

    def _apply(self, update: BucketUpdate, why: OpeningKind) -> None:
        if self._in_forward:
            self._touched_buckets.append(update.index)
        with self._stream.entered():
            self._wait(update.task)
            due = update.state is UpdateState.DUE
            with self._or_torn(len(update.chosen)), self._opening(update, UpdateState.DONE, why):
                if due:
                    self._step_bucket(update)

    def _step_while_waiting(self, task: CommTask) -> None:
        """Take the steps of buckets that have arrived, in time that is lost anyway. Their gates stay closed."""
        while not task.done():
            with self._lock:
                update = next((u for u in self._updates if u.state is UpdateState.DUE and u.has_arrived), None)
                if update is None or not self._transforms.known:
                    return
                update.state = UpdateState.OPENING
                try:
                    with self._or_torn(len(update.chosen)):
                        self._step_bucket(update)
                finally:
                    update.state = UpdateState.STEPPED

    def _note_touch(self, parameter: nn.Parameter) -> None:
        if self.on_open is not None:
            self.on_open(Opening.of((parameter,), parameter, "touch", self._step_number))

    @contextmanager
    def _opening(self, update: BucketUpdate, then: UpdateState, why: OpeningKind) -> Iterator[None]:
        """Around what ``update``'s gate guards: other threads find it closed, and wait for the lock, until it is done.

        Should it fail, the gate opens all the same: nothing is left to wait for.
        """
        update.state = UpdateState.OPENING
        try:
            yield
        finally:
            update.state = then
            if why == "touch" and self._in_forward:
                self._reads.opened(update.parameters, update.touched_by)
            update.open_gate()
            if self.on_open is not None:
                self.on_open(Opening.of(update.parameters, update.touched_by, why, self._step_number))

    @contextmanager
    def _or_torn(self, count: int) -> Iterator[None]:
        """Should a step of ``count`` parameters break off, their weights are no step's: nothing goes on from them."""
        try:
            yield
        except BaseException as error:
            self._torn += count
            self._core.abort(error)  # also where the caller's code goes on, on this rank alone
            raise

    def _wait(self, task: CommTask) -> None:
        start = self._clock()
        if not task.done():
            self._waiting = True
            try:
                with profiled(f"bytescheduler::gate {task.name}"):
                    self._transport.join(task, self._timeout)
            finally:
                self._waiting = False
            waited = self._clock() - start
            self.statistics.exposed_s += waited
            if self._in_forward:
                self.statistics.gate_wait_s += waited
            self._record(f"gate {task.name}", GATE, start, step=self._step_number)
        else:
            task.wait(0)  # raises what the task failed with

    def _record(self, name: str, category: str, start: float, *, step: int) -> None:
        if self._timeline is not None:
            here = threading.current_thread()
            lane = _LANE if here.ident == self._training_thread else here.name
            self._timeline.span(name, category, start, self._clock(), lane=lane, args={"step": step})
