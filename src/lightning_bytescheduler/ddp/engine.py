"""The engine between DDP's reducer and the scheduler: carries updates across the step boundary, keeps reads exact.

One step, on the training thread::

    forward     a touch of a parameter opens its bucket's gate: wait for the bucket, step its parameters
    (end)       buckets that the forward pass did not touch are waited for and stepped
    backward    DDP's comm hook hands each bucket to the core and returns a completed future: DDP never waits
    (end)       gates close on all parameters: reading ``.grad`` would wait, reading weights would not
    (clipping)  recorded, and done when the gradients have arrived; so is unscaling (``gradient_transforms.py``)
    step        hyperparameters are copied, membership is taken from ``p.grad``; from here reading weights waits too

On a GPU the training's stream waits for a bucket; the host waits only until its communication is launched
(``device_streams.py``). What depends on norms, such as clipping, is decided on the host, which waits for them.

All pending updates land before the next backward pass writes the buckets (:meth:`GradientEngine.backward`). The
first backward pass is synchronised: in it DDP uses one large bucket, and it rebuilds its buckets and copies gradients
afterwards.

``steps.py`` describes the kinds of steps. ``overlapped_step.py`` describes threads and the order of locks.
"""

# Annotations must not be postponed: DDP compares those of its hook as objects.

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.ddp_arguments import refuse_join, refuse_steps_in_backward
from lightning_bytescheduler.ddp.gates import FirstUseObserver
from lightning_bytescheduler.ddp.merged_buckets import MergedBuckets
from lightning_bytescheduler.ddp.overlapped_step import OverlappedStep
from lightning_bytescheduler.ddp.plain_step import PlainStep, ScheduledBuckets
from lightning_bytescheduler.ddp.point_in_force import StepMode
from lightning_bytescheduler.ddp.sample_weights import NOTHING
from lightning_bytescheduler.ddp.steps import ForwardPass, StepContext, StepListener, TrainingStep
from lightning_bytescheduler.timeline.timeline import COMPUTE

