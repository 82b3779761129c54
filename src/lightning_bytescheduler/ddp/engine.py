"""The engine between DDP's reducer and the scheduler: it crosses the step boundary and keeps every read exact.

One step, on the training thread::

    forward     a touch of a parameter opens its bucket's gate: wait for the bucket, step its parameters
    (end)       whatever the forward did not touch is waited for and stepped
    backward    DDP's comm hook hands each bucket to the core and returns a completed future: DDP never waits
    (end)       gates close on all parameters: reading ``.grad`` would wait, reading weights would not
    (clipping)  noted, and done when the gradients have arrived; so is unscaling (``gradient_transforms.py``)
    step        hyperparameters are snapshotted, membership is taken from ``p.grad``; now reading weights waits too

On a GPU it is the training's stream that waits for a bucket, and the host only until the bucket's communication is
launched (``device_streams.py``). What depends on norms, such as clipping, is decided on the host, which waits for them.

All pending updates land before the next backward pass writes the buckets (:meth:`GradientEngine.before_backward`). The
first backward pass is synchronised: DDP uses one giant bucket in it and rebuilds its buckets afterwards, copying
gradients.

What a step is, by its kind: ``steps.py``. What threads may meet, and the order of locks: ``overlapped_step.py``.
"""

# No postponed evaluation of annotations: DDP compares those of its hook as objects.

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
from lightning_bytescheduler.ddp.ddp_mode import StepMode
from lightning_bytescheduler.ddp.gates import FirstUseObserver
from lightning_bytescheduler.ddp.merged_buckets import DdpModeStep
from lightning_bytescheduler.ddp.overlapped_step import OverlappedStep
from lightning_bytescheduler.ddp.sample_weights import NOTHING
from lightning_bytescheduler.ddp.steps import ForwardPass, StepContext, StepListener, SynchronisedStep, TrainingStep
from lightning_bytescheduler.timeline.timeline import COMPUTE

