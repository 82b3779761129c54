"""Steps as DDP's: buckets are merged into messages about as large as DDP's and awaited at the end of backward.

Buckets are smaller than DDP's, as each gates a layer, and cannot be changed once DDP has made them. A step without
gates reduces them at once, merges them as they come, and waits at the end of the backward pass. On a CPU merging costs
copies, so buckets are merged only up to the size at which a message's start-up time is small beside its transfer
(:func:`merged_bytes`).

Such a step must cost no more than DDP's. On a CPU, DDP gets completed futures, and the hook of the last bucket waits: a
future that a gloo thread completes would take the interpreter from the backward pass once per bucket. On a GPU streams
wait.

Why ranks agree: DDP calls its hook in the order of buckets on every rank, and only the training thread sends here. The
data group belongs to the scheduler's core otherwise. It is idle here, as all of the last step has arrived on this rank,
so every rank has launched it. With weights by samples, messages that are formed before this rank's weight is known wait
for it, in the order in which they were formed; their contents do not depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.device_streams import ReadyMark
from lightning_bytescheduler.collectives.operations import wait_unless
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.ddp.steps import BucketFutures, StepContext, TrainingStep
from lightning_bytescheduler.timeline.timeline import COMMUNICATION
from lightning_bytescheduler.tuning.sizes import LinkEstimate

__all__ = ["DdpModeStep", "MergedBuckets", "SentMessages", "merged_bytes"]


_Waiting = list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]]

_FIRST_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES
_BYTES = 25 * 1024 * 1024  # DDP's default
_START_UP_SHARE = 0.1  # of a message's time
_LOOK_EVERY = timedelta(milliseconds=200)


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
    """The buckets of one backward pass.

    Args:
        limit: Bytes from which a message is sent, see :func:`merged_bytes`; 0 to send buckets unmerged.
        weight: This rank's weight; equal weights if ``None``.
        failure: Returns the reason if another rank has failed and nothing will come.
        record: Called with each message before it is sent; the result is called with the message's future.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        futures: BucketFutures,
        *,
        limit: int = _BYTES,
        processors: int = 1,
        weight: StepWeight | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
        record: Callable[[Sequence[torch.Tensor]], Callable[[torch.futures.Future[object]], None]] | None = None,
    ) -> None:
        self._group = group
        self._failure = failure
        self._record = record
        self._weight = weight
        self._formed: list[_Waiting] = []  # messages that wait for this rank's weight
        self._processors = processors
        self._futures = futures
        self._waits_here = device.type == "cpu"
        # Gloo sends several tensors as one only on a CPU.
        self._merges = device.type == "cpu" or group._get_backend(device).name() != "gloo"
        self._waiting: _Waiting = []
        self._waiting_bytes = 0
        self._works: list[dist.Work] = []  # awaited here
        self._open: list[torch.futures.Future[torch.Tensor]] = []  # awaited by DDP, completed or not
        self._error: BaseException | None = None
        self._limit = min(limit, _FIRST_BYTES)
        self._next_limit = limit
        self.hideable_s = math.inf
        """Seconds that this rank has waited idle at the end; infinite if unknown."""

    def reduce(self, buffer: torch.Tensor, *, index: int, last: bool) -> torch.futures.Future[torch.Tensor]:
        """Average ``buffer`` over all ranks, in place, merged with its neighbours.

        Args:
            buffer: A flat bucket.
            index: Its index.
            last: Whether it is the backward pass's last one. On a CPU all buckets have arrived when this returns.

        Returns:
            A future of ``buffer``.

        Raises:
            BaseException: The reduction's error, or that of :meth:`fail`.
        """
        if self._waits_here:
            if self._error is not None:
                raise self._error
            future = self._futures.completed(index, buffer)
        else:
            future = self._futures.new()
            self._open.append(future)
            if self._error is not None:
                self.fail(self._error)
                return future
        if self._waiting and self._waiting[0][0].dtype != buffer.dtype:
            self._send()
        self._waiting.append((buffer, future))
        self._waiting_bytes += buffer.numel() * buffer.element_size()
        if self._waiting_bytes >= self._limit:
            self._send()
            self._limit = self._next_limit
        if last:
            self.finish()
        return future

    def finish(self) -> None:
        """Send the remaining buckets, and wait for everything where DDP does not; the last bucket calls this.

        Raises:
            BaseException: The reduction's error, or that of :meth:`fail`.
        """
        if self._waiting:
            self._send()
        if self._formed and self._weight is not None:
            self._weight.wait(self._cause)
            self._send_formed()
        if self._waits_here:
            self._await()

    def _cause(self) -> BaseException | None:
        return self._error or self._failure()

    @property
    def under_way(self) -> bool:
        """Whether something has not arrived."""
        return not (all(future.done() for future in self._open) and all(work.is_completed() for work in self._works))

    def fail(self, error: BaseException) -> None:
        """End pending and future reductions with ``error``; for any thread.

        DDP waits for its futures inside torch, where nothing else would wake it.
        """
        self._error = error
        for future in list(self._open):
            if not future.done():
                with suppress(RuntimeError):  # it has just arrived
                    future.set_exception(error)  # type: ignore[arg-type]

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        self._formed.append(waiting)
        if self._weight is None or self._weight.known:
            self._send_formed()

    def _send_formed(self) -> None:
        formed, self._formed = self._formed, []
        factor = 1.0 / self._group.size() if self._weight is None else self._weight.factor
        for waiting in formed:
            self._send_together(waiting, factor)

    def _send_together(self, waiting: _Waiting, factor: float) -> None:
        if factor:
            torch._foreach_mul_([buffer for buffer, _ in waiting], factor)
        else:  # the weight is zero also for non-finite gradients
            torch._foreach_zero_([buffer for buffer, _ in waiting])
        for together in [waiting] if self._merges else [[each] for each in waiting]:
            buffers = [buffer for buffer, _ in together]
            arrived = None if self._record is None else self._record(buffers)
            work = self._group.allreduce(buffers) if len(buffers) == 1 else self._group.allreduce_coalesced(buffers)
            if self._waits_here:
                self._works.append(work)
            else:
                work.get_future().add_done_callback(partial(_arrived, together))
            if arrived is not None:
                with suppress(RuntimeError):  # a backend without futures still works
                    work.get_future().add_done_callback(arrived)

    def _await(self) -> None:
        start, busy = time.perf_counter(), time.process_time()
        for work in self._works:
            wait_unless(work, self._cause, look_every=_LOOK_EVERY)
        waited = time.perf_counter() - start
        # Communication that needs the processors that compute the model cannot be hidden.
        if torch.get_num_threads() >= self._processors:
            waited -= (time.process_time() - busy) / self._processors
        self.hideable_s = max(waited, 0.0)


