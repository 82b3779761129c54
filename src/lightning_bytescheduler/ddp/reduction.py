"""Turns the buckets of one backward pass into communication tasks.

There are two ways. An *all-reduce* (push and pull with parameter servers) is one task per bucket. *Sharded* reduction
is for steps that need the norm of all gradients before the first update (norm clipping)::

    reduce-scatter   of every bucket, during the backward pass: each rank has its shard of the reduced gradient
    norms            one exchange of a number per parameter: then every rank knows every parameter's norm
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
from lightning_bytescheduler.collectives.route import AllReduce, EncodedStart, ReadyMark
from lightning_bytescheduler.ddp.fit_report import BEFORE_GATHERS
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey

OnEnd = Callable[[CommTask], None]
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
    """The encoded form of a bucket in one step."""

    @property
    def scatter(self) -> EncodedStart:
        """Sends a part's shards to their owners."""

    @property
    def gather(self) -> EncodedStart:
        """Sends this rank's summed shard of a part to all ranks."""


class FactoredBucket(Protocol):
    """A bucket whose matrices travel as factors, in one step."""

    def reduce(self, reduction: Reduction, bucket: GradientBucket, on_end: OnEnd | None) -> CommTask:
        """See :meth:`Reduction.reduce`."""


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

    def reduce(self, bucket: GradientBucket, on_end: OnEnd | None = None) -> CommTask:
        """Average the buffer of ``bucket`` over all ranks, in place.

        Args:
            bucket: The next bucket; the current stream has written it.
            on_end: Called once when the task has ended, but not where streams wait for the result.

        Returns:
            The task that ends when the buffer holds the mean.
        """
        if (factors := self._codec.in_factors(bucket, self.weight)) is not None:
            return factors.reduce(self, bucket, on_end)
        if (encoded := self._codec.encoded(bucket, self.weight)) is not None:
            return self.in_halves(bucket, bucket.buffer, encoded, scatter_priority=bucket.priority, on_end=on_end)
        ready, buffer, route = self.route.mark(), bucket.buffer, self.route
        task = self.enqueue(
            bucket,
            buffer.numel(),
            self._averaging(buffer, route.all_reduce, ready),
            phase=Phase.REDUCE,
            wire_bytes=route.wire_share * buffer.element_size(),
            on_end=on_end,
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
        on_end: OnEnd | None = None,
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
        encoded: EncodedBucket | None,
        *,
        scatter_priority: int,
        on_scattered: OnEnd | None = None,
        on_end: OnEnd | None = None,
    ) -> CommTask:
        """Enqueue the reduce-scatter and the all-gather of a bucket.

        Args:
            bucket: The bucket; the current stream has written it.
            buffer: Its buffer, as real numbers.
            encoded: Does both if parts travel encoded.
            scatter_priority: Priority of the reduce-scatter.
            on_scattered: Called when that has ended without error, before the all-gather may begin.
            on_end: See :meth:`reduce`.

        Returns:
            The all-gather.
        """
        ready, share = self.route.mark(), (self.world_size - 1) / self.world_size

        def scattered(scatter: CommTask) -> None:
            # If it failed, the core stops, and all waits end; the gather may not exist yet.
            if scatter.error is None:
                if on_scattered is not None:
                    on_scattered(scatter)
                gather.notify_ready()

        if encoded is None:
            to_owners = self._averaging(buffer, reduce_scatter, ready)
            to_all = self._launching(buffer, all_gather)
        else:
            to_owners = partial(self.route.launch_encoded, encoded.scatter)
            to_all = partial(self.route.launch_encoded, encoded.gather)
        enqueue = partial(self.enqueue, bucket, buffer.numel(), wire_bytes=share * buffer.element_size())
        scatter = enqueue(to_owners, name=" scatter", phase=Phase.REDUCE, priority=scatter_priority, on_end=scattered)
        # Shards belong to parts, so both tasks must have the same parts.
        gather = enqueue(to_all, name=" gather", phase=Phase.GATHER, cut_like=scatter, on_end=on_end, joinable=True)
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
    """Reduce-scatter and all-gather per bucket, with every parameter's norm in between; see the module.

    Reduce-scatters end on the route's thread, which computes the norms of this rank's shards. On a GPU it uses a side
    stream, as the host already knows that the shards are complete.

    A lock guards what both threads use; nothing is called with it held.

    Attributes:
        norms: The exchange; it ends when every parameter's norm is known. ``None`` before :meth:`close`.
    """

    def __init__(self, *of: Any, **more: Any) -> None:
        super().__init__(*of, **more)
        self.norms: CommTask | None = None
        self._position: dict[int, int] = {}  # index of each parameter, by its id
        self._lock = threading.Lock()
        self._shard_norms: dict[int, float] = {}  # by index of the parameter
        self._under_way = 1  # reduce-scatters that have not ended, plus one for close()
        self._rows: torch.Tensor | None = None
        self._norms: list[float] | None = None

    def reduce(self, bucket: GradientBucket, on_end: OnEnd | None = None) -> CommTask:
        """See :class:`Reduction`."""
        parameters, buffer = bucket.parameters, bucket.buffer
        encoded = self._codec.encoded(bucket, self.weight)
        first = len(self._position)
        for position, parameter in enumerate(parameters, first):
            self._position[id(parameter)] = position
        with torch._C.DisableTorchFunctionSubclass():
            sizes = [2 * p.numel() if p.is_complex() else p.numel() for p in parameters]
        if buffer.is_complex():  # its norm is that of all real and imaginary parts
            buffer = torch.view_as_real(buffer).view(-1)
        with self._lock:
            self._under_way += 1
        return self.in_halves(
            bucket,
            buffer,
            encoded,
            scatter_priority=bucket.priority - BEFORE_GATHERS,
            on_scattered=lambda scatter: self._scattered(buffer, first, sizes, scatter),
            on_end=on_end,
        )

    def close(self) -> None:
        """See :class:`Reduction`; enqueues the exchange of norms as one message."""
        with self.route.side_stream():  # not behind the backward pass, as the GPU needs the norms before it ends
            rows = torch.zeros(self.world_size, len(self._position), dtype=torch.float64, device=self.route.wire_device)
        self.norms = CommTask(
            "gradient norms",
            1,
            launch=lambda sub_task: self.route.send(rows, sub_task, exchange),
            priority=-BEFORE_GATHERS,
            key=TaskKey(self._step, Phase.NORMS),
            wire_bytes=float(rows[0].numel() * rows.element_size() * (self.world_size - 1)),
        )
        self._rows = rows
        self._core.enqueue(self.norms)
        self._one_less()

    def norm(self, parameter: nn.Parameter) -> float:
        """Return the norm of a parameter's reduced gradient, after :attr:`norms` ended; the same bits on all ranks.

        It is finite if and only if the gradient is. It is computed without torch, as ranks may have different
        processors.
        """
        if self._norms is None:
            if self._rows is None:
                raise RuntimeError("The norms of a backward pass that has not ended were asked for.")
            with self.route.side_stream():
                self._norms = [total_norm(shards) for shards in self._rows.t().tolist()]
        return self._norms[self._position[id(parameter)]]

    def _scattered(self, buffer: torch.Tensor, first: int, sizes: Sequence[int], scatter: CommTask) -> None:
        with self.route.side_stream():
            norms = _shard_norms(buffer, sizes, scatter, self.rank, self.world_size)
        with self._lock:
            self._shard_norms.update((first + position, norm) for position, norm in norms.items())
        self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._under_way -= 1
            last = not self._under_way
        if last and self._rows is not None and self.norms is not None:
            row = self._rows[self.rank]
            norms = torch.tensor([self._shard_norms.get(n, 0.0) for n in range(row.numel())], dtype=torch.float64)
            with self.route.side_stream():
                row.copy_(norms)  # the copy to a GPU is complete when this returns
            self.norms.notify_ready()