__all__ = ["EngineOptions", "GradientEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the steps of a fit are taken; all but ``unseen`` and ``processors`` are the same on all ranks.

    Attributes:
        overlapped: Updates cross the step boundary where ``mode`` does not say otherwise; else backward waits for the
            gradients.
        mode: Says which steps are taken as DDP's.
        sharded: Overlapped steps reduce in shards, which makes norms known early.
        unseen: Ids of parameters whose touches cannot be seen.
        merged_bytes: Bytes from which a message of a step as DDP's is sent; 0 to send buckets as they are.
        processors: That this rank has for itself.
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
        context: Shared with all steps.
        by_first_use: Whether buckets have the priority of their first use in the forward pass, or that of their coming.

    Attributes:
        context: As given.
        options: How steps are taken, see :meth:`begin_fit`.
        mode: Says which of them are taken as DDP's, at present.
        phase: What the training does, in words; other ranks show it when they wait for this one in vain.
        steps_offered: Backward passes whose last bucket was handed over, ended or not.
        steps_handed_over: Those that have ended.
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
        self._last_index = sys.maxsize  # of the buckets of this backward pass
        self._backward_start = 0.0
        self._in_backward = 0  # of the thread that is in the strategy's, its id

    def begin_fit(self, options: EngineOptions, listener: StepListener | None = None) -> None:
        """Say how steps are taken, once, before the first of them.

        Args:
            options: What all ranks have agreed on.
            listener: Told of steps as they are taken.
        """
        self.options = options
        self.mode = options.mode
        self.context.unseen = set(options.unseen)
        if listener is not None:
            self.context.listener = listener

    def take_over(self, model: DistributedDataParallel) -> None:
        """Take the place of the communication of ``model``."""
        self.context.own_gradients.know(model)
        model.register_comm_hook(self, GradientEngine.hook)
        model.join_hook = refuse_join  # type: ignore[method-assign]
        model._setup_in_backward_optimizers = partial(refuse_steps_in_backward, model.module)  # type: ignore[method-assign]
        # Dynamo cuts compiled graphs at DDP's bucket size, which it wants no smaller than DDP's first bucket.
        model.bucket_bytes_cap = max(model.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)

    # ------------------------------------------------------------------ what others may ask, on any thread

    @property
    def awaited_step(self) -> int:
        """The step whose gradients the training thread waits for, 0 if it does not."""
        number = self.context.step.number
        # At the end of a backward pass DDP waits for its futures.
        at_its_end = self._in_backward != 0 and self.steps_offered == number > self.steps_handed_over
        return number if self.context.waiting or at_its_end else 0

    def flush(self) -> None:
        """Wait for all gradients and apply all updates that are due; afterwards everything is final."""
        if not self._in_backward:  # as of a signal's handler: weights are final, and what it would wait for is not sent
            self.context.step.flush()

    def fail_merged(self, error: BaseException) -> None:
        """Have a backward pass that waits past the scheduler's core end with ``error``."""
        self.context.step.fail(error)
        self.context.sparse.call_off()

    @property
    def merged_under_way(self) -> bool:
        """Whether what has been sent past the scheduler's core has not arrived."""
        return self.context.step.under_way or self.context.sparse.under_way

    def before_fork(self) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Watching`."""
        self.context.lock.acquire()  # who has it waits for a task at most, which ends with an abort or the timeout
        with suppress(Exception):  # the training thread meets it at its next touch
            self.context.step.before_fork()

    def after_fork(self, *, in_child: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.entry_points.Watching`."""
        if in_child:
            self.context.lock = threading.RLock()
            self.close()
        else:
            self.context.lock.release()

    # ------------------------------------------------------------------ DDP's side

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's comm hook, called in order of bucket index on every rank; see ``register_comm_hook``."""
        index = bucket.index()
        if index <= self._last_index:  # hooks run in order of index, so a new backward pass has begun
            self._begin_step()
        self._last_index = index
        step = self.context.step
        if self.context.weights is not None:
            self.context.weights.gradient_exists()
        if bucket.is_last():
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
        context.weight = None if context.weights is None else context.weights.begin_step()
        as_ddp = number > 1 and self.mode.begin_step(number)
        routing = context.transport.routing
        if routing is not None and as_ddp and context.merges:
            routing.go_direct()
        elif routing is not None:
            routing.go_in_order()
        if as_ddp and not context.merges:
            context.step = SynchronisedStep(context, number, self._position_of, self.mode.add_exposed)
        elif as_ddp:
            context.step = DdpModeStep(
                context,
                number,
                merged_bytes=options.merged_bytes,
                processors=options.processors,
                on_exposed=self.mode.add_exposed,
            )
        elif number > 1 and options.overlapped:
            context.step = OverlappedStep(context, number, self._position_of, sharded=options.sharded)
        else:
            context.step = SynchronisedStep(context, number, self._position_of)
        if context.compression is not None:
            # A plan that cannot overlap takes no other steps: there are none to be exact beside.
            context.compression.begin_step(as_ddp=as_ddp and options.overlapped)

    def _position_of(self, index: int, parameters: list[nn.Parameter]) -> int:
        known = self._bucket_order.get(index) if self._by_first_use else index
        return self._first_use.position(parameters) if known is None else known

    # ------------------------------------------------------------------ the strategy's side

    def look(self) -> None:
        """Agree with the other ranks how steps are taken, where that is due: all come here before the same step."""
        context, step = self.context, self.context.step
        layers = None if context.compression is None else context.compression.layers
        context.waiting = self.mode.may_wait or layers is not None
        try:
            self.mode = self.mode.before_forward(step.number + 1)
            if layers is not None:  # one thing is tried at a time
                counts = step.kind == OverlappedStep.kind or not self.options.overlapped
                layers.before_step(step.number + 1, counts=counts and not (layers.is_settled and self.mode.tries))
        finally:
            context.waiting = False

    def begin_forward(self, batch: Any = None, *, looks: bool = True) -> None:
        """Before ``training_step`` with ``batch``: observe the first use of parameters.

        Args:
            batch: Of this rank; ``NOTHING`` if it has none.
            looks: Whether all ranks come here; else they call :meth:`look`, and weigh batches, elsewhere.
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
            self.context.step.finish()  # nobody will touch what is due
        elif self.options.overlapped:
            self._first_use.begin(context.unseen)
            context.reads.begin(number)

    def end_forward(self) -> None:
        """After ``training_step``: apply what it did not touch."""
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
        """Around the strategy's backward pass, or passes, which write the buckets: the last step lands before."""
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
            self._find_unseen()  # when all passes of it have ended, each of which may have gradients of other layers
            self.phase = f"after the backward pass, step {step.number}"
            self.steps_handed_over = step.number
            context.record_backward(step, self._backward_start, communicated=self._last_index != sys.maxsize)
        finally:
            self._in_backward = 0  # as user code may catch what has failed, and go on

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Around each pass that adds to gradients, the strategy's or the user's: see ``entry_points.Watching``."""
        if self._in_backward not in (0, threading.get_ident()):
            yield  # another thread's: what is under way is the training's pass
            return
        self.context.step.open_all("another backward pass")
        with self.context.own_gradients.backward_pass():
            yield
        self.context.step.end_backward()

    def _find_unseen(self) -> None:
        """Take updates in the step from here on. Ranks need not agree: it changes who waits, not what is sent."""
        context = self.context
        context.unseen |= self._first_use.read_unseen()
        for certain, parameters in zip((True, False), context.reads.after_backward(), strict=True):
            if parameters:
                context.unseen.update(map(id, parameters))
                self._first_use.note_unseen(parameters)
                context.listener.read_unseen(parameters, self.context.step.number, certain)

    def step(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Step the optimizer, or defer that; see :meth:`TrainingStep.take`."""
        self.context.stream.is_here()
        self._note_step(optimizer)
        return self.context.step.take(optimizer, own_step)

    def count_whole_step(self, optimizer: Optimizer) -> None:
        """Account for a step that the optimizer took on its own."""
        self._note_step(optimizer)
        self.context.count_whole_step(optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        if self.context.compression is not None:
            self.context.compression.stepped(optimizer)

    def land_what_arrived(self) -> tuple[int, int]:
        """After a failure: apply what has arrived, forget the rest, and make every parameter plain again.

        Returns:
            How many parameters have the update of the last step, and how many should have it and never will.
        """
        with self.context.lock:
            applied, lost = self.context.step.land_what_arrived()
            self.close()
        torn = self.context.torn
        return applied - torn, lost + torn

    def close(self) -> None:
        """Drop what is still due and make every parameter plain again; after an error, or after a flush."""
        with self.context.lock:
            self._first_use.end()
            self.context.reads.close()
            self.context.own_gradients.close()
            self.context.step.close()
