"""Gradients that travel in fewer bytes: encoded shards to their owners, and the encoded sum of each shard to all.

Of each part of a bucket, every rank owns a shard, as in the sharded reduction (``reduction.py``)::

    scatter   each rank encodes what it has of the others' shards, sends it to their owners, and keeps what it has of
              its own. The owner decodes what it gets, and adds up in fp32
    gather    the owner encodes the sum, once, and sends it to all. Everybody takes the decoded bytes that travelled,
              the owner too: the same bits on all ranks, and any norm is that of what the optimizer gets

*Error feedback*: what encoding leaves out is added to the same elements in the next step. With g the gradient divided
by the number of ranks, C a codec and r the residual of this rank::

    x = g + r,  C(x) travels,  r = x - C(x)         of others' shards
    s = g + r + sum of all C(x),  C(s) travels,  r = s - C(s)    of the own shard

One residual for each element is enough for both directions, as a rank is either the owner of an element or not. So
ownership may change when buckets are rebuilt, or partitions cut in another way: the residual of a sum is added to the
gradient on the rank that has it, and whether that is then sent or summed makes no difference to the mean. However
things are cut, all ranks' residuals and what was applied add up to the gradients.

Source: error feedback in both directions is that of Tang et al., "DoubleSqueeze", ICML 2019; reduce-scatter and
all-gather of compressed shards that of BytePS and of Zhong et al., "Compressed Communication for Distributed Training".

Threads: :meth:`CompressedBucket.scatter` and :meth:`CompressedBucket.gather` run on the codec thread, what follows on
the completion thread, once all that was sent in the same part has been encoded. Parts do not overlap, so nothing is
shared between them but counters, which have a lock that is held for nothing else.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bytescheduler.collectives.operations import StartedOperation, shard_of
from lightning_bytescheduler.collectives.transport import GradientTransport
from lightning_bytescheduler.ddp.compression_rules import CompressionRules, GradientCodec
from lightning_bytescheduler.ddp.reduction import AllReduction, GradientBucket, StepTasks
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics, profiled
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import CODEC, Timeline

__all__ = ["CompressedBucket", "CompressedReduction", "GradientCompression"]

_ALIGNED = 8  # bytes: each piece of a payload begins at a multiple, so that it can be read as numbers


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of a bucket that travel alike: those of one parameter.

    Attributes:
        first: Position in the bucket.
        end: Position after the last.
        codec: What they travel in; ``None`` for as they are.
        residual: Flat, in fp32, as long as the piece; ``None`` where there is no codec.
    """

    first: int
    end: int
    codec: GradientCodec | None
    residual: Tensor | None

    def within(self, first: int, end: int) -> Piece | None:
        """The part of it between two positions in the bucket, or ``None``."""
        start, stop = max(first, self.first), min(end, self.end)
        if start >= stop:
            return None
        residual = None if self.residual is None else self.residual[start - self.first : stop - self.first]
        return Piece(start, stop, self.codec, residual)

    def nbytes(self, width: int) -> int:
        """What it takes on the wire, where an element as it is takes ``width`` bytes."""
        size = self.end - self.first
        return size * width if self.codec is None else self.codec.payload_bytes(size)


