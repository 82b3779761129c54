"""Turns the buckets of one backward pass into communication tasks.

There are two ways. An *all-reduce* (push and pull with parameter servers) is one task per bucket. *Sharded* reduction
is for steps that need the norm of all gradients before the first update (norm clipping)::

    reduce-scatter   of every bucket, during the backward pass: each rank has its shard of the reduced gradient
    norms            one exchange of a number per rank, its shards' norm: then every rank knows the norm of all
    all-gather       by priority, once the bucket's own reduce-scatter is done; during the next forward pass

It sends as many bytes as an all-reduce, which is a reduce-scatter and an all-gather, but the norm is known after half
of them. Reduce-scatters have the highest priority, as every update waits for the last one. Buckets that travel encoded
take the same two halves, see ``compressed_reduction.py``.

Why the ranks agree: tasks are named by step, phase and index of the bucket, and are launched in the order rank 0
decides (``launch_order.py``). A gather waits for its bucket's reduce-scatter on its rank, and the exchange of norms
waits for all of them. Rank 0 launches either only after these have ended there, so they come first in the order of all
ranks. So the oldest operation never waits for a younger one.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.device_streams import HostPayloads
from lightning_bytescheduler.collectives.operations import (
    Averaging,
    Operation,
    StartedOperation,
    all_gather,
    ending_with,
    exchange,
    reduce_scatter,
    shard_of,
)
from lightning_bytescheduler.collectives.route import AllReduce, ReadyMark
from lightning_bytescheduler.ddp.fit_report import BEFORE_GATHERS
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey

_SUMMED = 1 << 16  # elements of which a CPU adds up the squares in fp32: with more, the norm loses digits

Launch = Callable[[SubCommTask], None]
"""Sends a part; see :class:`CommTask`."""


class Phase(enum.IntEnum):
    """What a task does within a step. The same on all ranks."""

    REDUCE = 0  # all-reduce or reduce-scatter of a bucket
    GATHER = 1
    NORMS = 2  # all buckets
    LEFT = 3  # factors of a bucket, see ``compressed_reduction.py``
    RIGHT = 4


def total_norm(norms: Iterable[float]) -> float:
    """Return the norm of a vector from the norms of its parts; NaN if one of them is NaN, as in torch."""
    parts = list(norms)
    return math.nan if any(map(math.isnan, parts)) else math.hypot(*parts)  # C's hypot returns infinity for (nan, inf)


class GradientBucket:
    """One of DDP's buckets in one step.

    Args:
        index: Index of the bucket, the same on all ranks.
        priority: Position in the forward pass or in the order of arrival, depending on the policy.
    """

    __slots__ = ("buffer", "index", "parameters", "priority")

    def __init__(self, index: int, parameters: list[nn.Parameter], buffer: torch.Tensor, priority: int) -> None:
        self.index = index
        self.parameters = parameters
        self.buffer = buffer
        self.priority = priority

    def holds(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is a view of this bucket and not another tensor."""
        if not gradient.numel():  # it has no address to compare
            return True
        first = self.buffer.data_ptr()
        return first <= gradient.data_ptr() < first + self.buffer.numel() * self.buffer.element_size()


class EncodedBucket(Protocol):
    """A bucket in one step whose gradients travel encoded."""

    def reduce(self, reduction: Reduction, bucket: GradientBucket, **scattered: Any) -> CommTask:
        """Enqueue its tasks; see :meth:`Reduction.reduce` and :meth:`Reduction.in_halves`.

        Returns:
            The last of them.
        """


