"""One fit on one rank, between DDP's reducer and the scheduler: carries updates across steps, keeps reads exact.

One step, on the training thread::

    forward     a touch of a parameter opens its bucket's gate: wait for the bucket, step its parameters
    (end)       buckets that the forward pass did not touch are waited for and stepped
    backward    DDP's comm hook hands each bucket to the core and returns a completed future: DDP never waits
    (end)       gates close on all parameters: reading ``.grad`` would wait, reading weights would not
    (clipping)  recorded, and done when the gradients have arrived; so is unscaling (``gradient_transforms.py``)
    step        hyperparameters are copied, membership is taken from ``p.grad``; from here reading weights waits too

On a GPU the training's stream waits for a bucket; the host waits only until its communication is launched
(``device_streams.py``). What depends on norms, such as clipping, is decided on the host, which waits for them.

All pending updates land before the next backward pass writes the buckets (:meth:`Fit.backward`). The first backward
pass is synchronised: in it DDP uses one large bucket, and it rebuilds its buckets and copies gradients afterwards.

A step begins with the first bucket of its backward pass and ends before the next backward pass. It is of one of two
kinds (``steps.py``), and holds everything that belongs to it alone:

- *plain*: its gradients are awaited at the end of the backward pass, as with DDP;
- *overlapped*: its updates are applied as parameters are used, in the next forward pass.

``steps.py`` describes threads and the order of locks. What a bucket becomes is decided when the fit begins:
by the codec (:class:`~lightning_bytescheduler.ddp.reduction.Uncompressed` for none), by whether norms are needed early,
and by the route. All threads are named ``bytescheduler-*``, and :meth:`Fit.stop` stops them within a bound.
"""

# Annotations must not be postponed: DDP compares those of its hook as objects.

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.number_exchange import NumberExchange
from lightning_bytescheduler.ddp.ddp_arguments import refuse_join, refuse_steps_in_backward
from lightning_bytescheduler.ddp.entry_points import watch_entry_points
from lightning_bytescheduler.ddp.gradient_transforms import Transforms
from lightning_bytescheduler.ddp.own_gradients import OwnGradients
from lightning_bytescheduler.ddp.reads import ForwardPass, Reads
from lightning_bytescheduler.ddp.reduction import Reduction, ShardedReduction, Uncompressed
from lightning_bytescheduler.ddp.sample_weights import DeviceTime, SampleCounter, SampleWeights
from lightning_bytescheduler.ddp.wire import STOP_S, Wire
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerClosedError
from lightning_bytescheduler.scheduler.task import CommTask
from lightning_bytescheduler.timeline.timeline import COMPUTE, GATE, WAIT

__all__ = ["BucketFutures", "Fit", "Progress", "StepMode", "TrainingStep", "TrainingStream"]

log = logging.getLogger(__name__)

_HERE: AbstractContextManager[None] = nullcontext()
_LANDING_S = 1.5
_LOOK_S = 0.005  # seconds between two looks at this rank's progress


class StepMode:
    """Says which steps are taken as DDP's; this class says all or none.

    Attributes:
        ddp_mode: Whether steps are taken as DDP's at present.
        may_wait: Whether :meth:`before_forward` waits for other ranks on another group than the default one.
    """

    may_wait = False

    def __init__(self, ddp_mode: bool = False) -> None:
        self.ddp_mode = ddp_mode

    def before_forward(self, step: int) -> None:
        """Begin a forward pass of ``step``, on all ranks."""

    def add_exposed(self, seconds: float) -> None:
        """Record the seconds that training waited idle at the end of a step as DDP's; infinite if unknown."""


class TrainingStream:
    """The stream of a training's optimizer steps; does nothing on a CPU.

    A gate may be opened on any stream and thread: by a forward pass, or by a callback that copies weights on its own
    stream. The step is then enqueued on the stream on which ``optimizer.step()`` was called, after all other work of
    the training, and the stream that opened the gate waits for it.

    Limit: a gate opens for all parameters of a bucket. Code that reads another one of them on a third stream has to
    make that stream wait for the training's after the gate was opened. A wait at the start of the forward pass is too
    early.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream: Any = None

    def is_here(self) -> None:
        """Make the caller's stream the training's."""
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


class BucketFutures:
    """The futures that DDP gets for its buckets. They are completed, as a step waits for gradients itself."""

    def __init__(self, device: torch.device) -> None:
        self._devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        self._completed: dict[int, tuple[Any, torch.futures.Future[torch.Tensor]]] = {}  # by index of the bucket

    def completed(self, index: int, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return a completed future. It is reused, as setting a result releases the GIL to other threads."""
        made_for = (buffer.data_ptr(), buffer.numel(), buffer.dtype)
        known, future = self._completed.get(index, (None, None))
        if future is None or known != made_for:
            future = torch.futures.Future(devices=self._devices)
            future.set_result(buffer)
            self._completed[index] = (made_for, future)
        return future