class CompressedBucket:
    """One bucket in one step; see the module and :class:`~lightning_bytescheduler.ddp.reduction.EncodedBucket`.

    Args:
        buffer: The flat gradient; is filled with the mean.
        pieces: All of it, in order.
        observer: Told of work and of residuals.
    """

    def __init__(self, buffer: Tensor, pieces: list[Piece], observer: GradientCompression) -> None:
        self._buffer = buffer
        self._pieces = pieces
        self._observer = observer
        self._sums: dict[int, Tensor] = {}  # by index of the part: this rank's encoded shard

    @property
    def share(self) -> float:
        """See ``EncodedBucket``."""
        width = self._buffer.element_size()
        return sum(piece.nbytes(width) for piece in self._pieces) / (self._buffer.numel() * width)

    def scatter(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """See ``EncodedBucket``."""
        scale = 1.0 / group.size()
        with self._observer.working("encode", sub_task) as squares:
            sent = {
                rank: self._pack(shard, scale, squares)
                for rank, shard in self._shards(group, sub_task).items()
                if rank != group.rank()
            }
        own = self._own(group, sub_task)
        size = self._payload_bytes(own)
        received = {rank: torch.empty(size, dtype=torch.uint8) for rank in _others(group)} if own else {}

        def add_up() -> None:
            with self._observer.working("reduce", sub_task) as squares:
                self._sums[sub_task.index] = self._summed(own, scale, list(received.values()), squares)

        return StartedOperation(_messages(group, received, sent, number), add_up if own else None, messages=True)

    def gather(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """See ``EncodedBucket``."""
        shards = self._shards(group, sub_task)
        payload = self._sums.pop(sub_task.index, None)
        sent = {} if payload is None else dict.fromkeys(_others(group), payload)
        received = {
            rank: torch.empty(self._payload_bytes(shards[rank]), dtype=torch.uint8)
            for rank in _others(group)
            if rank in shards
        }

        def place() -> None:
            with self._observer.working("decode", sub_task):
                for rank, payload in received.items():
                    for piece, body in self._bodies(shards[rank], payload):
                        self._decode(piece, body)

        return StartedOperation(_messages(group, received, sent, number), place, messages=True)

    # ------------------------------------------------------------------ where

    def _shards(self, group: dist.ProcessGroup, sub_task: SubCommTask) -> dict[int, list[Piece]]:
        """Pieces of a part by owner; ranks that own none of it are left out."""
        shards = {}
        for rank in range(group.size()):
            first, end = (sub_task.offset + edge for edge in shard_of(sub_task.size, rank, group.size()))
            if first < end:
                found = (piece.within(first, end) for piece in self._pieces)
                shards[rank] = [piece for piece in found if piece is not None]
        return shards

    def _own(self, group: dist.ProcessGroup, sub_task: SubCommTask) -> list[Piece]:
        return self._shards(group, sub_task).get(group.rank(), [])

    def _payload_bytes(self, shard: list[Piece]) -> int:
        return sum(_aligned(piece.nbytes(self._buffer.element_size())) for piece in shard)

    def _bodies(self, shard: list[Piece], payload: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece with its part of a payload."""
        at = 0
        for piece in shard:
            size = piece.nbytes(self._buffer.element_size())
            yield piece, payload[at : at + size]
            at += _aligned(size)

    # ------------------------------------------------------------------ arithmetic

    def _pack(self, shard: list[Piece], scale: float, squares: list[float]) -> Tensor:
        """Encode this rank's share of a mean, and keep what is left out."""
        payload = torch.empty(self._payload_bytes(shard), dtype=torch.uint8)
        for piece, body in self._bodies(shard, payload):
            gradient = self._buffer[piece.first : piece.end]
            if piece.codec is None or piece.residual is None:
                body.view(gradient.dtype).copy_(gradient.mul_(scale))
                continue
            values = _share_of(gradient, scale, piece.residual)
            piece.codec.encode(values, out=body)
            squares.append(_keep_rest(values, piece.codec.decode(body, len(values)), piece.residual))
        return payload

    def _summed(self, shard: list[Piece], scale: float, versions: list[Tensor], squares: list[float]) -> Tensor:
        """Add the others' versions of a shard to this rank's, encode the sum, and take what was encoded."""
        payload = torch.empty(self._payload_bytes(shard), dtype=torch.uint8)
        sums = []
        for piece in shard:
            gradient = self._buffer[piece.first : piece.end]
            exact = piece.codec is None or piece.residual is None
            sums.append(gradient.mul_(scale) if exact else _share_of(gradient, scale, piece.residual))
        for version in versions:
            for (piece, body), total in zip(self._bodies(shard, version), sums, strict=True):
                total.add_(body.view(total.dtype) if piece.codec is None else piece.codec.decode(body, len(total)))
        for (piece, body), total in zip(self._bodies(shard, payload), sums, strict=True):
            if piece.codec is None or piece.residual is None:
                body.view(total.dtype).copy_(total)
                continue
            piece.codec.encode(total, out=body)
            decoded = self._decode(piece, body)
            squares.append(_keep_rest(total, decoded, piece.residual))
        return payload

    def _decode(self, piece: Piece, body: Tensor) -> Tensor:
        """Place in the buffer what travelled; returns it."""
        gradient = self._buffer[piece.first : piece.end]
        values = body.view(gradient.dtype) if piece.codec is None else piece.codec.decode(body, len(gradient))
        gradient.copy_(values)
        return values


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, beginning with the next: no two ranks send to the same one first."""
    size, rank = group.size(), group.rank()
    return [(rank + distance) % size for distance in range(1, size)]


def _messages(
    group: dist.ProcessGroup, received: Mapping[int, Tensor], sent: Mapping[int, Tensor], number: int
) -> list[dist.Work]:
    works = [group.recv([payload], rank, number) for rank, payload in received.items()]
    return works + [group.send([sent[rank]], rank, number) for rank in _others(group) if rank in sent]


def _share_of(gradient: Tensor, scale: float, residual: Tensor | None) -> Tensor:
    """A rank's share of the mean, in fp32, with what was left out of it before."""
    values = gradient.float().mul(scale) if gradient.dtype is torch.float32 else gradient.float().mul_(scale)
    return values if residual is None else values.add_(residual)


def _keep_rest(values: Tensor, decoded: Tensor, residual: Tensor) -> float:
    """Make ``residual`` what ``decoded`` lacks of ``values``, which is overwritten; returns the square of its norm.

    Where something is not finite the step is lost, and the residual stays as it was.
    """
    rest = values.sub_(decoded)
    square = float(torch.dot(rest, rest))
    if math.isfinite(square) or bool(torch.isfinite(rest).all()):
        residual.copy_(rest)
    return square if math.isfinite(square) else 0.0


class _Working:
    """Takes down the time that a codec needs, and what it has left out."""

    def __init__(self, compression: GradientCompression, what: str, sub_task: SubCommTask) -> None:
        self._compression = compression
        self._name = f"{what} {sub_task.name}"
        self._step = sub_task.parent.key.step
        self._squares: list[float] = []
        self._profiled = profiled(f"bytescheduler::{self._name}")

    def __enter__(self) -> list[float]:
        self._profiled.__enter__()
        self._start = self._compression.clock()
        return self._squares

    def __exit__(self, *error: object) -> None:
        self._compression.worked(self._name, self._step, self._start, sum(self._squares))
        self._profiled.__exit__(None, None, None)


class GradientCompression:
    """What of one fit's gradients travels encoded on this rank, and what was left out so far.

    Args:
        rules: What is encoded, and how.
        parameters: All that DDP reduces, by name.
        residuals: What was left out so far; kept by the caller.
        statistics: Counters to keep.
        timeline: Where spans go, if anywhere.
        loss_scale: Says what losses are multiplied with at present: residuals are of such gradients.
        clock: Seconds; the core's clock.

    Attributes:
        compressed: Names of the parameters whose gradients travel encoded, and in what.
        ratio: How many times fewer bytes that makes, of all gradients.
    """

    def __init__(
        self,
        rules: CompressionRules,
        parameters: Mapping[str, nn.Parameter],
        residuals: Residuals,
        *,
        statistics: SchedulerStatistics,
        timeline: Timeline | None = None,
        loss_scale: Callable[[], float] = lambda: 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._residuals = residuals
        self._statistics = statistics
        self._timeline = timeline
        self._loss_scale = loss_scale
        self._lock = threading.Lock()  # of the counters, which two threads keep
        codecs = {name: rules.codec_for(name, parameter) for name, parameter in parameters.items()}
        self._codecs = {id(parameters[name]): (name, codec) for name, codec in codecs.items() if codec is not None}
        self.compressed = {name: codec.name for name, codec in self._codecs.values()}
        plain = sent = 0
        for name, parameter in parameters.items():
            codec = codecs[name]
            nbytes = parameter.numel() * parameter.element_size()
            plain += nbytes
            sent += nbytes if codec is None else codec.payload_bytes(parameter.numel())
        self.ratio = plain / sent if sent else 1.0

    def begin_step(self) -> None:
        """A backward pass has its first bucket, and nothing of the last one is under way."""
        self._residuals.scale_to(self._loss_scale())

    def encoded(self, bucket: GradientBucket) -> CompressedBucket | None:
        """See :class:`~lightning_bytescheduler.ddp.reduction.Encoder`."""
        if not any(id(parameter) in self._codecs for parameter in bucket.parameters):
            return None
        buffer = bucket.buffer
        if buffer.is_complex():
            return None
        return CompressedBucket(buffer, list(self._pieces(bucket.parameters)), self)

    def _pieces(self, parameters: Iterable[nn.Parameter]) -> Iterator[Piece]:
        at = 0
        for parameter in parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            residual = None if codec is None else self._residuals.of(name, size)
            yield Piece(at, at + size, codec, residual)
            at += size

    def working(self, what: str, sub_task: SubCommTask) -> _Working:
        """Around what a codec does for a part; collects squares of norms of residuals."""
        return _Working(self, what, sub_task)

    def worked(self, name: str, step: int, start: float, square: float) -> None:
        """A codec has worked since ``start``, and has left out so much."""
        now, statistics = self.clock(), self._statistics
        with self._lock:
            statistics.codec_s += now - start
            statistics.residual_squares += square
        if self._timeline is not None:
            lane = threading.current_thread().name
            self._timeline.span(name, CODEC, start, now, lane=lane, args={"step": step})


class CompressedReduction:
    """Reduce-scatter and all-gather by priority, encoded; an all-reduce of buckets that travel as they are.

    See :class:`~lightning_bytescheduler.ddp.reduction.Reduction`.

    Args:
        core: Sends what becomes ready.
        transport: What a sub-task's start does.
        step: Of the backward pass, the same on all ranks.
        device: Where gradients live.
        compression: Says what travels encoded.
    """

    def __init__(
        self,
        core: ByteCore,
        transport: GradientTransport,
        step: int,
        device: torch.device,
        compression: GradientCompression,
    ) -> None:
        self._tasks = StepTasks(core, transport, step, device)
        self._plain = AllReduction(core, transport, step, device)
        self._compression = compression

    def reduce(self, bucket: GradientBucket, on_end: Callable[[CommTask], None] | None = None) -> CommTask:
        """See ``Reduction``."""
        encoded = self._compression.encoded(bucket)
        if encoded is None:
            return self._plain.reduce(bucket, on_end)
        return self._tasks.enqueue_halves(
            bucket, bucket.buffer, encoded, scatter_priority=bucket.priority, on_end=on_end
        )

    def close(self) -> None:
        """See ``Reduction``."""
