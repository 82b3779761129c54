"""The kinds of steps, and what all steps of a fit share.

A step begins with the first bucket of its backward pass and ends before the next backward pass. The engine makes it, of
one of two kinds, and it holds everything that belongs to it alone:

- *plain* (:class:`~lightning_bytescheduler.ddp.plain_step.PlainStep`): its gradients are awaited at the end of the
  backward pass, as with DDP;
- *overlapped* (:class:`~lightning_bytescheduler.ddp.overlapped_step.OverlappedStep`): its updates are applied as
  parameters are used, during the next forward pass.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.operations import profiled
from lightning_bytescheduler.collectives.transport import GradientTransport
from lightning_bytescheduler.ddp.aliases import AliasDetector, scripted_parameters
from lightning_bytescheduler.ddp.compressed_reduction import CompressedReduction, GradientCompression
from lightning_bytescheduler.ddp.gates import UnseenReads
from lightning_bytescheduler.ddp.gradient_transforms import PendingScale, Unscale
from lightning_bytescheduler.ddp.own_gradients import OwnGradients
from lightning_bytescheduler.ddp.reduction import (
    AllReduction,
    GradientBucket,
    Reduction,
    ShardedReduction,
    StepTasks,
    exact,
)
from lightning_bytescheduler.ddp.sample_weights import EqualWeight, SampleWeights, StepWeight
from lightning_bytescheduler.ddp.sparse_gradients import SparseGradients
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import COMPUTE, COPY_TO_DEVICE, COPY_TO_HOST, GATE, WAIT, Timeline

_LANE = "training thread"
_HERE: AbstractContextManager[None] = nullcontext()


class StepListener:
    """Called as steps are taken; this class ignores all calls."""

    def waited_early(self) -> None:
        """Code on this thread's stack waits between two forward passes; called once between two, without a lock."""

    def stepped_whole(self, why: str) -> None:
        """A step is not deferred although it could overlap; ``why`` in words."""

    def read_unseen(self, parameters: list[nn.Parameter], step: int, certain: bool) -> None:
        """``parameters`` were read past their gates in ``step``, certainly or possibly with last step's weights."""


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
    """The futures of buckets that DDP gets: completed, as a step waits by itself, now or later."""

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


class ForwardPass:
    """One forward pass that trains, until the next one begins.

    Attributes:
        touched_buckets: Indices of buckets in the order in which it opened their gates.
        read_early: Whether code has waited between its end and the next one's start.
    """

    __slots__ = ("read_early", "start", "touched_buckets", "under_way")

    def __init__(self, start: float, *, under_way: bool = True) -> None:
        self.start = start
        self.under_way = under_way
        self.touched_buckets: list[int] = []
        self.read_early = False