@dataclass(slots=True)
class Progress:
    """How far the training thread has come; other threads read it.

    Attributes:
        phase: What the training does, in words; shown by other ranks that wait for this one in vain.
        offered: The last step all of whose buckets DDP has handed over.
        handed_over: The last step whose backward pass has ended.
        waiting: Whether the training thread may be waiting for other ranks' gradients.
        in_backward: Id of the thread within the strategy's backward pass; 0 outside of one.
        backward_start: When that pass began, in seconds of the record's clock.
        last_index: Index of this backward pass's latest bucket.
        first_forward: The forward pass whose gradients the first hook got; ``None`` before it.
    """

    phase: str = "before the first step"
    offered: int = 0
    handed_over: int = 0
    waiting: bool = False
    in_backward: int = 0
    backward_start: float = 0.0
    last_index: int = sys.maxsize
    first_forward: ForwardPass | None = None


class Fit:
    """One fit of one DDP module on one rank; see the module.

    A subclass says which kind a step is of (:meth:`make_step`), and adapts the fit to a training loop.

    Args:
        wire: What gradients travel with.
        parameters: The trained parameters.
        device: Where they live.
        codec: Decides which gradients travel encoded.
        counter: Counts a batch's samples, if ranks are weighted by them.
        by_first_use: Whether a bucket's priority is its first use in the forward pass; if false, its index.

    Attributes:
        step: The current step. Between the beginning of a backward pass and its first bucket it is one without work.
        weights: Weights of the ranks.
        weight: This rank's, in the current step.
        merges: Whether a step as DDP's can merge buckets; its messages bypass compression and parameter servers.
        sharded: Whether overlapped steps reduce in shards, so that norms are known early; the same on all ranks.
        torn: Parameters whose update was interrupted.
        lost_weights: Why the weights are not those of a whole number of steps, after a failure.
    """

    def __init__(
        self,
        wire: Wire,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        *,
        codec: Uncompressed | None = None,
        counter: SampleCounter | None = None,
        by_first_use: bool = True,
    ) -> None:
        parameters = list(parameters)
        self.wire = wire
        self.device = device
        self.record = wire.record
        self.codec = Uncompressed() if codec is None else codec
        self.merges = codec is None and wire.route.merges
        self.sharded = False
        self.weights = self._weights(counter, parameters)
        self.weight = self.weights.equal
        self.lock = threading.RLock()
        self.stream = TrainingStream(device)
        self.futures = BucketFutures(device)
        self.reads = Reads(parameters, by_first_use=by_first_use)
        self.progress = Progress()
        self.step = TrainingStep(self, 0)
        self.own_gradients = OwnGradients(parameters, lambda ids: self.step.await_means(ids))
        self.torn = 0
        self.lost_weights: SchedulerClosedError | None = None
        self._process: int | None = None  # while threads run
        self._leave_entry_points: Callable[[], None] = lambda: None

    def _weights(self, counter: SampleCounter | None, parameters: list[nn.Parameter]) -> SampleWeights:
        wire, device, statistics = self.wire, self.device, self.record.statistics
        ranks, timeout = wire.route.group.size(), timedelta(seconds=wire.timeout)
        if counter is None:
            return SampleWeights(ranks=ranks)
        return SampleWeights(
            counter,
            NumberExchange(timeout=timeout, on_error=self._counts_failed, failure=self.own_failure),
            ranks=ranks,
            parameters=parameters,
            exposed=lambda: statistics.exposed_s,
            device_time=DeviceTime(device) if device.type == "cuda" else None,
        )

    def start(self) -> None:
        """Open gates where PyTorch needs it, and end with the other ranks, from here on."""
        self._process = os.getpid()
        self._leave_entry_points = watch_entry_points(self)
        self.wire.board.watch(self)
        # Teardown is skipped if another callback's on_exception raises, and a thread inside torch would abort the
        # process when the interpreter ends.
        atexit.register(self.stop, failed=True)

    def take_over(self, model: DistributedDataParallel) -> None:
        """Replace the communication of ``model``, once it is wrapped."""
        self.own_gradients.know(model)
        self.static_graph = model.static_graph
        model.register_comm_hook(self, Fit.hook)
        model.join_hook = refuse_join  # type: ignore[method-assign]
        model._setup_in_backward_optimizers = partial(refuse_steps_in_backward, model.module)  # type: ignore[method-assign]
        # Dynamo cuts compiled graphs at DDP's bucket size, and requires at least the size of DDP's first bucket.
        model.bucket_bytes_cap = max(model.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)

    # ------------------------------------------------------------------ how steps are taken; for subclasses

    mode = StepMode()
    """Which steps are taken as DDP's."""
    static_graph = False
    """Whether DDP's module has a static graph."""
    overlapped = False
    """Whether updates cross the step boundary unless :attr:`mode` says otherwise; if false, backward waits."""

    def make_step(self, number: int, *, as_ddp: bool) -> "TrainingStep":
        """Return the step of the ``number``-th backward pass that communicates."""
        raise NotImplementedError

    # ------------------------------------------------------------------ queries from any thread

    @property
    def awaited_step(self) -> int:
        """The step whose gradients the training thread waits for; 0 if it does not wait."""
        number, progress = self.step.number, self.progress
        # At the end of a backward pass DDP waits for its futures.
        at_its_end = progress.in_backward != 0 and progress.offered == number > progress.handed_over
        return number if progress.waiting or at_its_end else 0

    @property
    def entered(self) -> bool:
        """Whether this thread holds the lock; the caller has then interrupted it, as a signal handler does."""
        return bool(cast(Any, self.lock)._is_owned())

    def flush(self) -> None:
        """Wait for all gradients and apply all pending updates; afterwards everything is final."""
        if not self.progress.in_backward:  # a signal handler may come here in a backward pass: weights are final
            self.step.flush()

    def before_fork(self) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Watching`."""
        self.lock.acquire()  # its holder waits for a task at most, which ends with an abort or the timeout
        with suppress(Exception):  # the training thread meets the error at its next touch
            self.step.before_fork()

    def after_fork(self, *, in_child: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Watching`."""
        if in_child:
            self.lock = threading.RLock()
            self.open_gates()
        else:
            self.lock.release()

    # ------------------------------------------------------------------ called by DDP

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's comm hook, called in order of bucket index on every rank; see ``register_comm_hook``."""
        index, progress = bucket.index(), self.progress
        # Hooks run in order of index, so an index that is not larger begins another pass. But in the first pass of a
        # static graph DDP gives index 0 to all buckets, and calls none of them the last.
        first_of_static = self.static_graph and self.reads.forward is progress.first_forward
        if index <= progress.last_index and not (first_of_static and progress.last_index != sys.maxsize):
            self._begin_step()
        progress.last_index = index
        step = self.step
        self.weights.gradient_exists()
        if bucket.is_last() or first_of_static:
            progress.offered = step.number
        self.own_gradients.hand_over(bucket)
        return step.reduce(bucket, bucket.buffer())

    def _begin_step(self) -> None:
        if self.step.is_pending:
            raise RuntimeError(
                "A backward pass started while gradients of the previous one were still on their way. Call "
                "self.manual_backward(loss) instead of loss.backward(), or use cross_barrier=False."
            )
        number = self.step.number + 1
        if number == 1:
            self.progress.first_forward = self.reads.forward
        self.weight = self.weights.begin_step()
        as_ddp = number > 1 and self.mode.ddp_mode
        routing = self.wire.route.routing
        if routing is not None:
            routing.in_order = not (as_ddp and self.merges)
        self.step = self.make_step(number, as_ddp=as_ddp)
        self.codec.begin_step()

    # ------------------------------------------------------------------ called by steps

    def reduction(self, number: int, *, overlaps: bool) -> Reduction:
        """Return the reduction of step ``number``."""
        kind = ShardedReduction if overlaps and self.sharded else Reduction
        return kind(self.wire.core, self.wire.route, number, self.weight, self.codec)

    def wait(self, task: CommTask) -> None:
        """Wait for ``task``, and count the time.

        Raises:
            SchedulerTimeoutError: If it takes too long.
            BaseException: The task's error.
        """
        if task.done():
            task.wait(0)  # raises the task's error
            return
        record, progress = self.record, self.progress
        start = record.clock()
        progress.waiting = True
        try:
            self.wire.route.join(task, self.wire.timeout)
        finally:
            progress.waiting = False
        waited = record.waited(f"gate {task.name}", GATE, start, step=task.key.step)
        if self.reads.forward.under_way:
            record.statistics.gate_wait_s += waited

    @contextmanager
    def or_torn(self, count: int) -> Iterator[None]:
        """Abort if a step of ``count`` parameters is interrupted, as their weights are then inconsistent."""
        try:
            yield
        except BaseException as error:
            self.torn += count
            self.wire.core.abort(error)  # also if the caller catches the error on this rank alone
            raise

    def count_whole_step(self, optimizer: Optimizer) -> None:
        """Count a step that the optimizer took by itself."""
        statistics = self.record.statistics
        statistics.steps += 1
        statistics.updates += sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    # ------------------------------------------------------------------ called by the training loop

    def look(self) -> None:
        """Agree with the other ranks how steps are taken, if that is due; all ranks call this before the same step."""
        self.progress.waiting = self.mode.may_wait
        try:
            self.mode.before_forward(self.step.number + 1)
        finally:
            self.progress.waiting = False

    def begin_forward(self, batch: Any = None, *, looks: bool = True) -> None:
        """Begin a forward pass, before ``training_step``: observe the first use of parameters.

        Args:
            batch: This rank's batch.
            looks: Whether all ranks call this; if false, they call :meth:`look` elsewhere.
        """
        number = self.step.number + 1
        self.weights.begin_batch(batch)
        if looks:
            self.look()
        self.weights.begin_computing()
        self.record.training_thread = threading.get_ident()
        self.progress.phase = f"in training_step, step {number}"
        self.own_gradients.begin_forward()
        self.reads.begin_forward(self.record.clock(), number, observes=self.overlapped)

    def end_forward(self) -> None:
        """End a forward pass, after ``training_step``: apply the updates that it did not touch."""
        number = self.step.number + 1
        self.own_gradients.end_forward()
        self.reads.end_observing()
        self.reads.end_forward(self.step.end_forward())
        self.progress.phase = f"after training_step, step {number}"
        self.record.span("forward", COMPUTE, self.reads.forward.start, step=number)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wrap the strategy's backward pass or passes, which write the buckets: the last step lands first."""
        progress = self.progress
        try:
            self.stream.is_here()
            self.step.finish()
            progress.in_backward = threading.get_ident()
            self.reads.before_backward()
            self.step = TrainingStep(self, self.step.number)
            progress.phase = f"in the backward pass, step {self.step.number + 1}"
            progress.last_index = sys.maxsize
            progress.backward_start = self.record.clock()
            yield
            step = self.step
            step.count_exposed()
            self.weights.end_backward()
            self.reads.after_backward(step.number)
            progress.phase = f"after the backward pass, step {step.number}"
            progress.handed_over = step.number
            # A pass that only accumulates gradients belongs to the next step.
            ends_step = progress.last_index != sys.maxsize
            number, kind = (step.number, step.kind) if ends_step else (step.number + 1, "")
            self.record.backward(progress.backward_start, step=number, kind=kind)
        finally:
            progress.in_backward = 0  # user code may catch a failure and go on

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Wrap each pass that adds to gradients, the strategy's or the user's: see ``entry_points.Watching``."""
        if self.progress.in_backward not in (0, threading.get_ident()):
            yield  # another thread's pass; the training's own pass is in progress
            return
        self.step.open_all("another backward pass")
        with self.own_gradients.backward_pass():
            yield
        self.step.end_backward()

    def take_step(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Step the optimizer now or defer the step; see :meth:`TrainingStep.take`."""
        self.stream.is_here()
        return self.step.take(optimizer, own_step)

    # ------------------------------------------------------------------ failures; called by the fault board's thread

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop after the gradients of ``step`` steps have arrived, so that all ranks end with the same weights."""
        if step is not None:
            deadline = time.monotonic() + _LANDING_S
            # This rank may be behind: the failed rank has sent all that this rank needs to reach that step.
            while self.progress.handed_over < step and time.monotonic() < deadline and self._process is not None:
                time.sleep(_LOOK_S)
            self._await_arrival(deadline, step)
        self._abort(fault)

    def own_failure(self) -> BaseException | None:
        """Return what has stopped the scheduler, from any thread."""
        return self.wire.core.abort_cause

    def steps_handed_over(self) -> int:
        """Return how many backward passes have ended."""
        return self.progress.handed_over

    def _await_arrival(self, deadline: float, step: float = math.inf) -> None:
        """Give gradients of the first ``step`` steps until ``deadline`` to arrive."""
        with suppress(Exception):
            for task in self.step.tasks_in_flight():
                if task.key.step <= step:
                    task.wait(max(0.0, deadline - time.monotonic()))

    def _counts_failed(self, error: BaseException) -> None:
        self._abort(self.wire.on_error(error))

    def _abort(self, error: BaseException) -> None:
        """End all communication; merged messages, which bypass the core, look at its cause."""
        self.wire.core.abort(error)
        if self.wire.route.routing is not None:
            self.wire.route.routing.call_off()

    # ------------------------------------------------------------------ the end

    def fail(self, error: BaseException) -> None:
        """Stop for good, because of this rank's failure or another's.

        Updates whose gradients have arrived are applied first.
        """
        self._await_arrival(time.monotonic() + _LANDING_S)
        self._abort(error)
        self.stop(failed=True)
        try:
            applied, lost = self.land_what_arrived()
        except Exception as not_settled:
            self.lost_weights = SchedulerClosedError(f"The last updates could not be applied: {not_settled}.")
            return
        if lost:
            self.lost_weights = SchedulerClosedError(
                f"{lost} of {applied + lost} parameters lack the update of the last step, as gradients did not arrive."
            )
            self.lost_weights.__cause__ = error

    def land_what_arrived(self) -> tuple[int, int]:
        """Apply what has arrived after a failure, drop the rest, and make every parameter plain again.

        Returns:
            How many parameters have the update of the last step, and how many lack it for good.
        """
        with self.lock:
            applied, lost = self.step.land_what_arrived()
            self.open_gates()
        return applied - self.torn, lost + self.torn

    def stop(self, *, failed: bool) -> None:
        """Stop every thread and leave the groups; bounded, never raises, idempotent.

        Args:
            failed: Whether training ended with an error; then it does not wait.
        """
        if self._process != os.getpid():  # stopped; or a forked child, which must not stop its parent's threads
            return
        self._process = None
        self.wire.board.unwatch(self)
        self.wire.close(
            failed=failed,
            idle=lambda: not self.step.under_way,
            exchanges=lambda: self.weights.close(STOP_S),
        )
        atexit.unregister(self.stop)

    def close(self, *, failed: bool) -> None:
        """Stop, and make every parameter plain again; see :meth:`stop`."""
        self.stop(failed=failed)
        self.open_gates()
        self._leave_entry_points()

    def open_gates(self) -> None:
        """Drop pending updates and make every parameter plain again; call it after an error or a flush."""
        with self.lock:
            self.reads.close()
            self.own_gradients.close()
            self.step.close()


class TrainingStep:
    """A step: handles its buckets, the optimizer's step, and the moment at which everything has to be final.

    The methods here are for steps whose gradients are final when the backward pass ends.

    Args:
        number: Number of the backward pass among those that communicate, from 1; equal on all ranks, so it keys tasks.
    """

    kind = "synchronised"
    """Name for the timeline."""

    def __init__(self, fit: Fit, number: int) -> None:
        self.fit = fit
        self.number = number
        self.transforms = Transforms()
        self.waits_from = 0.0  # when the wait at the end of the backward pass began; 0 before, or if there is none

    # ------------------------------------------------------------------ backward pass

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks.

        Returns:
            The future that DDP gets.
        """
        raise NotImplementedError

    def count_exposed(self) -> None:
        """Count the wait at the end of the backward pass, which has just ended."""
        if self.waits_from:
            self.fit.record.waited("gradients", WAIT, self.waits_from, step=self.number)

    def await_means(self, parameters: set[int]) -> None:
        """Wait, at the end of the pass, for the mean gradients of these parameters, which other code holds."""

    def end_backward(self) -> None:
        """End the backward pass: handle gradients that could be read without a touch."""

    @property
    def under_way(self) -> bool:
        """Whether a message outside the scheduler's core has not arrived."""
        return False

    # ------------------------------------------------------------------ optimizer step

    def take(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Step the optimizer now, or defer the step.

        Returns:
            The result of ``own_step``, if it was called.
        """
        self.fit.count_whole_step(optimizer)
        return own_step()

    # ------------------------------------------------------------------ until the next backward pass

    @property
    def is_pending(self) -> bool:
        """Whether some of its updates may not have been applied."""
        return False

    def open_all(self, reason: str) -> None:
        """Make all weights and gradients final and open all gates; on any thread."""

    def flush(self) -> None:
        """Wait for all gradients and apply all pending updates; afterwards everything is final."""

    def finish(self) -> None:
        """Flush and drop the updates, as the next backward pass begins."""

    def before_fork(self) -> None:
        """Leave nothing that a forked child would wait for; under the lock."""

    def end_forward(self) -> list[nn.Parameter]:
        """End a forward pass: apply updates that it did not touch, and return their parameters."""
        return []

    def tasks_in_flight(self) -> list[CommTask]:
        """Return the tasks of updates that are pending, whether the step was requested or not; for any thread."""
        return []

    def land_what_arrived(self) -> tuple[int, int]:
        """Apply what has arrived after a failure, and drop the rest.

        Returns:
            How many parameters got their update, and how many lack it for good.
        """
        return 0, 0

    def close(self) -> None:
        """Drop pending updates and make parameters plain again; call it after an error or a flush."""
