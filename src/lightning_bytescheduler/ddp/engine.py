"""The function DDP calls with each bucket.

In a module of its own because DDP inspects the annotations as objects: postponed evaluation would turn them to text.

The engine between DDP's reducer and the scheduler: it crosses the step boundary and keeps every read exact.

One step, on the training thread::

    forward     a touch of a parameter opens its bucket's gate: wait for the bucket, step its parameters
    (end)       whatever the forward did not touch is waited for and stepped
    backward    DDP's comm hook hands each bucket to the core and returns a completed future: DDP never waits
    (end)       gates close on all parameters: reading ``.grad`` would wait, reading weights would not
    (clipping)  noted, and done when the gradients have arrived; so is unscaling (``step_transforms.py``)
    step        hyperparameters are snapshotted, membership is taken from ``p.grad``; now reading weights waits too

On a GPU it is the training's stream that waits for a bucket, and the host only until the bucket's communication is
launched (``device_streams.py``). What depends on norms, such as clipping, is decided on the host, which waits for them.

All pending updates land before the next backward pass writes the buckets (:meth:`before_backward`). The first
backward pass is synchronised: DDP uses one giant bucket in it and rebuilds its buckets afterwards, copying gradients
(DESIGN 3, trap 2).

What threads may meet, and the order of locks, is in ``pending_updates.py``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.transport import GradientTransport
from lightning_bytescheduler.ddp.aliases import AliasDetector, state_is_kept
from lightning_bytescheduler.ddp.ddp_mode import ModeFound, ModeTrial, StepTimes, agree_on_mode
from lightning_bytescheduler.ddp.entry_points import FunctionTouches, scripted_parameters
from lightning_bytescheduler.ddp.gates import FirstUseObserver
from lightning_bytescheduler.ddp.gradient_transforms import Unscale
from lightning_bytescheduler.ddp.merged_buckets import BucketFutures, MergedBuckets, complete, reduce_sparse
from lightning_bytescheduler.ddp.partial_step import (
    BucketUpdate,
    DueStep,
    UpdateState,
    close_state,
    open_state,
    plain_mode,
    profiled,
    step_partially,
    wants_whole_steps,
)
from lightning_bytescheduler.ddp.pending_updates import PendingUpdates
from lightning_bytescheduler.ddp.reduction import AllReduction, Reduction, ShardedReduction
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.step_transforms import PendingScale, StepTransforms
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask
from lightning_bytescheduler.timeline.timeline import COMPUTE, STEP, Timeline

__all__ = ["GradientEngine", "schedule_bucket"]

_LANE = "training thread"


class GradientEngine(PendingUpdates):
    """Turns one DDP module's gradients into tasks, and their arrival into optimizer steps.

    Args:
        core: Sends what becomes ready.
        transport: What a sub-task's start does.
        parameters: All parameters DDP reduces.
        device: Where gradients live.
        cross_barrier: Defer updates into the next forward pass; otherwise backward waits for the gradients.
        timeout: Longest wait for one bucket, in seconds.
        statistics: Counters to keep.
        timeline: Where spans go, if anywhere.
        clock: Seconds; the core's clock.
    """

    def __init__(
        self,
        *,
        core: ByteCore,
        transport: GradientTransport,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        cross_barrier: bool,
        timeout: float,
        statistics: SchedulerStatistics,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(
            core=core,
            transport=transport,
            device=device,
            timeout=timeout,
            statistics=statistics,
            timeline=timeline,
            clock=clock,
        )
        self.cross_barrier = cross_barrier
        self.processors = 1  # that this rank has for itself
        self.merged_bytes = 0  # messages of a step as DDP's, see merged_buckets.py; the same on all ranks
        self.sharded = False  # reduce in shards, which makes norms known early; must be the same on all ranks
        self.mode: ModeTrial | bool = False  # whether steps are taken as DDP does, or how to find out; as on all ranks
        self.on_mode: Callable[[ModeFound], None] | None = None  # told what was found
        self.on_forward: Callable[[int], None] | None = None  # told the step; may change mode and sizes, on all ranks
        # Told which parameters, the step, and whether they surely had the weights of the step before.
        self.on_unseen_read: Callable[[list[nn.Parameter], int, bool], None] | None = None
        self.on_whole_step: Callable[[str], None] | None = None  # told why a step that could overlap does not
        self.held_elsewhere: set[int] = set()  # ids of parameters whose memory somebody else held at the last step
        self.phase = "before the first step"  # in words; other ranks show it when they wait for this one in vain
        self.steps_handed_over = 0  # backward passes that have ended
        self.steps_offered = 0  # backward passes whose last bucket was handed over, ended or not
        self._reduction: Reduction | None = None
        self._merged: MergedBuckets | None = None  # during a step as DDP's
        self._wire_share = 2.0 * (transport.group.size() - 1) / transport.group.size()
        self._step_times = StepTimes(device, clock)
        self._deferring = False
        self._last_index = sys.maxsize
        self._default_dtype = torch.get_default_dtype()
        parameters = list(parameters)
        self._aliases = AliasDetector(parameters)
        self._first_use = FirstUseObserver(parameters)
        self._function_touches = FunctionTouches()
        self._futures = BucketFutures(device)
        self._bucket_order: dict[int, int] = {}
        self._forward_start = 0.0
        self._backward_start = 0.0
        self._last_hook = 0.0
        self._in_backward = False

    @property
    def awaited_step(self) -> int:
        """The step whose gradients the training thread waits for, 0 if it does not; for any thread."""
        # At the end of a backward pass DDP waits for its futures.
        at_its_end = self._in_backward and self.steps_offered == self._step_number > self.steps_handed_over
        return self._step_number if self._waiting or at_its_end else 0

    # ------------------------------------------------------------------ DDP's side

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's comm hook, called in order of bucket index on every rank; see ``register_comm_hook``."""
        index = bucket.index()
        if index <= self._last_index:  # hooks run in order of index, so a new backward pass has begun
            self._begin_step()
        self._last_index = index
        if bucket.is_last():
            self.steps_offered = self._step_number
        buffer = bucket.buffer()
        if buffer.is_sparse:
            if self._merged is not None and bucket.is_last():
                self._merged.finish()
            return reduce_sparse(buffer)
        if self._merged is not None:
            self._last_hook = self._clock()
            self.statistics.bytes_sent += self._wire_share * buffer.numel() * buffer.element_size()
            future = self._merged.reduce(buffer, index=index, last=bucket.is_last())
            if bucket.is_last() and not isinstance(self.mode, bool):
                self.mode.note_exposed(self._merged.hideable_s)
            return future
        reduction = self._reduction
        if reduction is None:
            raise RuntimeError("DDP reduced a bucket outside a backward pass.")
        parameters = cast("list[nn.Parameter]", bucket.parameters())
        priority = self._priority(index, parameters)
        if not buffer.numel():
            future = self._futures.completed(index, buffer)  # nothing to send, and nothing to wait for
        elif not self._deferring:
            future = self._futures.new()
            reduction.reduce(index, parameters, buffer, priority, partial(complete, future, buffer))
        else:
            future = self._futures.completed(index, buffer)
            task = reduction.reduce(index, parameters, buffer, priority)
            self._updates.append(BucketUpdate(self, index, parameters, buffer, task))
        if self._deferring and bucket.is_last():
            reduction.close()
            self._gates_closed = True
            for update in self._updates:
                update.close_gate()
        self._last_hook = self._clock()
        return future

    def _begin_step(self) -> None:
        if self._updates:
            raise RuntimeError(
                "A backward pass started while gradients of the previous one were still on their way. Call "
                "self.manual_backward(loss) instead of loss.backward(), or use cross_barrier=False."
            )
        self._step_number += 1
        as_ddp = self._step_number > 1 and (self._as_ddp() if self.cross_barrier else self.mode is True)
        if as_ddp and self._transport.streams is not None:
            self._core.drain(self._timeout)  # NCCL goes by the order of launches; this thread launches next
        self._deferring = self.cross_barrier and self._step_number > 1 and not as_ddp
        self._gates_closed = False
        self._merged = None
        if as_ddp:
            self._merged = MergedBuckets(
                self._transport.group, self._device, self._futures, limit=self.merged_bytes, processors=self.processors
            )
        kind = ShardedReduction if self.sharded and self._deferring else AllReduction
        self._reduction = kind(self._core, self._transport, self._step_number, self._device)
        self._transforms = StepTransforms(self._reduction, self._updates, self._wait)

    def fail_merged(self, error: BaseException) -> None:
        """Have a backward pass as DDP's end with ``error``; for any thread."""
        merged = self._merged
        if merged is not None:
            merged.fail(error)

    @property
    def merged_under_way(self) -> bool:
        """Whether a step as DDP's has sent what has not arrived."""
        merged = self._merged
        return merged is not None and merged.under_way

    def _as_ddp(self) -> bool:
        if isinstance(self.mode, bool):
            return self.mode
        self._step_times.begin(self._step_number, self.mode.note)
        return self.mode.as_ddp(self._step_number)

    def _priority(self, index: int, parameters: list[nn.Parameter]) -> int:
        known = self._bucket_order.get(index)
        return self._first_use.position(parameters) if known is None else known

    # ------------------------------------------------------------------ the strategy's side

    def begin_forward(self) -> None:
        """Before ``training_step``: observe the first use of parameters."""
        if self.on_forward is not None:
            self._waiting = True  # perhaps, for what rank 0 told when it began this step or the one before
            try:
                self.on_forward(self._step_number + 1)
            finally:
                self._waiting = False
        if not isinstance(self.mode, bool) and self.cross_barrier and self.mode.is_due(self._step_number + 1):
            self._step_times.settle(self.mode.note)
            agree_on_mode(self.mode, self._step_number + 1, self._device, self.on_mode)
        self._in_forward = True
        self._read_early = False
        self._training_thread = threading.get_ident()
        self.phase = f"in training_step, step {self._step_number + 1}"
        self._forward_start = self._clock()
        self._touched_buckets = []
        if self.cross_barrier:
            self._function_touches.begin()
            self._first_use.begin(self.gated_at_forward_start)
            self._reads.watches_each = self.on_open is not None
            self._reads.on_touch = self._note_touch
            self._reads.begin(self._step_number + 1)

    def end_forward(self) -> None:
        """After ``training_step``: apply what it did not touch."""
        self._first_use.end()
        late, untouched = (
            [p for update in self._updates if update.state is state for p in update.parameters]
            for state in (UpdateState.DUE, UpdateState.STEPPED)
        )
        self._apply_all("forward end")
        self._reads.end(late, untouched)
        if self._touched_buckets:
            self._bucket_order = {index: position for position, index in enumerate(self._touched_buckets)}
        self._in_forward = False
        self.phase = f"after training_step, step {self._step_number + 1}"
        self._record("forward", COMPUTE, self._forward_start, step=self._step_number + 1)

    def before_backward(self) -> None:
        """Before a backward pass writes the buckets: everything of the last step must have landed."""
        self._stream.note()
        self.flush()
        self._in_backward = True
        self._reads.before_backward()
        self._updates = []
        self._transforms = StepTransforms(None, (), self._wait)
        self.phase = f"in the backward pass, step {self._step_number + 1}"
        self._last_index = sys.maxsize
        self._backward_start = self._clock()
        self._last_hook = 0.0

    def after_backward(self) -> None:
        """After a backward pass: account for its time."""
        now = self._clock()
        self.gated_at_forward_start |= self._first_use.read_unseen()
        for certain, parameters in zip((True, False), self._reads.after_backward(), strict=True):
            if parameters:
                self._found_unseen(parameters, certain)
        self.phase = f"after the backward pass, step {self._step_number}"
        self.steps_handed_over = self._step_number
        self._in_backward = False
        if not self._deferring and self._last_hook > self._backward_start:
            self.statistics.exposed_s += now - self._last_hook  # DDP waited for the futures
        with self._lock:
            for update in self._updates:
                if update.state is UpdateState.REDUCING and not update.gateable():
                    self._await_gradient(update, "step")  # whoever reads its gradient would not be noticed
        self._record("backward", COMPUTE, self._backward_start, step=self._step_number)

    def _found_unseen(self, parameters: list[nn.Parameter], certain: bool) -> None:
        """Take their updates in the step from here on. Ranks need not agree: it changes who waits, not what is sent."""
        self.gated_at_forward_start.update(map(id, parameters))
        self._first_use.note_unseen(parameters)
        if self.on_unseen_read is not None:
            self.on_unseen_read(parameters, self._step_number, certain)

    def unscale(self, optimizer: Optimizer, inverse_scale: torch.Tensor) -> Unscale | None:
        """Divide gradients by the loss scale when they have arrived; ``None`` if the caller has to, now."""
        with self._lock:
            return self._transforms.unscale(optimizer, inverse_scale) if self._gates_closed else None

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> bool:
        """Clip gradients by their norm when they have arrived; ``False`` if the caller has to, now."""
        with self._lock:
            return self._gates_closed and self._transforms.clip_norm(optimizer, max_norm)

    def clip_value(self, optimizer: Optimizer, limit: float) -> bool:
        """Clip gradients by value when they have arrived; ``False`` if the caller has to, now."""
        with self._lock:
            return self._gates_closed and self._transforms.clip_value(optimizer, limit)

    def scale_later(self, pending: PendingScale) -> None:
        """Update a loss scale when it is known whether this step's gradients are finite."""
        with self._lock:
            self._transforms.scale_later(pending)

    def settle_scale(self) -> None:
        """Wait until it is known whether this step's gradients are finite, and update the loss scale."""
        with self._lock:
            self._transforms.settle()

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Defer the optimizer step of every bucket that nobody has looked at; take the others now.

        Args:
            optimizer: A per-parameter optimizer.
            step: The optimizer's own step, used as it is when nothing is left to defer.

        Returns:
            What ``step`` returned, or ``None``.
        """
        with self._lock:
            self._stream.note()
            held = self.find_held() if self._gates_closed else set()
            for unseen in (u for u in self._updates if self._unseen(u) or not held.isdisjoint(map(id, u.parameters))):
                if unseen.state is UpdateState.REDUCING:
                    self._await_gradient(unseen, "step")  # whoever reads its weights later would not be noticed
            deferrable = [u for u in self._updates if u.state is UpdateState.REDUCING]
            # A backward pass that left a bucket out never closed the gates; DDP reports it at the next forward.
            whole = self._why_whole(optimizer, step) if self._gates_closed else "it is not overlapped"
            if whole or not deferrable:
                if whole and self._gates_closed and self.on_whole_step is not None:
                    self.on_whole_step(whole)
                self._land()
                self.count_synchronised_step(optimizer)
                return None if self._transforms.leaves_step_out() else step()
            self.statistics.steps += 1
            bucket_of = {id(p): update for update in deferrable for p in update.parameters}
            due = self._due = DueStep(optimizer)
            now = []
            with torch._C.DisableTorchFunctionSubclass():  # look at p.grad without opening gates
                for index, group in enumerate(optimizer.param_groups):
                    for parameter in group["params"]:
                        gradient = parameter.grad
                        if gradient is None:
                            continue  # globally unused: no weight decay, no momentum
                        update = bucket_of.get(id(parameter))
                        if update is not None and update.holds(gradient):
                            update.chosen.append((index, parameter, gradient))
                        else:
                            now.append((index, parameter, gradient))
            for update in deferrable:
                update.due = due
                update.state = UpdateState.DUE
                self.statistics.deferred_updates += len(update.chosen)
                self.statistics.updates += len(update.chosen)
            self._optimizer = optimizer
            self._default_dtype = torch.get_default_dtype()
            close_state(optimizer, self.flush)
            self.statistics.overlapped_steps += 1
            if now:
                self.statistics.updates += len(now)
                with self._or_torn(len(now)):
                    if not self._transforms.leaves_step_out():
                        step_partially(due, now)
            return None

    def find_held(self) -> set[int]:
        """Ids of parameters whose memory somebody else can read."""
        self.held_elsewhere = self._aliases.find() | scripted_parameters()
        return self.held_elsewhere

    def _why_whole(self, optimizer: Optimizer, step: Callable[[], Any]) -> str | None:
        if why := wants_whole_steps(optimizer, step):
            return why
        if state_is_kept(optimizer):
            return "somebody keeps the optimizer's state, or a tensor of it, and may read it at any time"
        return None

    def count_synchronised_step(self, optimizer: Optimizer) -> None:
        """Account for a step that the optimizer took on its own."""
        self.statistics.steps += 1
        self.statistics.updates += sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def due_tasks(self) -> list[CommTask]:
        """Communication of updates whose step has been taken; for any thread."""
        due = [update.task for update in list(self._updates) if update.state is UpdateState.DUE]
        norms = self._transforms.task
        return due if norms is None or not due else [norms, *due]

    def settle(self) -> tuple[int, int]:
        """After a failure: apply what has arrived, forget the rest, and make every parameter plain again.

        Returns:
            How many parameters have the update of the last step, and how many should have it and never will.
        """
        applied = lost = 0
        with self._lock:
            for update in self._updates:
                arrived = update.has_arrived and self._transforms.known
                if update.state is UpdateState.DUE and not arrived:
                    lost += len(update.chosen)
                    continue
                applied += len(update.chosen)
                if update.state is UpdateState.DUE:
                    self._apply(update, "flush")
            if self._transforms.known:
                self._transforms.settle()  # a loss scale goes with the step it was updated for
            self.close()
        return applied - self._torn, lost + self._torn

    def close(self) -> None:
        """Drop what is still due and make every parameter plain again; after an error, or after a flush."""
        with self._lock:
            self._first_use.end()
            self._reads.close()
            self._function_touches.end()
            for update in self._updates:
                update.open_gate()
                update.state = UpdateState.DONE
            self._updates = []
            self._transforms.discard()
            self._due = None
            if self._optimizer is not None:
                open_state(self._optimizer)

    # ------------------------------------------------------------------ one bucket

    def _step_bucket(self, update: BucketUpdate) -> None:
        if not update.chosen or update.due is None:
            return
        start = self._clock()
        with (
            profiled(f"bytescheduler::deferred step bucket {update.index}"),
            plain_mode(self._device, self._default_dtype),
        ):
            self._transforms.apply(update)
            if not self._transforms.leaves_step_out():
                step_partially(update.due, update.chosen)
        self.statistics.deferred_step_s += self._clock() - start
        self._record(f"step bucket {update.index}", STEP, start, step=self._step_number)


def schedule_bucket(engine: GradientEngine, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand ``bucket`` to ``engine``; see ``DistributedDataParallel.register_comm_hook``."""
    return engine.hook(bucket)
