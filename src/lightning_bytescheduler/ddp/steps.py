"""The two kinds of steps: overlapped, whose updates are pending between two backward passes, and plain, as with DDP.

*Overlapped* (:class:`OverlappedStep`): the step waits for gradients, updates parameters, and opens gates. A bucket's
gate opens after the bucket's update, so another thread that touches one of its parameters waits. Otherwise that thread
would read last step's weights, or save for its backward pass a tensor that the update then changes in place. While a
thread waits for one bucket, others that have arrived are stepped. Their gates stay closed until a touch: touches show
the order of use, and which reads go unseen.

States of a bucket's update. The training thread, or another thread that touches a parameter, changes them under the
lock::

    REDUCING  after backward: only an access to ``parameter.grad`` waits; the weights are still valid
    REDUCED   the gradient was read before optimizer.step: it is final, parameters are plain, the step is not deferred
    DUE       after optimizer.step: any touch waits and applies the update
    STEPPED   the update was applied while a thread waited for another bucket; the gate is still closed, as it shows
              when and in which order parameters are used
    OPENING   one thread applies the update or transforms the gradient; only that thread's own code can see this
              state, as other threads wait for the lock
    DONE      parameters are plain again

Lock order: ``Fit.lock``, then a task's or the core's. Threads of the scheduler never take it. A thread that touches a
parameter while another one applies its bucket waits for this lock, and may hold locks of its own. No thread waits for
such locks while it holds this one. Only two things happen under it: the wait for a task, which scheduler threads, an
abort or the timeout end, and the optimizer's arithmetic. A listener may log, so it is called without the lock. A
failure anywhere aborts the core, so each of these waits ends with an error.

A signal handler runs on the training thread at any point. If that thread is under the lock, a touch or a flush in the
handler changes nothing and sees things as they are, as in the middle of an optimizer's step.

*Plain* (:class:`PlainStep`): its gradients are awaited at the end of the backward pass. DDP gets completed futures, and
the hook of the last bucket waits. If another thread completed the futures, it would take the interpreter from the
backward pass once per bucket, and DDP's wait could not be ended. On a CPU all gradients have arrived when the last hook
returns; on a GPU the current stream waits for them.

Either the scheduler sends the buckets, or they bypass it, merged into messages about as large as DDP's
(:class:`MergedStep`). Buckets are smaller than DDP's, as each gates a layer, and cannot be changed
once DDP has made them. On a CPU merging costs copies, so buckets are merged only up to the size at which a message's
start-up time is small beside its transfer (:func:`merged_bytes`).

Why ranks agree on merged messages: DDP calls its hook in the order of buckets on every rank, and only the training
thread sends here. Otherwise the data group belongs to the scheduler's core. It is idle now: all of the last step has
arrived on this rank, so every rank has launched it. With weights by samples the first message waits until all ranks
have begun the batch, as it would for their gradients.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.collectives.device_streams import ReadyMark
from lightning_bytescheduler.collectives.operations import wait_unless
from lightning_bytescheduler.ddp.deferred_optimizer import (
    DueStep,
    ParameterGradient,
    close_state,
    open_state,
    plain_mode,
    state_is_kept,
    step_partially,
    wants_whole_steps,
)
from lightning_bytescheduler.ddp.fit import Fit, TrainingStep
from lightning_bytescheduler.ddp.gates import arm, disarm, gate_of
from lightning_bytescheduler.ddp.gradient_transforms import StepTransforms
from lightning_bytescheduler.ddp.reduction import GradientBucket
from lightning_bytescheduler.failures.standstill import BATCH, waiting
from lightning_bytescheduler.scheduler.task import CommTask
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, STEP, WAIT
from lightning_bytescheduler.tuning.sizes import LinkEstimate

__all__ = ["BucketUpdate", "MergedStep", "OverlappedStep", "PlainStep", "UpdateState", "merged_bytes"]

_KEPT = "other code keeps gradients or their memory (keeping clones keeps the overlap)"


class UpdateState(enum.Enum):
    """State of a bucket's update; see the module."""

    REDUCING = "reducing"
    REDUCED = "reduced"
    DUE = "due"
    STEPPED = "stepped"
    OPENING = "opening"
    DONE = "done"


