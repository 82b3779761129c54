"""The engine between DDP's reducer and the scheduler: it crosses the step boundary and keeps every read exact.

One step, on the training thread::

    forward     a touch of a parameter opens its bucket's gate: wait for the bucket, step its parameters
    (end)       whatever the forward did not touch is waited for and stepped
    backward    DDP's comm hook hands each bucket to the core and returns a completed future: DDP never waits
    (end)       gates close on all parameters: reading ``.grad`` would wait, reading weights would not
    step        hyperparameters are snapshotted, membership is taken from ``p.grad``; now reading weights waits too

All pending updates land before the next backward pass writes the buckets (:meth:`before_backward`). The first
backward pass is synchronised: DDP uses one giant bucket in it and rebuilds its buckets afterwards, copying gradients
(DESIGN 3, trap 2).

Lock order: the engine's lock, then a task's or the core's. Threads of the scheduler never take the engine's lock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_bytescheduler.collectives.all_reduce import AllReduceTransport, ReadyMark
from lightning_bytescheduler.gradients.aliases import AliasDetector
from lightning_bytescheduler.gradients.bucket_update import BucketUpdate, UpdateState
from lightning_bytescheduler.gradients.first_use import FirstUseObserver
from lightning_bytescheduler.gradients.gate import close_state, open_state
from lightning_bytescheduler.gradients.partial_step import has_step_hooks, snapshot_hyperparameters, step_partially
from lightning_bytescheduler.gradients.statistics import SchedulerStatistics
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.scheduler.timeline import COMPUTE, GATE, STEP, Timeline

__all__ = ["GradientEngine"]

_LANE = "training thread"


class GradientEngine:
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
        transport: AllReduceTransport,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        cross_barrier: bool,
        timeout: float,
        statistics: SchedulerStatistics,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.statistics = statistics
        self.cross_barrier = cross_barrier
        self.gated_at_forward_start: set[int] = set()  # ids of parameters whose touches cannot be seen
        self.phase = "before the first step"  # in words; other ranks show it when they wait for this one in vain
        self.steps_handed_over = 0  # backward passes that have ended
        self._core = core
        self._transport = transport
        self._device = device
        self._timeout = timeout
        self._timeline = timeline
        self._clock = clock
        self._lock = threading.RLock()
        self._step_number = 0  # backward passes that communicate; equal on all ranks, so it keys tasks
        self._updates: list[BucketUpdate] = []
        self._deferring = False
        self._gates_closed = False
        self._last_index = sys.maxsize
        self._optimizer: Optimizer | None = None
        parameters = list(parameters)
        self._aliases = AliasDetector(parameters)
        self._first_use = FirstUseObserver(parameters)
        self._touched_buckets: list[int] = []
        self._bucket_order: dict[int, int] = {}
        self._in_forward = False
        self._forward_start = 0.0
        self._backward_start = 0.0
        self._last_hook = 0.0

    # ------------------------------------------------------------------ DDP's side

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's comm hook, called in order of bucket index on every rank; see ``register_comm_hook``."""
        index = bucket.index()
        if index <= self._last_index:  # hooks run in order of index, so a new backward pass has begun
            self._begin_step()
        self._last_index = index
        buffer = bucket.buffer()
        if buffer.is_sparse:
            return self._reduce_sparse(buffer)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self._device] if self._device.type == "cuda" else None
        )
        parameters = cast("list[nn.Parameter]", bucket.parameters())
        task = CommTask(
            f"bucket {index}",
            buffer.numel(),
            launch=partial(self._send, buffer, ReadyMark(self._device)),
            priority=self._priority(index, parameters),
            key=(self._step_number, index),
            on_end=None if self._deferring else partial(_complete, future, buffer),
        )
        self._core.enqueue(task)
        task.notify_ready()
        if self._deferring:
            future.set_result(buffer)
            self._updates.append(BucketUpdate(self, index, parameters, buffer, task))
            if bucket.is_last():
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
        self._deferring = self.cross_barrier and self._step_number > 1
        self._gates_closed = False

    def _send(self, buffer: torch.Tensor, ready: ReadyMark, sub_task: SubCommTask) -> None:
        with _profiled(f"bytescheduler::start {sub_task.name}"):
            self._transport.send(buffer, sub_task, ready)

    def _reduce_sparse(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        # Sparse gradients cannot be cut into partitions. The default group is in order here: hooks run on the training
        # thread, by bucket index.
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("The default process group is gone.")
        buffer.div_(group.size())
        reduced: torch.futures.Future[torch.Tensor] = group.allreduce([buffer]).get_future().then(_first_value)
        return reduced

    def _priority(self, index: int, parameters: list[nn.Parameter]) -> int:
        known = self._bucket_order.get(index)
        return self._first_use.position(parameters) if known is None else known

    # ------------------------------------------------------------------ the strategy's side

    def begin_forward(self) -> None:
        """Before ``training_step``: observe the first use of parameters."""
        self._in_forward = True
        self.phase = f"in training_step, step {self._step_number + 1}"
        self._forward_start = self._clock()
        self._touched_buckets = []
        if self.cross_barrier:
            self._first_use.begin(self.gated_at_forward_start)

    def end_forward(self) -> None:
        """After ``training_step``: apply what it did not touch."""
        self._first_use.end()
        self._apply_all()
        if self._touched_buckets:
            self._bucket_order = {index: position for position, index in enumerate(self._touched_buckets)}
        self._in_forward = False
        self.phase = f"after training_step, step {self._step_number + 1}"
        self._record("forward", COMPUTE, self._forward_start, step=self._step_number + 1)

    def before_backward(self) -> None:
        """Before a backward pass writes the buckets: everything of the last step must have landed."""
        self.flush()
        self._updates = []
        self.phase = f"in the backward pass, step {self._step_number + 1}"
        self._last_index = sys.maxsize
        self._backward_start = self._clock()
        self._last_hook = 0.0

    def after_backward(self) -> None:
        """After a backward pass: account for its time."""
        now = self._clock()
        self.gated_at_forward_start |= self._first_use.read_unseen()
        self.phase = f"after the backward pass, step {self._step_number}"
        self.steps_handed_over = self._step_number
        if not self._deferring and self._last_hook > self._backward_start:
            self.statistics.exposed_s += now - self._last_hook  # DDP waited for the futures
        self._record("backward", COMPUTE, self._backward_start, step=self._step_number)

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Defer the optimizer step of every bucket that nobody has looked at; take the others now.

        Args:
            optimizer: A per-parameter optimizer.
            step: The optimizer's own step, used as it is when nothing is left to defer.

        Returns:
            What ``step`` returned, or ``None``.
        """
        with self._lock:
            aliased = self._aliases.find()
            for unseen in (
                u for u in self._updates if self._unseen(u) or not aliased.isdisjoint(map(id, u.parameters))
            ):
                if unseen.state is UpdateState.REDUCING:
                    self._await_gradient(unseen)  # whoever reads its weights between two steps would not be noticed
            deferrable = [u for u in self._updates if u.state is UpdateState.REDUCING]
            # A backward pass that left a bucket out never closed the gates; DDP reports it at the next forward.
            if not deferrable or not self._gates_closed or has_step_hooks(optimizer):
                self.flush()
                self.count_synchronised_step(optimizer)
                return step()
            self.statistics.steps += 1
            bucket_of = {id(p): update for update in deferrable for p in update.parameters}
            hyperparameters = snapshot_hyperparameters(optimizer)
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
                update.hyperparameters = hyperparameters
                update.state = UpdateState.DUE
                self.statistics.deferred_updates += len(update.chosen)
                self.statistics.updates += len(update.chosen)
            self._optimizer = optimizer
            close_state(optimizer, self.flush)
            self.statistics.overlapped_steps += 1
            if now:
                self.statistics.updates += len(now)
                step_partially(optimizer, hyperparameters, now)
            return None

    def count_synchronised_step(self, optimizer: Optimizer) -> None:
        """Account for a step that the optimizer took on its own."""
        self.statistics.steps += 1
        self.statistics.updates += sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def flush(self) -> None:
        """Wait for all gradients and apply all updates that are due; afterwards everything is final."""
        with self._lock:
            for update in self._updates:
                if update.state is UpdateState.REDUCING:
                    self._await_gradient(update)
            self._apply_all()

    def due_tasks(self) -> list[CommTask]:
        """Communication of updates whose step has been taken; for any thread."""
        return [update.task for update in list(self._updates) if update.state is UpdateState.DUE]

    def settle(self) -> tuple[int, int]:
        """After a failure: apply what has arrived, forget the rest, and make every parameter plain again.

        Returns:
            How many parameters have the update of the last step, and how many should have it and never will.
        """
        applied = lost = 0
        with self._lock:
            for update in self._updates:
                if update.state is UpdateState.DUE and not (update.task.done() and update.task.error is None):
                    lost += len(update.chosen)
                    continue
                applied += len(update.chosen)
                if update.state is UpdateState.DUE:
                    self._apply(update)
            self.close()
        return applied, lost

    def close(self) -> None:
        """Drop what is still due and make every parameter plain again; after an error, or after a flush."""
        with self._lock:
            self._first_use.end()
            for update in self._updates:
                update.open_gate()
                update.state = UpdateState.DONE
            self._updates = []
            if self._optimizer is not None:
                open_state(self._optimizer)

    # ------------------------------------------------------------------ gates

    def touched(self, update: BucketUpdate, gradient_only: bool) -> None:
        """A gated parameter of ``update`` is about to be used, on any thread."""
        with self._lock:
            if update.state is UpdateState.DUE:
                self._apply(update)
            elif update.state is UpdateState.REDUCING and gradient_only:
                self._await_gradient(update)
            elif update.state in (UpdateState.REDUCED, UpdateState.DONE):
                update.open_gate()

    def _unseen(self, update: BucketUpdate) -> bool:
        return not update.gateable() or any(id(p) in self.gated_at_forward_start for p in update.parameters)

    def _apply_all(self) -> None:
        with self._lock:
            for update in self._updates:
                if update.state is UpdateState.DUE:
                    self._apply(update)
            if self._optimizer is not None:
                open_state(self._optimizer)

    def _await_gradient(self, update: BucketUpdate) -> None:
        self._wait(update)
        update.open_gate()
        update.state = UpdateState.REDUCED

    def _apply(self, update: BucketUpdate) -> None:
        self._wait(update)
        update.open_gate()
        update.state = UpdateState.DONE
        if self._in_forward:
            self._touched_buckets.append(update.index)
        if not update.chosen or self._optimizer is None:
            return
        start = self._clock()
        with _profiled(f"bytescheduler::deferred step bucket {update.index}"), _plain_mode(self._device):
            step_partially(self._optimizer, update.hyperparameters, update.chosen)
        self.statistics.deferred_step_s += self._clock() - start
        self._record(f"step bucket {update.index}", STEP, start, step=self._step_number)

    def _wait(self, update: BucketUpdate) -> None:
        start = self._clock()
        if not update.task.done():
            with _profiled(f"bytescheduler::gate bucket {update.index}"):
                update.task.wait(self._timeout)
            waited = self._clock() - start
            self.statistics.exposed_s += waited
            if self._in_forward:
                self.statistics.gate_wait_s += waited
            self._record(f"gate bucket {update.index}", GATE, start, step=self._step_number)
        else:
            update.task.wait(0)  # raises what the task failed with

    def _record(self, name: str, category: str, start: float, *, step: int) -> None:
        if self._timeline is not None:
            self._timeline.span(name, category, start, self._clock(), lane=_LANE, args={"step": step})


def _complete(future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor, task: CommTask) -> None:
    if task.error is None:
        future.set_result(buffer)
    else:
        future.set_exception(task.error)  # type: ignore[arg-type]


def _first_value(future: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor


@contextmanager
def _profiled(name: str) -> Iterator[None]:
    if torch.autograd.profiler._is_profiler_enabled:
        with torch.autograd.profiler.record_function(name):
            yield
    else:
        yield


@contextmanager
def _plain_mode(device: torch.device) -> Iterator[None]:
    """The modes ``optimizer.step`` would have met at the step boundary, wherever the touch happened.

    Validation touches parameters under inference mode, a forward under autocast or a default-device context; optimizer
    state made there would be of the wrong kind. Selective activation checkpointing replays what it sees of a forward.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        yield