class Reduction:
    """Turns the buckets of one backward pass into tasks, as the codec says. Without a codec, each is one all-reduce.

    Args:
        route: How parts travel.
        step: Number of the step, the same on all ranks.
        weight: This rank's weight.
        codec: Says which buckets travel encoded.
    """

    def __init__(
        self,
        core: ByteCore,
        route: AllReduce,
        step: int,
        weight: StepWeight,
        codec: Uncompressed | None = None,
    ) -> None:
        self._codec = Uncompressed() if codec is None else codec
        self.route = route
        self.weight = weight
        self.rank = route.group.rank()
        self.world_size = route.group.size()
        self._core = core
        self._step = step

    def reduce(self, bucket: GradientBucket) -> CommTask:
        """Average the buffer of ``bucket`` over all ranks, in place.

        Args:
            bucket: The next bucket; the current stream has written it.

        Returns:
            The task that ends when the buffer holds the mean.
        """
        if (encoded := self._codec.encoded(bucket, self.weight)) is not None:
            return encoded.reduce(self, bucket)
        ready, buffer, route = self.route.mark(), bucket.buffer, self.route
        task = self.enqueue(
            bucket,
            buffer.numel(),
            self._averaging(buffer, route.all_reduce, ready),
            phase=Phase.REDUCE,
            wire_bytes=route.wire_share * buffer.element_size(),
            joinable=True,
        )
        self.notify_ready(task, ready)
        return task

    def close(self) -> None:
        """Record that there are no more buckets."""

    def enqueue(
        self,
        bucket: GradientBucket,
        size: int,
        launch: Launch,
        *,
        name: str = "",
        phase: Phase,
        wire_bytes: float,
        priority: int | None = None,
        cut_like: CommTask | None = None,
        on_end: Callable[[CommTask], None] | None = None,
        joinable: bool = False,
    ) -> CommTask:
        """Enqueue a task for a bucket.

        Args:
            bucket: The bucket.
            size: Elements to send.
            launch: Sends each part.
            name: What is done with the bucket, if it has several tasks.
            phase: Phase of the step.
            wire_bytes: See :class:`CommTask`.
            priority: The bucket's if left out.
            cut_like: See :meth:`ByteCore.enqueue`.
            on_end: See :class:`CommTask`; not for a joinable task on a GPU.
            joinable: Whether streams that wait for the result may use it, see :meth:`AllReduce.join`.
        """
        streams = self.route.streams if joinable else None
        task = CommTask(
            f"bucket {bucket.index}{name}",
            size,
            launch=launch,
            priority=bucket.priority if priority is None else priority,
            key=TaskKey(self._step, phase, bucket.index),
            wire_bytes=wire_bytes,
            on_end=on_end if streams is None else streams.forget,
        )
        if streams is not None:
            streams.expect(task)
        try:
            self._core.enqueue(task, cut_like=cut_like)
        except BaseException:
            if streams is not None:
                streams.forget(task)
            raise
        return task

    def in_halves(
        self,
        bucket: GradientBucket,
        buffer: torch.Tensor,
        to_owners: Launch,
        to_all: Launch,
        ready: ReadyMark,
        *,
        scatter_priority: int | None = None,
        on_scattered: Callable[[CommTask], None] | None = None,
    ) -> CommTask:
        """Enqueue the reduce-scatter and the all-gather of a bucket.

        Args:
            bucket: The bucket.
            buffer: Its buffer, as real numbers.
            to_owners: Launches a part of the reduce-scatter.
            to_all: Launches a part of the all-gather.
            ready: When the current stream has written the bucket.
            scatter_priority: Priority of the reduce-scatter; the bucket's if left out.
            on_scattered: Called when that has ended without error, before the all-gather may begin.

        Returns:
            The all-gather.
        """
        share = (self.world_size - 1) / self.world_size

        def scattered(scatter: CommTask) -> None:
            # If it failed, the core stops, and all waits end; the gather may not exist yet.
            if scatter.error is None:
                if on_scattered is not None:
                    on_scattered(scatter)
                gather.notify_ready()

        enqueue = partial(self.enqueue, bucket, buffer.numel(), wire_bytes=share * buffer.element_size())
        scatter = enqueue(to_owners, name=" scatter", phase=Phase.REDUCE, priority=scatter_priority, on_end=scattered)
        # Shards belong to parts, so both tasks must have the same parts.
        gather = enqueue(to_all, name=" gather", phase=Phase.GATHER, cut_like=scatter, joinable=True)
        self.notify_ready(scatter, ready)
        return gather

    def notify_ready(self, task: CommTask, ready: ReadyMark) -> None:
        """Mark a task as ready once its data is complete and this rank's weight is known."""
        self.weight.when_known(partial(self.route.when_ready, ready, task.notify_ready))

    def _averaging(self, buffer: torch.Tensor, operation: Averaging, ready: ReadyMark) -> Launch:
        """Return :meth:`_launching` with this rank's weight, which is known when the task starts."""
        weight = self.weight

        def weighted(group: dist.ProcessGroup, part: torch.Tensor, number: int) -> StartedOperation:
            return operation(group, part, number, weight.factor)

        return self._launching(buffer, weighted, ready)

    def _launching(self, buffer: torch.Tensor, operation: Operation, ready: ReadyMark | None = None) -> Launch:
        """Return what runs ``operation`` on each part of ``buffer``; see :meth:`AllReduce.launch`."""
        if self.route.copies is not None:
            operation = _on_copies(operation, self.route.copies)
        return partial(self.route.launch, buffer, operation, ready)


def _on_copies(operation: Operation, copies: HostPayloads) -> Operation:
    """Return ``operation`` on a copy of the part in host memory, whose result is copied back."""

    def on_copy(group: dist.ProcessGroup, part: torch.Tensor, number: int) -> StartedOperation:
        with copies.working():
            there = copies.to_host(part)

        def put_back() -> None:
            with copies.working():
                copies.bring_back(there, part)

        return ending_with(operation(group, there, number), put_back)

    return on_copy


