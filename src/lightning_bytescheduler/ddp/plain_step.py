"""A step as with DDP: its gradients are awaited at the end of the backward pass.

DDP gets completed futures, and the hook of the last bucket waits. A future that another thread completes would take the
interpreter from the backward pass once per bucket, and DDP's wait could not be ended. On a CPU all gradients have
arrived when the last hook returns; on a GPU the current stream waits for them.

The scheduler sends the buckets (:class:`ScheduledBuckets`), or they are merged into messages about as large as DDP's,
past the scheduler (:class:`MergedBuckets`): buckets are smaller than DDP's, as each gates a layer, and cannot be
changed once DDP has made them. On a CPU merging costs copies, so buckets are merged only up to the size at which a
message's start-up time is small beside its transfer (:func:`merged_bytes`).

Why ranks agree on merged messages: DDP calls its hook in the order of buckets on every rank, and only the training
thread sends here. The data group belongs to the scheduler's core otherwise. It is idle here, as all of the last step
has arrived on this rank, so every rank has launched it. With weights by samples, messages that are formed before this
rank's weight is known wait for it, in the order in which they were formed; their contents do not depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.device_streams import ReadyMark
from lightning_bytescheduler.collectives.operations import wait_unless
from lightning_bytescheduler.ddp.fit import Fit, TrainingStep
from lightning_bytescheduler.ddp.reduction import GradientBucket
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.task import CommTask
from lightning_bytescheduler.timeline.timeline import COMMUNICATION
from lightning_bytescheduler.tuning.sizes import LinkEstimate

__all__ = ["MergedBuckets", "PlainStep", "ScheduledBuckets", "SentMessages", "merged_bytes"]

OnArrival = Callable[[torch.futures.Future[object]], None]

_FIRST_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES
_BYTES = 25 * 1024 * 1024  # DDP's default
_START_UP_SHARE = 0.1  # of a message's time
_LOOK_EVERY = timedelta(milliseconds=200)


class ScheduledBuckets:
    """Buckets that the scheduler sends."""

    kind = "synchronised"
    under_way = False

    def __init__(self, fit: Fit, number: int) -> None:
        self._fit = fit
        self._reduction = fit.reduction(number, overlaps=False)
        self._tasks: list[CommTask] = []

    def send(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> None:
        """Begin to average the buffer of the next bucket over all ranks, in place."""
        index, parameters = bucket.index(), cast("list[nn.Parameter]", bucket.parameters())
        known = GradientBucket(index, parameters, buffer, self._fit.reads.position_of(index, parameters))
        self._tasks.append(self._reduction.reduce(known))

    def finish(self) -> float:
        """Wait for all buckets, after the last one; returns the seconds of idle waiting, infinite if unknown.

        Raises:
            BaseException: The error of a reduction.
        """
        clock, wire = self._fit.record.clock, self._fit.wire
        start = clock()
        for task in self._tasks:
            wire.route.join(task, wire.timeout)
        return clock() - start

    def fail(self, error: BaseException) -> None:
        """End with ``error`` what does not wait for the scheduler's core: nothing here."""


def merged_bytes(device: torch.device, link: LinkEstimate | None) -> int:
    """Return the size of a message from which no bucket is added; the same on all ranks, which know the same link.

    Args:
        device: Where gradients live.
        link: The measured link, if any.
    """
    if device.type != "cpu":
        return _BYTES  # several tensors travel as one without a copy
    if link is None:
        return _FIRST_BYTES
    return min(max(int(link.alpha / link.beta / _START_UP_SHARE), _FIRST_BYTES), _BYTES)


