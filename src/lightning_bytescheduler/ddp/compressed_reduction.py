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

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bytescheduler.collectives.operations import StartedOperation, shard_of
from lightning_bytescheduler.collectives.transport import GradientTransport
from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.compression.powersgd import PowerSGD
from lightning_bytescheduler.ddp.compression_choice import CompressionChoice
from lightning_bytescheduler.ddp.compression_rules import AUTO, CompressionRules
from lightning_bytescheduler.ddp.low_rank_reduction import LowRankBucket, LowRankReduction, Matrix, Rest, matrix_shape
from lightning_bytescheduler.ddp.reduction import AllReduction, GradientBucket, Phase, StepTasks
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics, profiled
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import CODEC, Timeline

__all__ = ["CompressedBucket", "CompressedReduction", "GradientCompression"]

_ALIGNED = 8  # bytes: each piece of a payload begins at a multiple, so that it can be read as numbers
_SIZES = 1 << 29  # added to an operation's number: tells sizes of payloads from payloads
_SECOND_HALVES = 1 << 28  # added to an operation's number: tells sums from what they are made of
_CHUNKS, _CHUNK = 16, 1024  # of a part, in elements: its sample
_LENGTH = 8  # bytes of one


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of a bucket that travel alike: those of one parameter.

    Attributes:
        first: Position in the bucket.
        end: Position after the last.
        codec: What they travel in; ``None`` for as they are.
        residual: Flat, in fp32, as long as the piece; ``None`` where nothing is left out, or was so far.
        before: Is filled with the residual as it was before the step, if that may have to be taken back.
        name: The parameter's.
    """

    first: int
    end: int
    codec: Compressor | None
    residual: Tensor | None
    before: Tensor | None = None
    name: str = ""

    def within(self, first: int, end: int) -> Piece | None:
        """The part of it between two positions in the bucket, or ``None``."""
        start, stop = max(first, self.first), min(end, self.end)
        if start >= stop:
            return None
        here = slice(start - self.first, stop - self.first)
        residual = None if self.residual is None else self.residual[here]
        before = None if self.before is None else self.before[here]
        return Piece(start, stop, self.codec, residual, before, self.name)

    def nbytes(self, width: int) -> int | None:
        """What it takes on the wire, where an element as it is takes ``width`` bytes; ``None`` if that depends."""
        size = self.end - self.first
        if self.codec is None:
            return size * width
        return None if self.codec.exact else self.codec.payload_bytes(size)


class CompressedBucket:
    """One bucket in one step; see the module and :class:`~lightning_bytescheduler.ddp.reduction.EncodedBucket`.

    Args:
        buffer: The flat gradient; is filled with the mean.
        pieces: All of it, in order.
        observer: Told of work and of residuals.
        choice: Says in what each part travels, where that is not settled.
    """

    def __init__(
        self,
        buffer: Tensor,
        pieces: list[Piece],
        observer: GradientCompression,
        choice: CompressionChoice | None = None,
    ) -> None:
        self._buffer = buffer
        self._pieces = pieces
        self._observer = observer
        self._choice = choice
        self._forms: dict[int, int] = {}  # by index of the part: what its first half was chosen to travel in
        self._sums: dict[int, Tensor] = {}  # by index of the part: this rank's encoded shard

    # ------------------------------------------------------------------ in what parts travel

    @property
    def has_choice(self) -> bool:
        """See ``EncodedBucket``."""
        return self._choice is not None

    def choose(self, sub_task: SubCommTask) -> int:
        """See ``PartForms``."""
        if self._choice is None:
            return 0
        given = self._forms.pop(sub_task.index, None)
        width = self._buffer.element_size()
        form = self._choice.choose(self, sub_task, width=width, given=given)
        if given is None and sub_task.parent.key.phase == Phase.REDUCE:
            self._forms[sub_task.index] = form
        return form

    def charge(self, sub_task: SubCommTask, form: int) -> int:
        """See ``PartForms``."""
        return sub_task.size if self._choice is None else self._choice.charge(sub_task.size, form)

    def sample(self, sub_task: SubCommTask) -> tuple[Tensor, Tensor] | None:
        """See :class:`~lightning_bytescheduler.ddp.compression_choice.Sampled`."""
        pieces = [piece for piece in self._as_known(sub_task) if piece.codec is not None]
        if not pieces:
            return None
        apart = max(sum(piece.end - piece.first for piece in pieces) // _CHUNKS, _CHUNK)
        gradients, sent = [], []
        for piece in pieces:
            for first in range(piece.first, piece.end, apart):
                chunk = piece.within(first, first + _CHUNK)
                if chunk is not None:
                    gradients.append(self._buffer[chunk.first : chunk.end].float() / self._observer.ranks)
                    sent.append(gradients[-1] if chunk.residual is None else gradients[-1] + chunk.residual)
        return torch.cat(gradients), torch.cat(sent)

    def add_left(self, sub_task: SubCommTask, world_size: int) -> None:
        """See ``EncodedBucket``. Where nothing was ever left, the gradient keeps its bits."""
        for piece in self._as_known(sub_task):
            gradient = self._buffer[piece.first : piece.end]
            if piece.residual is not None:
                if piece.before is not None:
                    piece.before.copy_(piece.residual)
                if _is_finite(gradient):
                    gradient.add_(piece.residual, alpha=world_size)  # which is divided by that like the gradient
                    piece.residual.zero_()

    def _as_known(self, sub_task: SubCommTask) -> list[Piece]:
        """Pieces of a part, with their residuals if they have any."""
        edges = sub_task.offset, sub_task.offset + sub_task.size
        whole = [piece for piece in self._pieces if piece.within(*edges) is not None]
        found = (self._observer.with_residual(piece, make=False).within(*edges) for piece in whole)
        return [piece for piece in found if piece is not None]

    def _within(self, first: int, end: int) -> list[Piece]:
        found = (piece.within(first, end) for piece in self._pieces)
        return [piece for piece in found if piece is not None]

    def reduce(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """See ``EncodedBucket``."""
        scattered = self.scatter(group, sub_task, number)

        def then() -> StartedOperation | None:
            following = None if scattered.finish is None else scattered.finish()
            if following is not None:
                raise RuntimeError(f"{sub_task.name} is to travel in a form whose size depends on what is in it.")
            return replace(self.gather(group, sub_task, _SECOND_HALVES + number), closing=True)

        return replace(scattered, finish=then)

    def scatter(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """See ``EncodedBucket``."""
        self._keep_before(sub_task)
        shards, rank, seed = self._shards(group, sub_task), group.rank(), _seed(sub_task)
        with self._observer.working("encode", sub_task) as squares:
            for shard in shards.values():
                for piece in shard:
                    self._buffer[piece.first : piece.end].mul_(1.0 / group.size())
            sent = {
                other: self._packed(shard, self._values(shard), seed, rank, squares)
                for other, shard in shards.items()
                if other != rank
            }
        own = shards.get(rank, [])

        def add_up(received: dict[int, Tensor]) -> None:
            if own:
                with self._observer.working("reduce", sub_task) as squares:
                    sums = self._values(own)
                    for payload in received.values():
                        self._add(own, payload, sums)
                    self._sums[sub_task.index] = payload = self._packed(own, sums, seed, rank, squares)
                    self._place(own, payload)

        senders = dict.fromkeys(_others(group), own) if own else {}
        return self._messages(group, sub_task, senders, sent, number, add_up)

    def gather(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """See ``EncodedBucket``."""
        shards = self._shards(group, sub_task)
        payload = self._sums.pop(sub_task.index, None)
        sent = {} if payload is None else dict.fromkeys(_others(group), payload)

        def place(received: dict[int, Tensor]) -> None:
            with self._observer.working("decode", sub_task):
                for rank, payload in received.items():
                    self._place(shards[rank], payload)

        senders = {rank: shards[rank] for rank in _others(group) if rank in shards}
        return self._messages(group, sub_task, senders, sent, number, place)

    def _keep_before(self, sub_task: SubCommTask) -> None:
        """See that all pieces of a part have their residuals, and can have them back if the step is left out."""
        edges = sub_task.offset, sub_task.offset + sub_task.size
        for at, piece in enumerate(self._pieces):
            if piece.within(*edges) is not None:
                self._pieces[at] = piece = self._observer.with_residual(piece)
                inside = piece.within(*edges)
                if inside is not None and inside.before is not None and inside.residual is not None:
                    inside.before.copy_(inside.residual)

    # ------------------------------------------------------------------ messages

    def _messages(
        self,
        group: dist.ProcessGroup,
        sub_task: SubCommTask,
        senders: dict[int, list[Piece]],
        sent: dict[int, Tensor],
        number: int,
        then: Callable[[dict[int, Tensor]], None],
    ) -> StartedOperation:
        """Exchange payloads, then call ``then`` with those of ``senders``.

        Where a payload's size depends on what is in it, sizes travel first.
        """
        sub_task.encoded_bytes = (sub_task.encoded_bytes or 0) + sum(len(payload) for payload in sent.values())
        sizes = {rank: self._payload_bytes(shard) for rank, shard in senders.items()}
        depends = any(piece.nbytes(1) is None for piece in self._pieces)
        known = {rank: torch.tensor([size or 0]) for rank, size in sizes.items()}

        def exchange() -> StartedOperation:
            received = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in known.items()}
            return StartedOperation(_works(group, received, sent, number), partial(then, received), messages=True)

        if not depends:
            return exchange()
        own = {rank: torch.tensor([len(payload)]) for rank, payload in sent.items()}
        return StartedOperation(_works(group, known, own, _SIZES + number), exchange, messages=True)

    def _payload_bytes(self, shard: list[Piece]) -> int | None:
        """Size of a shard's payload; ``None`` if that depends on what is in it."""
        sizes = [piece.nbytes(self._buffer.element_size()) for piece in shard]
        known = [size for size in sizes if size is not None]
        return None if len(known) < len(sizes) else sum(map(_aligned, known))

    def _shards(self, group: dist.ProcessGroup, sub_task: SubCommTask) -> dict[int, list[Piece]]:
        """Pieces of a part by owner; ranks that own none of it are left out."""
        shards = {}
        for rank in range(group.size()):
            first, end = (sub_task.offset + edge for edge in shard_of(sub_task.size, rank, group.size()))
            if first < end:
                shards[rank] = self._within(first, end)
                if self._choice is not None:
                    codec = self._choice.codec(sub_task.form)
                    shards[rank] = [p if p.codec is None else replace(p, codec=codec) for p in shards[rank]]
        return shards

    def _bodies(self, shard: list[Piece], payload: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece with its part of a payload."""
        sizes = [piece.nbytes(self._buffer.element_size()) for piece in shard]
        at = 0
        if None in sizes:
            at = _LENGTH * len(shard)
            sizes = payload[:at].view(torch.int64).tolist()
        for piece, size in zip(shard, sizes, strict=True):
            if size is not None:
                yield piece, payload[at : at + size]
                at += _aligned(size)

    # ------------------------------------------------------------------ arithmetic

    def _values(self, shard: list[Piece]) -> list[Tensor]:
        """This rank's numbers of a shard: where they are, or in fp32 where that is what a codec takes."""
        parts = [(piece, self._buffer[piece.first : piece.end]) for piece in shard]
        return [part if piece.residual is None else part.float() for piece, part in parts]

    def _packed(self, shard: list[Piece], values: list[Tensor], seed: int, worker: int, squares: list[float]) -> Tensor:
        """Encode a shard, and keep what is left out."""
        bodies = []
        for piece, part in zip(shard, values, strict=True):
            codec, residual = piece.codec, piece.residual
            if codec is None:
                bodies.append(part.view(torch.uint8))
            elif residual is None or not _is_finite(part):  # what overflows is lost, and the residual stays
                bodies.append(codec.compress(part, seed=seed + piece.first, worker=worker))
            else:
                bodies.append(codec.compress_with(residual, part, seed=seed + piece.first, worker=worker))
                squares.append(float(torch.dot(residual, residual)))
        lengths = torch.tensor([len(body) for body in bodies]).view(torch.uint8)
        at = 0 if self._payload_bytes(shard) is not None else len(lengths)
        payload = torch.empty(at + sum(_aligned(len(body)) for body in bodies), dtype=torch.uint8)
        payload[:at] = lengths[:at]
        for body in bodies:
            payload[at : at + len(body)] = body
            at += _aligned(len(body))
        return payload

    def _add(self, shard: list[Piece], payload: Tensor, sums: list[Tensor]) -> None:
        for (piece, body), total in zip(self._bodies(shard, payload), sums, strict=True):
            if piece.codec is None:
                total.add_(body.view(total.dtype))
            elif piece.residual is None:
                total.add_(piece.codec.decompress(body, len(total)))
            else:
                piece.codec.add(body, total)

    def _place(self, shard: list[Piece], payload: Tensor) -> None:
        """Put into the buffer what travelled."""
        for piece, body in self._bodies(shard, payload):
            gradient = self._buffer[piece.first : piece.end]
            if piece.codec is None:
                gradient.copy_(body.view(gradient.dtype))
            elif gradient.dtype is torch.float32:
                piece.codec.decompress(body, len(gradient), out=gradient)
            else:
                gradient.copy_(piece.codec.decompress(body, len(gradient)))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _seed(sub_task: SubCommTask) -> int:
    """Of random numbers: the same on all ranks and in both directions, another one for each part and step."""
    key = sub_task.parent.key
    names = f"{key.step} {key.bucket} {sub_task.index}".encode()
    return int.from_bytes(hashlib.blake2b(names, digest_size=7).digest(), "little")


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, beginning with the next: no two ranks send to the same one first."""
    size, rank = group.size(), group.rank()
    return [(rank + distance) % size for distance in range(1, size)]


def _works(
    group: dist.ProcessGroup, received: Mapping[int, Tensor], sent: Mapping[int, Tensor], number: int
) -> list[dist.Work]:
    works = [group.recv([payload], rank, number) for rank, payload in received.items()]
    return works + [group.send([sent[rank]], rank, number) for rank in _others(group) if rank in sent]


def _is_finite(part: Tensor) -> bool:
    """Whether all numbers are; looked at one by one only if their squares overflow."""
    return math.isfinite(torch.dot(part, part)) or bool(torch.isfinite(part).all())


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
        loss_scale: Says what losses are multiplied with at present: residuals are of such gradients. ``None`` if that
            never changes.
        ranks: How many there are.
        decides: Whether this rank chooses for all, where there is a choice.
        clock: Seconds; the core's clock.

    Attributes:
        choice: What that is left to, if it is.
        compressed: Names of the parameters whose gradients travel encoded, and in what.
        ratio: How many times fewer bytes that makes, of all gradients, as far as it does not depend on what they are.
    """

    def __init__(
        self,
        rules: CompressionRules,
        parameters: Mapping[str, nn.Parameter],
        residuals: Residuals,
        *,
        statistics: SchedulerStatistics,
        timeline: Timeline | None = None,
        loss_scale: Callable[[], float | None] = lambda: None,
        ranks: int = 1,
        decides: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.ranks = ranks
        self.choice: CompressionChoice | None = None
        if rules.choices:
            self.choice = CompressionChoice(rules.choices, rules.max_error, decides=decides, clock=clock)
        self._residuals = residuals
        self._statistics = statistics
        self._timeline = timeline
        self._loss_scale = loss_scale
        self._lock = threading.Lock()  # of the counters, which two threads keep
        codecs = {name: rules.codec_for(name, parameter) for name, parameter in parameters.items()}
        self._codecs = {id(parameters[name]): (name, codec) for name, codec in codecs.items() if codec is not None}
        self.compressed = {name: codec.spec if self.choice is None else AUTO for name, codec in self._codecs.values()}
        self.ratio = rules.ratio(parameters)

    def begin_step(self, kind: str = "", *, halves: bool = False) -> None:
        """A backward pass has its first bucket, and nothing of the last one is under way.

        Args:
            kind: Of the step.
            halves: Whether its gradients are reduced in shards.
        """
        if self.choice is not None:
            self.choice.begin_step(kind, halves=halves)
        self._residuals.begin_step(self._loss_scale())

    def encoded(self, bucket: GradientBucket) -> CompressedBucket | None:
        """See :class:`~lightning_bytescheduler.ddp.reduction.Encoder`."""
        codecs = (self._codecs.get(id(parameter), ("", None))[1] for parameter in bucket.parameters)
        if self.choice is None and all(codec is None or isinstance(codec, PowerSGD) for codec in codecs):
            return None
        buffer = bucket.buffer
        if buffer.is_complex():
            return None
        return CompressedBucket(buffer, list(self._pieces(bucket.parameters)), self, self.choice)

    def with_residual(self, piece: Piece, *, make: bool = True) -> Piece:
        """The piece of a whole parameter, with what was left to be sent of it; on the thread that sends it.

        Args:
            piece: Of the parameter.
            make: Begin a residual if there is none yet; else nothing was ever left.
        """
        size = piece.end - piece.first
        if piece.codec is None or piece.codec.exact or not (make or self._residuals.knows(piece.name)):
            return piece
        residual, before = self._residuals.to_change(piece.name, size)
        return replace(piece, residual=residual, before=before)

    def in_factors(self, bucket: GradientBucket, ranks: int) -> tuple[LowRankBucket, Rest] | None:
        """The matrices of a bucket that travel as factors, for one step, and all else of it; ``None`` without any."""
        matrices, others = [], []
        at = 0
        for parameter in bucket.parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            shape = matrix_shape(parameter, codec.rank) if isinstance(codec, PowerSGD) else None
            if shape is None or not isinstance(codec, PowerSGD):
                others.append((parameter, at, at + size))
            else:
                right = self._residuals.right_of(name, shape[1], codec.rank)
                matrices.append(Matrix(at, shape, self._residuals.of(name, size), right))
            at += size
        if not matrices:
            return None
        return LowRankBucket(bucket.buffer, matrices, ranks, self), Rest(bucket.buffer, others)

    def _pieces(self, parameters: Iterable[nn.Parameter]) -> Iterator[Piece]:
        at = 0
        for parameter in parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            codec = None if isinstance(codec, PowerSGD) else codec  # a part of a matrix travels as it is
            piece = Piece(at, at + size, codec, None, name=name)
            yield self.with_residual(piece, make=self.choice is None)
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
        self._factors = LowRankReduction(self._tasks, self.reduce)

    def reduce(self, bucket: GradientBucket, on_end: Callable[[CommTask], None] | None = None) -> CommTask:
        """See ``Reduction``."""
        in_factors = self._compression.in_factors(bucket, self._tasks.world_size)
        if in_factors is not None:
            return self._factors.reduce(bucket, *in_factors, on_end)
        encoded = self._compression.encoded(bucket)
        if encoded is None:
            return self._plain.reduce(bucket, on_end)
        return self._tasks.enqueue_halves(
            bucket, bucket.buffer, encoded, scatter_priority=bucket.priority, on_end=on_end
        )

    def close(self) -> None:
        """See ``Reduction``."""