class ShardedReduction(Reduction):
    """Reduce-scatter and all-gather per bucket, with the norm of all gradients in between; see the module.

    Reduce-scatters end on the route's thread, which computes the norms of this rank's shards. On a GPU it uses a side
    stream, as the host already knows that the shards are complete.

    A lock guards what both threads use; nothing is called with it held.

    Attributes:
        norms: The exchange; it ends when the norm is known. ``None`` before :meth:`close`.
    """

    def __init__(self, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self.norms: CommTask | None = None
        self._lock = threading.Lock()
        self._shard_norms: dict[int, float] = {}  # by index of the bucket
        self._under_way = 1  # reduce-scatters that have not ended, plus one for close()
        self._rows: torch.Tensor | None = None
        self._norm: float | None = None

    def reduce(self, bucket: GradientBucket) -> CommTask:
        """See :class:`Reduction`."""
        encoded, buffer = self._codec.encoded(bucket, self.weight), bucket.buffer
        if buffer.is_complex():  # its norm is that of all real and imaginary parts
            buffer = torch.view_as_real(buffer).view(-1)
        with self._lock:
            self._under_way += 1
        norms_first: dict[str, Any] = {
            "scatter_priority": bucket.priority - BEFORE_GATHERS,
            "on_scattered": partial(self._scattered, bucket.index, buffer),
        }
        if encoded is not None:
            return encoded.reduce(self, bucket, **norms_first)
        ready = self.route.mark()
        to_owners, to_all = self._averaging(buffer, reduce_scatter, ready), self._launching(buffer, all_gather)
        return self.in_halves(bucket, buffer, to_owners, to_all, ready, **norms_first)

    def close(self) -> None:
        """See :class:`Reduction`; enqueues the exchange of norms as one message."""
        with self.route.side_stream():  # not behind the backward pass, as the GPU needs the norms before it ends
            rows = torch.zeros(self.world_size, 1, dtype=torch.float64, device=self.route.wire_device)
        self.norms = CommTask(
            "gradient norms",
            1,
            launch=lambda sub_task: self.route.send(rows, sub_task, exchange),
            priority=-BEFORE_GATHERS,
            key=TaskKey(self._step, Phase.NORMS),
            wire_bytes=float(rows.element_size() * (self.world_size - 1)),
        )
        self._rows = rows
        self._core.enqueue(self.norms)
        self._one_less()

    def norm(self) -> float:
        """Return the norm of all reduced gradients, after :attr:`norms` ended; the same bits on all ranks.

        It is finite if and only if all gradients are. It is computed without torch, as ranks may have different
        processors.
        """
        if self._norm is None:
            if self._rows is None:
                raise RuntimeError("The norm of a backward pass that has not ended was asked for.")
            with self.route.side_stream():
                self._norm = total_norm(self._rows.flatten().tolist())
        return self._norm

    def _scattered(self, index: int, buffer: torch.Tensor, scatter: CommTask) -> None:
        with self.route.side_stream():
            norm = norm_of_shards(buffer, scatter, self.rank, self.world_size)
        with self._lock:
            self._shard_norms[index] = norm
        self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._under_way -= 1
            last = not self._under_way
        if last and self._rows is not None and self.norms is not None:
            norms = [norm for _, norm in sorted(self._shard_norms.items())]
            with self.route.side_stream():
                # the copy to a GPU is complete when this returns
                self._rows[self.rank].copy_(torch.tensor([total_norm(norms)], dtype=torch.float64))
            self.norms.notify_ready()


def norm_of_shards(buffer: torch.Tensor, scatter: CommTask, rank: int, world_size: int) -> float:
    """Return the norm of what ``rank`` has reduced of a bucket."""
    pieces: list[torch.Tensor] = []
    most = _SUMMED if buffer.device.type == "cpu" else max(buffer.numel(), 1)
    for sub in scatter.sub_tasks:
        first, end = (sub.offset + edge for edge in shard_of(sub.size, rank, world_size))
        if first < end:
            pieces += buffer[first:end].split(most)
    norms = _norms(pieces, None if buffer.dtype in (torch.float32, torch.float64) else torch.float32)
    if not all(map(math.isfinite, norms)):  # squares of large finite values overflow; in double precision they do not
        norms = _norms(pieces, torch.float64)
    return total_norm(norms)


def _norms(pieces: Sequence[torch.Tensor], kind: torch.dtype | None) -> list[float]:
    """Return norms, computed in ``kind``; a GPU sends them in one transfer."""
    if not pieces:
        return []
    norms: list[float] = torch.stack([torch.linalg.vector_norm(piece, dtype=kind) for piece in pieces]).tolist()
    return norms


class Uncompressed:
    """Gradients that travel as they are; the base of codecs.

    Attributes:
        residuals: What encoding has left out.
    """

    compressed: Mapping[str, str] = {}
    """Name of the codec by name of the parameter."""
    ratio = 1.0
    """How many times fewer bytes travel for all gradients together."""

    def __init__(self) -> None:
        self.residuals = Residuals()

    def encoded(self, bucket: GradientBucket, weight: StepWeight) -> EncodedBucket | None:
        """Return the encoded form of a bucket in a step with this rank's ``weight``; ``None`` if it travels exact."""
        return None

    def begin_step(self) -> None:
        """Begin a step at the first bucket of a backward pass; nothing of the last one may be in flight."""