class MergedBuckets:
    """Buckets that are merged, past the scheduler; see the module and :class:`ScheduledBuckets`.

    Args:
        limit: Bytes from which a message is sent, see :func:`merged_bytes`; 0 to send buckets unmerged.
        weight: This rank's weight.
        failure: Returns the reason if another rank has failed and nothing will come.
        record: Called with each message before it is sent; the result, if any, is called with the message's future.
    """

    kind = "as DDP's"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        weight: StepWeight,
        *,
        limit: int = _BYTES,
        processors: int = 1,
        failure: Callable[[], BaseException | None] = lambda: None,
        record: Callable[[Sequence[torch.Tensor]], OnArrival | None] = lambda buffers: None,
    ) -> None:
        self._group = group
        self._failure = failure
        self._record = record
        self._weight = weight
        self._formed: list[list[torch.Tensor]] = []  # messages that wait for this rank's weight
        self._processors = processors
        backend = group._get_backend(device).name()
        self._streams_wait = device.type != "cpu" and backend == "nccl"
        self._merges = device.type == "cpu" or backend != "gloo"  # gloo sends several tensors as one only on a CPU
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0
        self._works: list[dist.Work] = []
        self._error: BaseException | None = None
        self._limit = min(limit, _FIRST_BYTES)
        self._next_limit = limit

    @classmethod
    def of(cls, fit: Fit, number: int, *, limit: int, processors: int) -> MergedBuckets:
        """Return those of step ``number``."""
        wire = fit.wire
        if wire.route.streams is not None:
            wire.core.drain(wire.timeout)  # NCCL runs in launch order, and this thread launches next
        return cls(
            wire.route.group,
            fit.device,
            fit.weight,
            limit=limit,
            processors=processors,
            failure=fit.own_failure,
            record=SentMessages(fit, number).sending,
        )

    def send(self, bucket: object, buffer: torch.Tensor) -> None:
        """See :class:`ScheduledBuckets`."""
        if self._error is not None:
            raise self._error
        if self._waiting and self._waiting[0].dtype != buffer.dtype:
            self._form()
        self._waiting.append(buffer)
        self._waiting_bytes += buffer.nbytes
        if self._waiting_bytes >= self._limit:
            self._form()
            self._limit = self._next_limit

    def finish(self) -> float:
        """See :class:`ScheduledBuckets`."""
        if self._waiting:
            self._form()
        if self._formed:
            self._weight.wait(self._cause)
            self._send_formed()
        start, busy = time.perf_counter(), time.process_time()
        for work in self._works:
            if self._streams_wait:
                work.wait()  # the current stream waits, and the host does not
            else:
                wait_unless(work, self._cause, look_every=_LOOK_EVERY)
        if self._streams_wait:
            return math.inf
        waited = time.perf_counter() - start
        # Communication that needs the processors that compute the model cannot be hidden.
        if torch.get_num_threads() >= self._processors:
            waited -= (time.process_time() - busy) / self._processors
        return max(waited, 0.0)

    def _cause(self) -> BaseException | None:
        return self._error or self._failure()

    @property
    def under_way(self) -> bool:
        """See :class:`ScheduledBuckets`."""
        return not all(work.is_completed() for work in self._works)

    def fail(self, error: BaseException) -> None:
        """See :class:`ScheduledBuckets`."""
        self._error = error

    def _form(self) -> None:
        self._formed.append(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        if self._weight.known:
            self._send_formed()

    def _send_formed(self) -> None:
        formed, self._formed = self._formed, []
        for buffers in formed:
            self._send_together(buffers, self._weight.factor)

    def _send_together(self, waiting: list[torch.Tensor], factor: float) -> None:
        if factor:
            torch._foreach_mul_(waiting, factor)
        else:  # the weight is zero also for non-finite gradients
            torch._foreach_zero_(waiting)
        for buffers in [waiting] if self._merges else [[each] for each in waiting]:
            arrived = self._record(buffers)
            work = self._group.allreduce(buffers) if len(buffers) == 1 else self._group.allreduce_coalesced(buffers)
            self._works.append(work)
            if arrived is not None:
                with suppress(RuntimeError):  # a backend without futures still works
                    work.get_future().add_done_callback(arrived)


class SentMessages:
    """Counts the messages of a step as DDP's, and records them on the timeline: they bypass the scheduler's core.

    On a GPU a message begins and ends when the device reaches it.
    """

    def __init__(self, fit: Fit, step: int) -> None:
        self._fit = fit
        self._step = step
        self._count = 0

    def sending(self, buffers: Sequence[torch.Tensor]) -> OnArrival | None:
        """Begin a message of ``buffers``; the result is called with its future, on any thread."""
        record = self._fit.record
        nbytes = self._fit.wire.route.wire_share * sum(buffer.nbytes for buffer in buffers)
        record.statistics.bytes_sent += nbytes
        record.statistics.bytes_uncompressed += nbytes
        if record.timeline is None:
            return None
        clock, number, timeline = record.clock, self._count, record.timeline
        self._count += 1
        args = {"bytes": nbytes, "step": self._step, "task": number, "partition": 0, "buckets": len(buffers)}
        began = [clock()]
        self._when_reached(lambda: began.append(clock()))

        def end() -> None:
            lane = "COMMUNICATION"
            timeline.overlapping(f"all-reduce {number}", COMMUNICATION, began[-1], clock(), lane=lane, args=args)

        def arrived(future: torch.futures.Future[object]) -> None:
            with suppress(Exception):  # the waiting code gets the error
                future.value()
                self._when_reached(end)

        return arrived

    def _when_reached(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the current stream has done what is enqueued so far; at once on a CPU."""
        self._fit.wire.route.when_ready(ReadyMark(self._fit.device), then)


class PlainStep(TrainingStep):
    """See the module, and :class:`TrainingStep`.

    Args:
        buckets: Averages the step's buckets.
        on_exposed: Called with the seconds that training has waited idle at the end; may be ``None``.
        each: Wait in the hook of each bucket, as DDP does not say which one is the last.
    """

    def __init__(
        self,
        fit: Fit,
        number: int,
        buckets: ScheduledBuckets | MergedBuckets,
        on_exposed: Callable[[float], None] | None = None,
        *,
        each: bool = False,
    ) -> None:
        super().__init__(fit, number)
        self._each = each
        self.kind = buckets.kind
        self._buckets = buckets
        self._on_exposed = on_exposed

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`."""
        if buffer.numel():
            self._buckets.send(bucket, buffer)
        if bucket.is_last() or self._each:
            self._finish()
        return self.fit.futures.completed(bucket.index(), buffer)

    def reduce_sparse(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`."""
        if bucket.is_last() or self._each:
            self._finish()
        return super().reduce_sparse(bucket, buffer)

    def _finish(self) -> None:
        self.waits_from = self.waits_from or self.fit.record.clock()
        exposed = self._buckets.finish()
        if self._on_exposed is not None:
            self._on_exposed(exposed)

    def fail(self, error: BaseException) -> None:
        """See :class:`TrainingStep`."""
        self._buckets.fail(error)

    @property
    def under_way(self) -> bool:
        """See :class:`TrainingStep`."""
        return self._buckets.under_way