def _arrived(waiting: _Waiting, reduced: torch.futures.Future[object]) -> None:
    for buffer, future in waiting:
        with suppress(RuntimeError):  # MergedBuckets.fail has ended it
            try:
                reduced.value()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)


class SentMessages:
    """Records the messages of a step as DDP's on the timeline, as they bypass the scheduler's core.

    On a GPU a message begins and ends when the device reaches it.
    """

    def __init__(self, context: StepContext, step: int, wire_share: float) -> None:
        self._context = context
        self._step = step
        self._wire_share = wire_share
        self._count = 0

    def sending(self, buffers: Sequence[torch.Tensor]) -> Callable[[torch.futures.Future[object]], None]:
        """Begin a message of ``buffers``; the result is called with its future, on any thread."""
        clock, number = self._context.clock, self._count
        self._count += 1
        nbytes = self._wire_share * sum(buffer.numel() * buffer.element_size() for buffer in buffers)
        args = {"bytes": nbytes, "step": self._step, "task": number, "partition": 0, "buckets": len(buffers)}
        began = [clock()]
        self._when_reached(lambda: began.append(clock()))

        def end() -> None:
            if self._context.timeline is not None:
                lane = "COMMUNICATION"
                self._context.timeline.overlapping(
                    f"all-reduce {number}", COMMUNICATION, began[-1], clock(), lane=lane, args=args
                )

        def arrived(future: torch.futures.Future[object]) -> None:
            with suppress(Exception):  # the waiting code gets the error
                future.value()
                self._when_reached(end)

        return arrived

    def _when_reached(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the current stream has done what is enqueued so far; at once on a CPU."""
        streams = self._context.transport.streams
        if streams is None:
            then()
        else:
            streams.when_ready(ReadyMark(self._context.device), then)


class DdpModeStep(TrainingStep):
    """A step as DDP takes it, without the scheduler; see the module and :class:`TrainingStep`.

    Args:
        merged_bytes: Bytes from which a message is sent, the same on all ranks.
        on_exposed: Called with the seconds that training has waited idle at the end.
    """

    kind = "as DDP's"

    def __init__(
        self,
        context: StepContext,
        number: int,
        *,
        merged_bytes: int,
        processors: int,
        on_exposed: Callable[[float], None],
    ) -> None:
        super().__init__(context, number)
        if context.transport.streams is not None:
            context.core.drain(context.timeout)  # NCCL runs in launch order, and this thread launches next
        group = context.transport.group
        self._on_exposed = on_exposed
        self._wire_share = 2.0 * (group.size() - 1) / group.size()
        self._merged = MergedBuckets(
            group,
            context.device,
            context.futures,
            limit=merged_bytes,
            processors=processors,
            weight=context.weight,
            failure=lambda: context.core.abort_cause,
            record=None if context.timeline is None else SentMessages(context, number, self._wire_share).sending,
        )

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`."""
        context, last = self.context, bucket.is_last()
        self.waits_from = context.clock()
        sent = self._wire_share * buffer.numel() * buffer.element_size()
        context.statistics.bytes_sent += sent
        context.statistics.bytes_uncompressed += sent
        future = self._merged.reduce(buffer, index=bucket.index(), last=last)
        if last:
            self._on_exposed(self._merged.hideable_s)
        return future

    def reduce_sparse(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`."""
        if bucket.is_last():
            self._merged.finish()
        return super().reduce_sparse(bucket, buffer)

    def fail(self, error: BaseException) -> None:
        """See :class:`TrainingStep`."""
        self._merged.fail(error)

    @property
    def under_way(self) -> bool:
        """See :class:`TrainingStep`."""
        return self._merged.under_way