class StepContext:
    """Shared state of all steps of a fit.

    Args:
        timeout: Longest wait for one bucket, in seconds.
        timeline: Takes spans; ``None`` for none.
        compression: Decides which gradients travel encoded; ``None`` for none.
        weights: This rank's weights; ``None`` for equal weights.
        sparse: Group of sparse gradients; the default group if ``None``.

    Attributes:
        step: The current step. Between the beginning of a backward pass and its first bucket it is one without work.
        unseen: Ids of parameters that are read without a touch; their updates are taken in the step.
        held_elsewhere: Ids of parameters whose memory other code held at the last check.
        opened_for: What needed all gates open at once, with the number of steps.
        waiting: Whether the training thread may be waiting for other ranks' gradients.
    """

    def __init__(
        self,
        *,
        core: ByteCore,
        transport: GradientTransport,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        timeout: float,
        statistics: SchedulerStatistics,
        timeline: Timeline | None = None,
        compression: GradientCompression | None = None,
        weights: SampleWeights | None = None,
        sparse: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.weights = weights
        self.sparse = SparseGradients(sparse)
        self.equal_weight = EqualWeight(transport.group.size())
        self.weight: StepWeight = self.equal_weight  # in the current step
        self.core = core
        self.transport = transport
        self.device = device
        self.timeout = timeout
        self.statistics = statistics
        self.compression = compression
        self.clock = clock
        self.listener = StepListener()
        self.lock = threading.RLock()
        self.stream = TrainingStream(device)
        self.futures = BucketFutures(device)
        self.parameters = list(parameters)
        self.step = TrainingStep(self, 0)
        self.own_gradients = OwnGradients(self.parameters, lambda ids: self.step.await_means(ids))
        self.reads = UnseenReads()
        self.forward = ForwardPass(0.0, under_way=False)
        self.training_thread = threading.get_ident()
        self.unseen: set[int] = set()
        self.held_elsewhere: set[int] = set()
        self.opened_for: Counter[str] = Counter()
        self.waiting = False
        self.torn = 0
        self.timeline = timeline
        self._aliases = AliasDetector(self.parameters)

    @property
    def entered(self) -> bool:
        """Whether this thread holds the lock; the caller has then interrupted it, as a signal handler does."""
        return bool(cast(Any, self.lock)._is_owned())

    def reduction(self, number: int, *, sharded: bool = False) -> Reduction:
        """Return the reduction of step ``number``."""
        tasks, compression = StepTasks(self.core, self.transport, number, self.weight), self.compression
        if sharded:
            return ShardedReduction(tasks, exact if compression is None else compression.encoded)
        if compression is not None:
            return CompressedReduction(tasks, compression, partial(self._on_host, step=number))
        return AllReduction(tasks)

    def on_the_wire(self, bucket: GradientBucket, step: int) -> GradientBucket:
        """Return the bucket to reduce: ``bucket``, or its copy in host memory if that travels."""
        if self.compression is not None and self.compression.stays_on_device(bucket):
            return bucket
        return self._on_host(bucket, step)

    def _on_host(self, bucket: GradientBucket, step: int) -> GradientBucket:
        copies = self.transport.host_copies
        if copies is None:
            return bucket
        buffer = bucket.buffer
        copy, exists, made = copies.take_out(bucket.index, buffer)
        if self.timeline is not None:
            began: list[float] = []
            copies.when_made(exists, lambda: began.append(self.clock()))
            copies.when_made(made, lambda: self._record_copy(COPY_TO_HOST, bucket.index, step, began.pop()))
        on_host = GradientBucket(bucket.index, bucket.parameters, copy, bucket.priority)
        on_host.exists = made

        def put_back(part: SubCommTask) -> None:
            start, place = self.clock(), slice(part.offset, part.offset + part.size)
            if part.passage is not None:
                part.passage.came = part.passage.came or start
            whole = copy, buffer
            if part.parent.size != copy.numel():  # sharded reduction sends complex numbers as pairs of real ones
                whole = torch.view_as_real(copy).view(-1), torch.view_as_real(buffer).view(-1)
            copies.put_back(whole[0][place], whole[1][place])
            self._record_copy(COPY_TO_DEVICE, bucket.index, step, start)

        on_host.on_part = put_back
        return on_host

    def _record_copy(self, stage: str, index: int, step: int, start: float) -> None:
        if self.timeline is not None:
            args = {"step": step, "task": index}
            self.timeline.overlapping(f"bucket {index}", stage, start, self.clock(), lane=stage.upper(), args=args)

    @property
    def merges(self) -> bool:
        """Whether a step as DDP's can merge buckets; its messages bypass compression and parameter servers."""
        return self.compression is None and self.transport.push_pull is None

    def find_held(self) -> set[int]:
        """Return the ids of parameters whose memory other code can read."""
        self.held_elsewhere = self._aliases.find() | scripted_parameters()
        return self.held_elsewhere

    def waits_early(self) -> bool:
        """Record a wait; returns whether it is the first one since the last forward pass, outside of one."""
        forward = self.forward
        early = not forward.under_way and not forward.read_early
        forward.read_early = forward.read_early or early
        return early

    def wait(self, task: CommTask) -> None:
        """Wait for ``task``, and count the time.

        Raises:
            SchedulerTimeoutError: If it takes too long.
            BaseException: The task's error.
        """
        if task.done():
            task.wait(0)  # raises the task's error
            return
        start = self.clock()
        self.waiting = True
        try:
            with profiled(f"bytescheduler::gate {task.name}"):
                self.transport.join(task, self.timeout)
        finally:
            self.waiting = False
        waited = self.waited(f"gate {task.name}", GATE, start, step=task.key.step)
        if self.forward.under_way:
            self.statistics.gate_wait_s += waited

    @contextmanager
    def or_torn(self, count: int) -> Iterator[None]:
        """Abort if a step of ``count`` parameters is interrupted, as their weights are then inconsistent."""
        try:
            yield
        except BaseException as error:
            self.torn += count
            self.core.abort(error)  # also if the caller catches the error on this rank alone
            raise

    def count_whole_step(self, optimizer: Optimizer) -> None:
        """Count a step that the optimizer took by itself."""
        self.statistics.steps += 1
        self.statistics.updates += sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def waited(self, name: str, category: str, start: float, *, step: int) -> float:
        """Count the seconds from ``start`` until now as waiting for gradients; returns them.

        Counters, log, metrics and timeline all use this figure.
        """
        seconds = self.record(name, category, start, step=step) - start
        self.statistics.exposed_s += seconds
        return seconds

    def record(self, name: str, category: str, start: float, *, step: int) -> float:
        """Record a span from ``start`` until now on the timeline, if there is one; returns its end."""
        end = self.clock()
        if self.timeline is not None:
            here = threading.current_thread()
            lane = _LANE if here.ident == self.training_thread else here.name
            self.timeline.span(name, category, start, end, lane=lane, args={"step": step})
        return end

    def record_backward(self, step: TrainingStep, start: float, *, communicated: bool) -> None:
        """Record the backward pass that ends now on the timeline, if there is one.

        Args:
            step: Its step; with accumulated gradients it belongs to the next one.
            start: Its beginning.
            communicated: Whether its gradients were handed over.
        """
        if self.timeline is None:
            return
        if not communicated:
            self.record("backward", COMPUTE, start, step=step.number + 1)
            return
        args = {"step": step.number, "kind": step.kind}
        self.timeline.span("backward", COMPUTE, start, self.clock(), lane=_LANE, args=args)


class TrainingStep:
    """A step: handles its buckets, the optimizer's step, and the moment at which everything has to be final.

    The methods here are for steps whose gradients are final when the backward pass ends.

    Args:
        number: Number of the backward pass among those that communicate, from 1; equal on all ranks, so it keys tasks.
    """

    kind = "synchronised"
    """Name for the timeline."""

    def __init__(self, context: StepContext, number: int) -> None:
        self.context = context
        self.number = number
        self.waits_from = 0.0  # when the wait at the end of the backward pass began; 0 before, or if there is none

    # ------------------------------------------------------------------ backward pass

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks.

        Returns:
            The future that DDP gets.
        """
        raise NotImplementedError

    def reduce_sparse(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of sparse gradients, which cannot be cut into partitions."""
        weight = self.context.weight
        weight.wait(lambda: self.context.core.abort_cause)  # the backward pass is about to wait for the others anyway
        return self.context.sparse.reduce(buffer, weight.factor)

    def count_exposed(self) -> None:
        """Count the wait at the end of the backward pass, which has just ended."""
        if self.waits_from:
            self.context.waited("gradients", WAIT, self.waits_from, step=self.number)

    def await_means(self, parameters: set[int]) -> None:
        """Wait, at the end of the pass, for the mean gradients of these parameters, which other code holds."""

    def end_backward(self) -> None:
        """End the backward pass: handle gradients that could be read without a touch."""

    def fail(self, error: BaseException) -> None:
        """End with ``error`` a backward pass that waits outside the scheduler's core; for any thread."""

    @property
    def under_way(self) -> bool:
        """Whether a message outside the scheduler's core has not arrived."""
        return False

    # ------------------------------------------------------------------ optimizer step

    def unscale(self, optimizer: Optimizer, inverse_scale: torch.Tensor) -> Unscale | None:
        """Divide gradients by the loss scale when they have arrived; ``None`` if the caller has to do it now."""
        return None

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> bool:
        """Clip gradients by norm when they have arrived; ``False`` if the caller has to do it now."""
        return False

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """Clip gradients by value when they have arrived; ``False`` if the caller has to do it now."""
        return False

    def scale_later(self, pending: PendingScale) -> None:
        """Update a loss scale when this step's gradients are known to be finite or not."""
        raise RuntimeError(f"Step {self.number} has not taken over unscaling.")

    def update_scale(self) -> None:
        """Wait until this step's gradients are known to be finite or not, and update the loss scale."""

    def take(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Step the optimizer now, or defer the step.

        Returns:
            The result of ``own_step``, if it was called.
        """
        self.context.count_whole_step(optimizer)
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

    def end_forward(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """End a forward pass: apply updates that it did not touch.

        Returns:
            Untouched parameters: those whose update was pending until now, and those updated earlier.
        """
        return [], []

    def due_tasks(self) -> list[CommTask]:
        """Return the tasks of updates whose step has been taken; for any thread."""
        return []

    def arriving_tasks(self) -> list[CommTask]:
        """Return the tasks in flight, whether their step has been taken or not; for any thread."""
        return []

    def land_what_arrived(self) -> tuple[int, int]:
        """Apply what has arrived after a failure, and drop the rest.

        Returns:
            How many parameters got their update, and how many lack it for good.
        """
        return 0, 0

    def close(self) -> None:
        """Drop pending updates and make parameters plain again; call it after an error or a flush."""