def _shard_norms(
    buffer: torch.Tensor, sizes: Sequence[int], scatter: CommTask, rank: int, world_size: int
) -> dict[int, float]:
    """Return norms of what ``rank`` has reduced, by position of the parameter in the bucket."""
    pieces: list[torch.Tensor] = []
    owners: list[int] = []
    position, end_of_parameter = 0, sizes[0] if sizes else 0
    for sub in scatter.sub_tasks:
        first, end = (sub.offset + edge for edge in shard_of(sub.size, rank, world_size))
        while first < end:
            while first >= end_of_parameter:
                position += 1
                end_of_parameter += sizes[position]
            last = min(end, end_of_parameter)
            pieces.append(buffer[first:last])
            owners.append(position)
            first = last
    found: dict[int, float] = {}
    norms = _norms(pieces, None if buffer.dtype in (torch.float32, torch.float64) else torch.float32)
    odd = [n for n, norm in enumerate(norms) if not math.isfinite(norm)]
    # Squares of large finite values overflow; in double precision they do not.
    for n, norm in zip(odd, _norms([pieces[n] for n in odd], torch.float64), strict=True):
        norms[n] = norm
    for owner, norm in zip(owners, norms, strict=True):
        found[owner] = total_norm((found.get(owner, 0.0), norm))
    return found


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

    def in_factors(self, bucket: GradientBucket, weight: StepWeight) -> FactoredBucket | None:
        """Return the form of a bucket whose matrices travel as factors; ``None`` if it has no such matrix."""
        return None

    def encoded(self, bucket: GradientBucket, weight: StepWeight) -> EncodedBucket | None:
        """Return the encoded form of a bucket in a step with this rank's ``weight``; ``None`` if it travels exact."""
        return None

    def begin_step(self) -> None:
        """Begin a step at the first bucket of a backward pass; nothing of the last one may be in flight."""