__all__ = ["EngineOptions", "GradientEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the steps of a fit are taken; all but ``unseen`` and ``processors`` are the same on all ranks.

    Attributes:
        overlapped: Updates cross the step boundary unless ``mode`` says otherwise; if false, backward waits for
            gradients.
        sharded: Overlapped steps reduce in shards, so that norms are known early.
        merged_bytes: Least bytes of a message in a step as DDP's; 0 to send buckets unmerged.
    """

    overlapped: bool
    mode: StepMode = field(default_factory=StepMode)
    sharded: bool = False
    unseen: frozenset[int] = frozenset()
    merged_bytes: int = 0
    processors: int = 1


class GradientEngine:
    """Turns one DDP module's gradients into tasks, and their arrival into optimizer steps.

    Args:
        by_first_use: Whether a bucket's priority is its first use in the forward pass; if false, its index.

    Attributes:
        phase: What the training does, in words; shown by other ranks that wait for this one in vain.
    """

    def __init__(self, context: StepContext, *, by_first_use: bool = True) -> None:
        self.context = context
        self.options = EngineOptions(overlapped=False)
        self.mode = self.options.mode
        self.phase = "before the first step"
        self.steps_handed_over = 0
        self.steps_offered = 0
        self._by_first_use = by_first_use
        self._first_use = FirstUseObserver(context.parameters)
        self._bucket_order: dict[int, int] = {}
        self._last_index = sys.maxsize  # index of this backward pass's latest bucket
        self._static_graph = False
        self._first_forward: ForwardPass | None = None  # whose gradients the first hook got
        self._backward_start = 0.0
        self._in_backward = 0  # id of the thread within the strategy's backward pass

    def begin_fit(self, options: EngineOptions, listener: StepListener | None = None) -> None:
        """Set how steps are taken, once, before the first step."""
        self.options = options
        self.mode = options.mode
        self.context.unseen = set(options.unseen)
        if listener is not None:
            self.context.listener = listener

    def take_over(self, model: DistributedDataParallel) -> None:
        """Replace the communication of ``model``."""
        self.context.own_gradients.know(model)
        self._static_graph = model.static_graph
        model.register_comm_hook(self, GradientEngine.hook)
        model.join_hook = refuse_join  # type: ignore[method-assign]
        model._setup_in_backward_optimizers = partial(refuse_steps_in_backward, model.module)  # type: ignore[method-assign]
        # Dynamo cuts compiled graphs at DDP's bucket size, and requires at least the size of DDP's first bucket.
        model.bucket_bytes_cap = max(model.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)

    # ------------------------------------------------------------------ queries from any thread

    @property
    def awaited_step(self) -> int:
        """The step whose gradients the training thread waits for; 0 if it does not wait."""
        number = self.context.step.number
        # At the end of a backward pass DDP waits for its futures.
        at_its_end = self._in_backward != 0 and self.steps_offered == number > self.steps_handed_over
        return number if self.context.waiting or at_its_end else 0

    def flush(self) -> None:
        """Wait for all gradients and apply all pending updates; afterwards everything is final."""
        if not self._in_backward:  # a signal handler may come here in a backward pass: weights are final
            self.context.step.flush()

    def fail_merged(self, error: BaseException) -> None:
        """End with ``error`` a backward pass that waits for communication outside the scheduler's core."""
        self.context.step.fail(error)
        self.context.sparse.call_off()

    @property
    def merged_under_way(self) -> bool:
        """Whether communication outside the scheduler's core is in flight."""
        return self.context.step.under_way or self.context.sparse.under_way

    def before_fork(self) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Watching`."""
        self.context.lock.acquire()  # its holder waits for a task at most, which ends with an abort or the timeout
        with suppress(Exception):  # the training thread meets the error at its next touch
            self.context.step.before_fork()

    def after_fork(self, *, in_child: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Watching`."""
        if in_child:
            self.context.lock = threading.RLock()
            self.close()
        else:
            self.context.lock.release()

    # ------------------------------------------------------------------ called by DDP

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's comm hook, called in order of bucket index on every rank; see ``register_comm_hook``."""
        index = bucket.index()
        # Hooks run in order of index, so another pass has begun. But in the first pass of a static graph DDP gives
        # index 0 to all buckets, and calls none of them the last.
        first_of_static = self._static_graph and self.context.forward is self._first_forward
        if index <= self._last_index and not (first_of_static and self._last_index != sys.maxsize):
            self._begin_step()
        self._last_index = index
        step = self.context.step
        if self.context.weights is not None:
            self.context.weights.gradient_exists()
        if bucket.is_last() or first_of_static:
            self.steps_offered = step.number
        buffer = bucket.buffer()
        self.context.own_gradients.hand_over(bucket)
        return step.reduce_sparse(bucket, buffer) if buffer.is_sparse else step.reduce(bucket, buffer)

    def _begin_step(self) -> None:
        if self.context.step.is_pending:
            raise RuntimeError(
                "A backward pass started while gradients of the previous one were still on their way. Call "
                "self.manual_backward(loss) instead of loss.backward(), or use cross_barrier=False."
            )
        context, options, number = self.context, self.options, self.context.step.number + 1
        if number == 1:
            self._first_forward = context.forward
        weight = None if context.weights is None else context.weights.begin_step()
        context.weight = weight or context.equal_weight
        as_ddp = number > 1 and self.mode.ddp_mode
        routing = context.transport.routing
        if routing is not None and as_ddp and context.merges:
            routing.go_direct()
        elif routing is not None:
            routing.go_in_order()
        if as_ddp and context.merges:
            merged = MergedBuckets.of(context, number, limit=options.merged_bytes, processors=options.processors)
            context.step = PlainStep(context, number, merged, self.mode.add_exposed)
        elif number > 1 and options.overlapped and not as_ddp:
            context.step = OverlappedStep(context, number, self._position_of, sharded=options.sharded)
        else:
            scheduled = ScheduledBuckets(context, number, self._position_of)
            each = self._static_graph and number == 1
            context.step = PlainStep(context, number, scheduled, self.mode.add_exposed if as_ddp else None, each=each)
        if context.compression is not None:
            # If the plan cannot overlap, all steps are as DDP's and compressed.
            context.compression.begin_step(as_ddp=as_ddp and options.overlapped)

    def _position_of(self, index: int, parameters: list[nn.Parameter]) -> int:
        known = self._bucket_order.get(index) if self._by_first_use else index
        return self._first_use.position(parameters) if known is None else known

    # ------------------------------------------------------------------ called by the strategy

    def look(self) -> None:
        """Agree with the other ranks how steps are taken, if that is due; all ranks call this before the same step."""
        context, step = self.context, self.context.step
        layers = None if context.compression is None else context.compression.layers
        context.waiting = self.mode.may_wait or layers is not None
        try:
            self.mode.before_forward(step.number + 1)
            if layers is not None:  # only one setting is tried at a time
                counts = step.kind == OverlappedStep.kind or not self.options.overlapped
                layers.before_step(step.number + 1, counts=counts and not (layers.is_settled and self.mode.tries))
        finally:
            context.waiting = False

    def begin_forward(self, batch: Any = None, *, looks: bool = True) -> None:
        """Begin a forward pass, before ``training_step``: observe the first use of parameters.

        Args:
            batch: This rank's batch; ``NOTHING`` if it has none.
            looks: Whether all ranks call this; if false, they call :meth:`look` and weigh batches elsewhere.
        """
        context, number = self.context, self.context.step.number + 1
        weights = context.weights if looks else None
        if weights is not None:
            weights.begin_batch(batch)
        if looks:
            self.look()
        if weights is not None:
            weights.begin_computing()
        context.training_thread = threading.get_ident()
        self.phase = f"in training_step, step {number}"
        context.forward = ForwardPass(context.clock())
        context.own_gradients.begin_forward()
        if batch is NOTHING:
            self.context.step.finish()  # no forward pass will touch the pending parameters
        elif self.options.overlapped:
            self._first_use.begin(context.unseen)
            context.reads.begin(number)

    def end_forward(self) -> None:
        """End a forward pass, after ``training_step``: apply the updates that it did not touch."""
        context = self.context
        forward, number = context.forward, self.context.step.number + 1
        context.own_gradients.end_forward()
        self._first_use.end()
        late, untouched = self.context.step.end_forward()
        context.reads.end(late, untouched)
        if forward.touched_buckets:
            self._bucket_order = {index: position for position, index in enumerate(forward.touched_buckets)}
        forward.under_way = False
        self.phase = f"after training_step, step {number}"
        context.record("forward", COMPUTE, forward.start, step=number)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wrap the strategy's backward pass or passes, which write the buckets: the last step lands first."""
        context = self.context
        try:
            context.stream.is_here()
            self.context.step.finish()
            if context.compression is not None:
                context.compression.before_backward()
            self._in_backward = threading.get_ident()
            context.reads.before_backward()
            context.step = TrainingStep(context, context.step.number)
            self.phase = f"in the backward pass, step {self.context.step.number + 1}"
            self._last_index = sys.maxsize
            self._backward_start = context.clock()
            yield
            step = self.context.step
            step.count_exposed()
            if context.weights is not None:
                context.weights.end_backward()
            self._find_unseen()  # after all passes, as each may have gradients of other layers
            self.phase = f"after the backward pass, step {step.number}"
            self.steps_handed_over = step.number
            context.record_backward(step, self._backward_start, communicated=self._last_index != sys.maxsize)
        finally:
            self._in_backward = 0  # user code may catch a failure and go on

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Wrap each pass that adds to gradients, the strategy's or the user's: see ``entry_points.Watching``."""
        if self._in_backward not in (0, threading.get_ident()):
            yield  # another thread's pass; the training's own pass is in progress
            return
        self.context.step.open_all("another backward pass")
        with self.context.own_gradients.backward_pass():
            yield
        self.context.step.end_backward()

    def _find_unseen(self) -> None:
        """Step newly found unseen parameters within the step. Ranks may differ in this, as it changes no message."""
        context = self.context
        context.unseen |= self._first_use.read_unseen()
        for certain, parameters in zip((True, False), context.reads.after_backward(), strict=True):
            if parameters:
                context.unseen.update(map(id, parameters))
                self._first_use.note_unseen(parameters)
                context.listener.read_unseen(parameters, self.context.step.number, certain)

    def step(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Step the optimizer now or defer the step; see :meth:`TrainingStep.take`."""
        self.context.stream.is_here()
        self._note_step(optimizer)
        return self.context.step.take(optimizer, own_step)

    def count_whole_step(self, optimizer: Optimizer) -> None:
        """Account for a step that the optimizer took by itself."""
        self._note_step(optimizer)
        self.context.count_whole_step(optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        if self.context.compression is not None:
            self.context.compression.stepped(optimizer)

    def land_what_arrived(self) -> tuple[int, int]:
        """Apply what has arrived after a failure, drop the rest, and make every parameter plain again.

        Returns:
            How many parameters have the update of the last step, and how many lack it for good.
        """
        with self.context.lock:
            applied, lost = self.context.step.land_what_arrived()
            self.close()
        torn = self.context.torn
        return applied - torn, lost + torn

    def close(self) -> None:
        """Drop pending updates and make every parameter plain again; call it after an error or a flush."""
        with self.context.lock:
            self._first_use.end()
            self.context.reads.close()
            self.context.own_gradients.close()
            self.context.step.close()