class BucketUpdate:
    """One bucket's gradients in flight, the update that follows, and the gate on its parameters."""

    __slots__ = ("bucket", "chosen", "state", "step", "task", "touched_by")

    def __init__(self, step: OverlappedStep, bucket: GradientBucket, task: CommTask) -> None:
        self.step = step
        self.bucket = bucket
        self.task = task
        self.state = UpdateState.REDUCING
        self.chosen: list[ParameterGradient] = []
        self.touched_by: nn.Parameter | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the reduced gradient has arrived."""
        return self.task.done() and self.task.error is None

    def has_any(self, parameters: set[int]) -> bool:
        """Whether one of its parameters has one of these ids."""
        return not parameters.isdisjoint(map(id, self.bucket.parameters))

    def close_gate(self) -> None:
        """Gate the parameters."""
        arm(self.bucket.parameters, self)

    def open_gate(self) -> None:
        """Make the parameters plain again."""
        disarm(p for p in self.bucket.parameters if gate_of(p) is self)

    # ------------------------------------------------------------------ touches

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`; on any thread."""
        step, fit = self.step, self.step.fit
        if fit.entered:
            return
        if gradient_only and fit.own_gradients.look(parameter):
            return  # in the backward pass, and not in flight
        self.touched_by = parameter
        with fit.lock:
            waits = self.state is UpdateState.DUE or (self.state is UpdateState.REDUCING and gradient_only)
            early = waits and fit.reads.waits_early()
        if early:
            # without the lock, as a logging handler may touch parameters on another thread
            fit.reads.seen.waited_early()
        if self.state is UpdateState.DUE and fit.wire.route.streams is None:
            step.step_while_waiting(self.task)
            fit.wait(self.task)  # without the lock, so that other threads can use buckets that have arrived
        with fit.lock:
            if self.state in (UpdateState.DUE, UpdateState.STEPPED):
                self.apply(touched=True)
            elif self.state is UpdateState.REDUCING and gradient_only:
                self.await_gradient()
            elif self.state in (UpdateState.REDUCED, UpdateState.DONE):
                with fit.stream.entered():  # another thread enqueued the update on its own stream
                    self.open_gate()
        gate = gate_of(parameter)
        if gate is not None and gate is not self:
            gate.touched(parameter, gradient_only)  # another step closed it while this thread waited

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`; on any thread."""
        self.step.open_all(reason)

    # ------------------------------------------------------------------ under the lock

    def await_gradient(self) -> None:
        """Wait for the gradient, transform it for the optimizer, and open the gate."""
        fit, transforms = self.step.fit, self.step.transforms
        with fit.stream.entered():
            fit.wait(self.task)
            with self._opening(UpdateState.REDUCED), plain_mode(fit.device, torch.get_default_dtype()):
                transforms.hand_out(self.bucket)

    def apply(self, *, touched: bool = False) -> None:
        """Wait for the gradient, update the parameters unless that is done, and open the gate."""
        fit = self.step.fit
        with fit.stream.entered():
            fit.wait(self.task)
            due = self.state is UpdateState.DUE
            with fit.or_torn(len(self.chosen)), self._opening(UpdateState.DONE, touched=touched):
                if due:
                    self.update()

    def step_early(self) -> None:
        """Update the parameters once the gradient has arrived; the gate stays closed."""
        self.state = UpdateState.OPENING
        try:
            with self.step.fit.stream.entered(), self.step.fit.or_torn(len(self.chosen)):
                self.update()
        finally:
            self.state = UpdateState.STEPPED

    def update(self) -> None:
        """Take the optimizer's step for this bucket, which has arrived."""
        due = self.step.due
        if not self.chosen or due is None:
            return
        fit, transforms = self.step.fit, self.step.transforms
        start = fit.record.clock()
        trains = get_ident() == fit.record.training_thread
        with plain_mode(fit.device, due.default_dtype, for_all_threads=trains):
            transforms.apply(self.bucket)
            step_partially(due, self.chosen)
        fit.record.statistics.deferred_step_s += fit.record.clock() - start
        fit.record.span(f"step bucket {self.bucket.index}", STEP, start, step=self.step.number)

    @contextmanager
    def _opening(self, then: UpdateState, *, touched: bool = False) -> Iterator[None]:
        """Wrap the work that the gate guards: other threads find the gate closed and wait for the lock.

        The gate opens even if the work fails, as there is nothing to wait for then.
        """
        self.state = UpdateState.OPENING
        try:
            yield
        finally:
            self.state = then
            if touched:
                self.step.fit.reads.opened(self.bucket.parameters, self.touched_by)
            self.open_gate()


class OverlappedStep(TrainingStep):
    """A step whose updates cross the step boundary; see the module."""

    kind = "overlapped"

    def __init__(self, fit: Fit, number: int) -> None:
        super().__init__(fit, number)
        self.updates: list[BucketUpdate] = []
        self._buckets: list[GradientBucket] = []
        self._reduction = fit.reduction(number, overlaps=True)
        self.transforms: StepTransforms = StepTransforms(self._reduction, self._buckets, fit.wait, lambda: fit.lock)
        self.due: DueStep | None = None  # until all its updates are applied

    # ------------------------------------------------------------------ the backward pass

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`; DDP does not wait."""
        future = self.fit.futures.completed(bucket.index(), buffer)
        if buffer.numel():
            known = _known(self.fit, bucket, buffer)
            task = self._reduction.reduce(known)
            self._buckets.append(known)
            self.updates.append(BucketUpdate(self, known, task))
            self.updates[-1].close_gate()  # hooks of this pass may read and write gradients
        if bucket.is_last():
            self._reduction.close()
            self.transforms.complete = True
        return future

    def await_means(self, parameters: set[int]) -> None:
        """See :class:`TrainingStep`."""
        self.fit.reads.seen.waited(_KEPT)
        with self.fit.lock:
            self._await_gradients(lambda update: update.has_any(parameters))

    def end_backward(self) -> None:
        """See :class:`TrainingStep`."""
        with self.fit.lock:
            if self.fit.sharded:
                with torch._C.DisableTorchFunctionSubclass():  # opens no gate
                    parameters = (p for update in self.updates for p in update.bucket.parameters)
                    self.transforms.unused = {id(p) for p in parameters if p.grad is None}
            self._await_gradients(lambda update: update.has_any(self.fit.reads.unseen))  # reads of it would be missed

    # ------------------------------------------------------------------ optimizer step

    def take(self, optimizer: Optimizer, own_step: Callable[[], Any]) -> Any:
        """Defer the optimizer step of every bucket that was not read since the backward pass; take the others now.

        If nothing can be deferred, ``own_step`` runs as it is. See :class:`TrainingStep`.
        """
        fit = self.fit
        with fit.lock:
            unseen = fit.reads.unseen | (fit.reads.find_held() if self.transforms.complete else set())
            # Later reads of these weights would be missed.
            self._await_gradients(lambda update: update.has_any(unseen))
            deferrable = [u for u in self.updates if u.state is UpdateState.REDUCING]
            # If the backward pass left a bucket out, not all gates are closed; DDP raises at the next forward pass.
            complete = self.transforms.complete
            why_whole = (self.transforms.why_now or _why_whole(optimizer, own_step)) if complete else None
            if complete and deferrable and not why_whole:
                self._defer(optimizer, deferrable)
                return None
        if why_whole:
            fit.reads.seen.waited(why_whole)
        with fit.lock:
            self._land()
            fit.count_whole_step(optimizer)
            return own_step()

    def _defer(self, optimizer: Optimizer, deferrable: list[BucketUpdate]) -> None:
        statistics = self.fit.record.statistics
        statistics.steps += 1
        update_of = {id(p): update for update in deferrable for p in update.bucket.parameters}
        due = self.due = DueStep(optimizer)
        now = []
        with torch._C.DisableTorchFunctionSubclass():  # reads p.grad without opening gates
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is None:
                        continue  # unused on all ranks: no weight decay, no momentum
                    update = update_of.get(id(parameter))
                    if update is not None and update.bucket.holds(gradient):
                        update.chosen.append((index, parameter, gradient))
                    else:
                        now.append((index, parameter, gradient))
        for update in deferrable:
            update.state = UpdateState.DUE
            statistics.deferred_updates += len(update.chosen)
            statistics.updates += len(update.chosen)
        close_state(optimizer, self.flush)
        statistics.overlapped_steps += 1
        if now:
            statistics.updates += len(now)
            with self.fit.or_torn(len(now)):
                step_partially(due, now)

    # ------------------------------------------------------------------ until the next backward pass

    @property
    def is_pending(self) -> bool:
        """See :class:`TrainingStep`."""
        return bool(self.updates)

    def step_while_waiting(self, task: CommTask) -> None:
        """Step buckets that have arrived while ``task`` is awaited. Their gates stay closed."""
        while not task.done():
            with self.fit.lock:
                update = next((u for u in self.updates if u.state is UpdateState.DUE and u.has_arrived), None)
                if update is None or not self.transforms.known:
                    return
                update.step_early()

    def open_all(self, reason: str) -> None:
        """See :class:`TrainingStep`."""
        fit = self.fit
        with fit.lock:
            waits = (UpdateState.REDUCING, UpdateState.DUE, UpdateState.STEPPED)
            if not any(update.state in waits for update in self.updates):
                return
            fit.reads.opened_for[reason] += 1
            early = fit.reads.waits_early()
        if early:
            fit.reads.seen.waited_early()
        self.flush()

    def flush(self) -> None:
        """See :class:`TrainingStep`; on any thread."""
        if not self.fit.entered:
            with self.fit.lock:
                self._land()

    def finish(self) -> None:
        """See :class:`TrainingStep`."""
        with self.fit.lock:
            self._land()
            self.updates = []  # updates and step refer to each other; this frees memory at once
            self.transforms.let_go()

    def before_fork(self) -> None:
        """See :class:`TrainingStep`."""
        # A signal handler may fork in the middle of an update, which then goes on in the parent.
        if self.transforms.complete and not any(update.state is UpdateState.OPENING for update in self.updates):
            self._land()

    def end_forward(self) -> list[nn.Parameter]:
        """See :class:`TrainingStep`."""
        untouched = [u for u in self.updates if u.state in (UpdateState.DUE, UpdateState.STEPPED)]
        with self.fit.lock:
            self._apply_all()
        return [parameter for update in untouched for parameter in update.bucket.parameters]

    def tasks_in_flight(self) -> list[CommTask]:
        """See :class:`TrainingStep`."""
        tasks = [u.task for u in list(self.updates) if u.state in (UpdateState.REDUCING, UpdateState.DUE)]
        norms = self.transforms.norms
        return tasks if norms is None or not tasks else [norms, *tasks]

    def land_what_arrived(self) -> tuple[int, int]:
        """See :class:`TrainingStep`."""
        applied = lost = 0
        with self.fit.lock:
            for update in self.updates:
                arrived = update.has_arrived and self.transforms.known
                if update.state is UpdateState.DUE and not arrived:
                    lost += len(update.chosen)
                    continue
                applied += len(update.chosen)
                if update.state is UpdateState.DUE:
                    update.apply()
        return applied, lost

    def close(self) -> None:
        """See :class:`TrainingStep`."""
        with self.fit.lock:
            for update in self.updates:
                update.open_gate()
                update.state = UpdateState.DONE
            self.updates = []
            self._open_state()

    def _await_gradients(self, of: Callable[[BucketUpdate], bool]) -> None:
        for update in self.updates:
            if update.state is UpdateState.REDUCING and of(update):
                update.await_gradient()

    def _land(self) -> None:
        self._await_gradients(lambda _: True)
        self._apply_all()

    def _apply_all(self) -> None:
        for update in self.updates:
            if update.state in (UpdateState.DUE, UpdateState.STEPPED):
                update.apply()
        if self.due is not None:
            self.due.complete()
        self._open_state()

    def _open_state(self) -> None:
        due, self.due = self.due, None  # it holds the optimizer's state, and ``state_is_kept`` counts references
        if due is not None:
            open_state(due.optimizer)


def _why_whole(optimizer: Optimizer, own_step: Callable[[], Any]) -> str | None:
    if why := wants_whole_steps(optimizer, own_step):
        return why
    if state_is_kept(optimizer):
        return "other code keeps the optimizer's state, or a tensor of it, and may read it at any time"
    return None


_FIRST_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES
_BYTES = 25 * 1024 * 1024  # DDP's default
_START_UP_SHARE = 0.1  # of a message's time
_LOOK_EVERY = timedelta(milliseconds=200)


class PlainStep(TrainingStep):
    """A plain step whose buckets the scheduler sends; see the module."""

    def __init__(self, fit: Fit, number: int) -> None:
        super().__init__(fit, number)
        self._each = fit.static_graph and number == 1  # DDP does not say which bucket is the last
        self._reduction = fit.reduction(number, overlaps=False)
        self._tasks: list[CommTask] = []

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`."""
        if buffer.numel():
            self._send(bucket, buffer)
        if bucket.is_last() or self._each:
            self.waits_from = self.waits_from or self.fit.record.clock()
            exposed = self._await_all()
            if self.number > 1:
                self.fit.mode.add_exposed(exposed)
        return self.fit.futures.completed(bucket.index(), buffer)

    def _send(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> None:
        """Begin to average the buffer of the next bucket over all ranks, in place."""
        self._tasks.append(self._reduction.reduce(_known(self.fit, bucket, buffer)))

    def _await_all(self) -> float:
        """Wait for all buckets sent so far; returns the seconds of idle waiting, infinite if unknown.

        Raises:
            BaseException: The error of a reduction.
        """
        clock, wire = self.fit.record.clock, self.fit.wire
        start = clock()
        for task in self._tasks:
            wire.route.join(task, wire.timeout)
        return clock() - start


def _known(fit: Fit, bucket: dist.GradBucket, buffer: torch.Tensor) -> GradientBucket:
    index, parameters = bucket.index(), cast("list[nn.Parameter]", bucket.parameters())
    return GradientBucket(index, parameters, buffer, fit.reads.position_of(index, parameters))


def merged_bytes(device: torch.device, link: LinkEstimate | None) -> int:
    """Return the size at which a message is sent; the same on all ranks, as they know the same link.

    Args:
        device: Where gradients live.
        link: The measured link, if any.
    """
    if device.type != "cpu":
        return _BYTES  # several tensors travel as one without a copy
    if link is None:
        return _FIRST_BYTES
    return min(max(int(link.alpha / link.beta / _START_UP_SHARE), _FIRST_BYTES), _BYTES)


class MergedStep(PlainStep):
    """A plain step whose buckets bypass the scheduler, merged; see the module.

    Args:
        limit: Bytes at which a message is sent, see :func:`merged_bytes`; 0 to send buckets unmerged.
        processors: This rank's share of the processors.
    """

    kind = "as DDP's"

    def __init__(self, fit: Fit, number: int, *, limit: int = _BYTES, processors: int = 1) -> None:
        super().__init__(fit, number)
        wire, device = fit.wire, fit.device
        if wire.route.streams is not None:
            wire.core.drain(wire.timeout)  # NCCL runs in launch order, and this thread launches next
        self._group = wire.route.group
        self._processors = processors
        backend = self._group._get_backend(device).name()
        self._streams_wait = device.type != "cpu" and backend == "nccl"
        self._merges = device.type == "cpu" or backend != "gloo"  # gloo sends several tensors as one only on a CPU
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0
        self._works: list[dist.Work] = []
        self._limit = min(limit, _FIRST_BYTES)
        self._next_limit = limit

    def _send(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> None:
        """See :class:`PlainStep`."""
        if (cause := self.fit.own_failure()) is not None:
            raise cause
        if self._waiting and self._waiting[0].dtype != buffer.dtype:
            self._send_waiting()
        self._waiting.append(buffer)
        self._waiting_bytes += buffer.nbytes
        if self._waiting_bytes >= self._limit:
            self._send_waiting()
            self._limit = self._next_limit

    def _await_all(self) -> float:
        """See :class:`PlainStep`."""
        if self._waiting:
            self._send_waiting()
        start, busy = time.perf_counter(), time.process_time()
        for work in self._works:
            if self._streams_wait:
                work.wait()  # the current stream waits, and the host does not
            else:
                wait_unless(work, self.fit.own_failure, look_every=_LOOK_EVERY)
        if self._streams_wait:
            return math.inf
        waited = time.perf_counter() - start
        # Communication cannot be hidden if it needs the processors that compute the model.
        if torch.get_num_threads() >= self._processors:
            waited -= (time.process_time() - busy) / self._processors
        return max(waited, 0.0)

    @property
    def under_way(self) -> bool:
        """See :class:`TrainingStep`."""
        return not all(work.is_completed() for work in self._works)

    def _send_waiting(self) -> None:
        together, self._waiting, self._waiting_bytes = self._waiting, [], 0
        factor = self._await_weight()
        if factor:
            torch._foreach_mul_(together, factor)
        else:  # the weight is zero also for non-finite gradients
            torch._foreach_zero_(together)
        for buffers in [together] if self._merges else [[each] for each in together]:
            start = self.fit.record.clock()
            work = self._group.allreduce(buffers) if len(buffers) == 1 else self._group.allreduce_coalesced(buffers)
            self._record(work, buffers, start)
            self._works.append(work)

    def _await_weight(self) -> float:
        """Return this rank's weight; the first message waits until all ranks have begun the batch."""
        fit = self.fit
        if fit.weights.by_samples and not self._works:
            start = fit.record.clock()
            with waiting(BATCH):
                fit.weight.wait(fit.own_failure)
            if not self.waits_from:  # the wait at the end is counted as a whole
                fit.record.waited("samples of all ranks", WAIT, start, step=self.number)
        return fit.weight.factor

    def _record(self, work: dist.Work, buffers: Sequence[torch.Tensor], start: float) -> None:
        """Count a message that has begun, as the core does not see it.

        On a GPU it begins and ends on the timeline when the device reaches it.
        """
        record = self.fit.record
        nbytes = self.fit.wire.route.wire_share * sum(buffer.nbytes for buffer in buffers)
        record.statistics.bytes_sent += nbytes
        record.statistics.bytes_uncompressed += nbytes
        if record.timeline is None:
            return
        clock, number, began = record.clock, len(self._works), [start]
        args = {"bytes": nbytes, "step": self.number, "task": number, "partition": 0, "buckets": len(buffers)}
        span = partial(record.timeline.span, f"all-reduce {number}", COMMUNICATION, lane="COMMUNICATION", args=args)
        self._when_reached(lambda: began.append(clock()))

        def arrived(future: torch.futures.Future[object]) -> None:
            with suppress(Exception):  # the waiting code gets the error
                future.value()
                self._when_reached(lambda: span(began[-1], clock()))

        with suppress(RuntimeError):  # a backend without futures still works
            work.get_future().add_done_callback(arrived)

    def _when_reached(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the current stream has finished its work so far; at once on a CPU."""
        self.fit.wire.route.when_ready(ReadyMark(self.fit.device), then)
