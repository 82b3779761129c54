"""Compressed gradients: ranks send encoded shards to their owners, and owners send encoded sums to all.

Every rank owns a shard of each part of a bucket, as in the sharded reduction (``reduction.py``)::

    scatter   each rank encodes its values of the others' shards, sends them to their owners, and keeps its values of
              its own shard; the owner decodes what it receives and sums in fp32
    gather    the owner encodes the sum once and sends it to all; every rank, the owner too, takes the decoded bytes

So all ranks have the same bits, and any norm is that of the gradient that the optimizer gets.

*Error feedback*: what encoding leaves out is added to the same elements in the next step. With g the gradient times
this rank's weight (1 / ranks if weights are equal), C a codec and r this rank's residual::

    x = g + r,  C(x) travels,  r = x - C(x)                      others' shards
    s = g + r + sum of all C(x),  C(s) travels,  r = s - C(s)    the own shard

One residual per element is enough for both directions, as a rank either owns an element or not. Ownership may change
when buckets are rebuilt or partitions are cut differently. The residual of a sum is then added to the gradient on the
rank that holds it, and the mean is the same whether that is sent or summed. At any time all ranks' residuals and the
applied values add up to the gradients. A parameter that no rank used in a step is not updated, so a rank that did not
use it keeps its residual.

Source: error feedback in both directions: Tang et al., "DoubleSqueeze", ICML 2019. Reduce-scatter and all-gather of
compressed shards: BytePS, and Zhong et al., "Compressed Communication for Distributed Training".

Threads: ``CompressedBucket.scatter`` and ``.gather`` run on the codec thread. What follows them runs on the completion
thread, once everything sent in the same part is encoded. The training thread makes residuals before a bucket is sent,
on a GPU before the event that marks the gradient as complete. Parts do not overlap, so threads share only counters,
which have their own lock.

On a GPU all arithmetic runs where gradients are, and only payloads are copied (``device_streams.py``). Decoding uses
only operations with one correct result, so that different processors get the same bits; matrix products of factors are
the exception.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_bytescheduler.collectives.device_streams import HostPayloads, PayloadCopies
from lightning_bytescheduler.collectives.operations import (
    StartedOperation,
    all_reduce_direct,
    all_reduce_in_shards,
    ending_with,
    others_of,
    scale,
    shard_of,
)
from lightning_bytescheduler.collectives.route import EncodedStart
from lightning_bytescheduler.compression import Compressor
from lightning_bytescheduler.compression.compressor import is_finite
from lightning_bytescheduler.compression.powersgd import Matrix, PowerSGD
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.fit_report import Record
from lightning_bytescheduler.ddp.reduction import EncodedBucket, GradientBucket, Phase, Reduction, Uncompressed
from lightning_bytescheduler.ddp.residuals import Residuals
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import CODEC

__all__ = ["CompressedBucket", "GradientCompression", "LowRankBucket", "Piece", "has_no_gradient"]

_ALIGNED = 8  # bytes, so that a body can be read as numbers


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of a bucket that belong to one parameter.

    Attributes:
        codec: Their codec; ``None`` for uncompressed.
        residual: Flat, fp32, as long as the piece; ``None`` without a codec.
        idle: Whether the parameter has no gradient on this rank. If that holds on all ranks, no optimizer applies what
            is sent, so no residual may be sent with it.
    """

    first: int
    end: int
    codec: Compressor | None
    residual: Tensor | None = None
    idle: bool = False

    def within(self, first: int, end: int) -> Piece | None:
        """Return the part between two positions in the bucket, or ``None``."""
        start, stop = max(first, self.first), min(end, self.end)
        if start >= stop:
            return None
        here = slice(start - self.first, stop - self.first)
        residual = None if self.residual is None else self.residual[here]
        return Piece(start, stop, self.codec, residual, self.idle)

    def nbytes(self, width: int) -> int:
        """Return the bytes on the wire; an uncompressed element takes ``width`` bytes."""
        size = self.end - self.first
        return size * width if self.codec is None else self.codec.payload_bytes(size)

    def encode(self, values: Tensor, *, seed: int, worker: int) -> Tensor:
        """Return the body of the piece, and keep what it leaves out.

        Args:
            values: Its values; in fp32 if it has a codec.
            seed: Random seed, the same on all ranks for this part of a step.
            worker: Number that gives each rank its own random numbers.
        """
        codec, residual = self.codec, self.residual
        if codec is None:
            return values.view(torch.uint8)
        if residual is None or not is_finite(values):  # an overflowed gradient is lost, and the residual stays
            return codec.compress(values, seed=seed + self.first, worker=worker)
        left = torch.zeros_like(residual) if self.idle else residual
        body = codec.compress_with(left, values, seed=seed + self.first, worker=worker)
        if self.idle:
            residual.add_(left)
        return body


class CompressedBucket:
    """One bucket in one step, which travels encoded, part by part, to the owners of its shards and back.

    A bucket consists of *pieces*: neighbouring elements of one parameter, each encoded by that parameter's codec. A
    *payload* is the encoded bodies of pieces, each beginning at a multiple of eight bytes. Ranks all know the pieces,
    so nothing else is sent between them.

    Args:
        pieces: One piece for each whole parameter.
        observer: Times the codecs' work, and copies payloads between ``buffer``'s device and host memory.
        weight: This rank's weight, known before anything is sent; residuals hold gradients times its factor.
    """

    def __init__(self, buffer: Tensor, pieces: list[Piece], observer: GradientCompression, weight: StepWeight) -> None:
        self._copies = observer.copies
        self._buffer = buffer
        self._width = buffer.element_size()
        self._pieces = pieces
        self._observer = observer
        self._weight = weight
        self._sums: dict[int, Tensor] = {}  # by index of the part: this rank's encoded shard

    def reduce(self, reduction: Reduction, bucket: GradientBucket, **scattered: Any) -> CommTask:
        """See ``EncodedBucket``."""
        route, buffer = reduction.route, self._buffer
        to_owners, to_all = (partial(route.launch_encoded, start) for start in (self.scatter, self.gather))
        return reduction.in_halves(bucket, buffer, to_owners, to_all, route.mark(), **scattered)

    def scatter(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Send a part's shards to their owners, and sum this rank's shard; an ``EncodedStart``."""
        rank, seed = group.rank(), _seed(sub_task)
        with self._observer.working("encode", sub_task), self._copies.working():
            shards = self._shards(group, sub_task)
            scale(self._buffer[sub_task.offset : sub_task.offset + sub_task.size], self._weight.factor)
            sent = {
                other: self._copies.to_host(self._packed(shard, self._values(shard), seed, rank))
                for other, shard in shards.items()
                if other != rank
            }
        own = shards.get(rank, [])

        def add_up(received: dict[int, Tensor]) -> None:
            if own:
                with self._observer.working("reduce", sub_task), self._copies.working():
                    sums = self._values(own)
                    for payload in received.values():
                        self._add(own, self._copies.to_device(payload), sums)
                    packed = self._packed(own, sums, seed, rank, place=True)
                    self._sums[sub_task.index] = self._copies.to_host(packed)

        senders = dict.fromkeys(others_of(group), own) if own else {}
        return self._messages(group, sub_task, senders, sent, number, add_up)

    def gather(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Send this rank's summed shard of a part to all ranks and receive theirs; an ``EncodedStart``."""
        shards = self._shards(group, sub_task)
        payload = self._sums.pop(sub_task.index, None)
        sent = {} if payload is None else dict.fromkeys(others_of(group), payload)

        def place(received: dict[int, Tensor]) -> None:
            with self._observer.working("decode", sub_task), self._copies.working():
                for rank, payload in received.items():
                    for piece, body in self._bodies(shards[rank], self._copies.to_device(payload)):
                        self._place(piece, body)

        senders = {rank: shards[rank] for rank in others_of(group) if rank in shards}
        return self._messages(group, sub_task, senders, sent, number, place)

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
        """Exchange payloads, then call ``then`` with those of ``senders``."""
        sub_task.encoded_bytes = (sub_task.encoded_bytes or 0) + sum(len(payload) for payload in sent.values())
        received = {rank: self._copies.memory(self._payload_bytes(shard)) for rank, shard in senders.items()}
        works = [group.recv([payload], rank, number) for rank, payload in received.items()]
        works += [group.send([sent[rank]], rank, number) for rank in others_of(group) if rank in sent]
        return StartedOperation(works, partial(then, received), messages=True)

    def _shards(self, group: dist.ProcessGroup, sub_task: SubCommTask) -> dict[int, list[Piece]]:
        shards = {}
        for rank in range(group.size()):
            first, end = (sub_task.offset + edge for edge in shard_of(sub_task.size, rank, group.size()))
            if first < end:
                found = (piece.within(first, end) for piece in self._pieces)
                shards[rank] = [piece for piece in found if piece is not None]
        return shards

    def _payload_bytes(self, shard: Sequence[Piece]) -> int:
        return sum(_aligned(piece.nbytes(self._width)) for piece in shard)

    def _bodies(self, shard: Sequence[Piece], payload: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece with its part of a payload."""
        at = 0
        for piece in shard:
            size = piece.nbytes(self._width)
            yield piece, payload[at : at + size]
            at += _aligned(size)

    # ------------------------------------------------------------------ arithmetic

    def _values(self, shard: list[Piece]) -> list[Tensor]:
        """Return this rank's values of a shard: views of the buffer, or fp32 copies for a codec."""
        parts = [(piece, self._buffer[piece.first : piece.end]) for piece in shard]
        return [part if piece.codec is None else part.float() for piece, part in parts]

    def _packed(
        self,
        shard: list[Piece],
        values: list[Tensor],
        seed: int,
        worker: int,
        *,
        place: bool = False,
    ) -> Tensor:
        """Encode a shard and keep its residual; with ``place``, write the decoded values into the buffer."""
        bodies = []
        for piece, part in zip(shard, values, strict=True):
            bodies.append(piece.encode(part, seed=seed, worker=worker))
            if place:  # decode the bytes that travel, as all other ranks do
                self._place(piece, bodies[-1])
        size = self._payload_bytes(shard)
        if len(bodies) == 1 and shard[0].codec is not None and size == len(bodies[0]):
            return bodies[0]
        at, payload = 0, bodies[0].new_empty(size)
        for body in bodies:
            payload[at : at + len(body)] = body
            at += _aligned(len(body))
        return payload

    def _add(self, shard: list[Piece], payload: Tensor, sums: list[Tensor]) -> None:
        for (piece, body), total in zip(self._bodies(shard, payload), sums, strict=True):
            if piece.codec is None:
                total.add_(body.view(total.dtype))
            else:
                piece.codec.add(body, total)

    def _place(self, piece: Piece, body: Tensor) -> None:
        gradient = self._buffer[piece.first : piece.end]
        if piece.codec is None:
            gradient.copy_(body.view(gradient.dtype))
        elif gradient.dtype is torch.float32:
            piece.codec.decompress(body, len(gradient), out=gradient)
        else:
            gradient.copy_(piece.codec.decompress(body, len(gradient)))


def _aligned(size: int) -> int:
    """Round up to a multiple of the alignment of bodies."""
    return -(-size // _ALIGNED) * _ALIGNED


def _seed(sub_task: SubCommTask) -> int:
    """Return a random seed: equal on all ranks and in both directions, different for each part and step."""
    key = sub_task.parent.key
    names = f"{key.step} {key.bucket} {sub_task.index}".encode()
    return int.from_bytes(hashlib.blake2b(names, digest_size=7).digest(), "little")


_DIRECT = 1 << 15  # bytes that a rank may send in addition to save a round of messages of 1 to 2 ms


class LowRankBucket:
    """The matrices of one bucket in one step, reduced as products of two thin matrices P and Q.

    The sum of all P takes along the rest of the bucket, which travels as it is: biases, and small or flat parameters.
    Both sums are tasks with the bucket's priority. The scheduler cuts and orders them like others, so urgent layers'
    factors pass those of others, and the second sum travels during the next forward pass.

    Why the ranks agree: as in ``reduction.py``. A rank's right task (Q) waits for its left task (P). Rank 0 launches Q
    when P has ended there, so P comes first in the order of all ranks. Each rank orthonormalises and multiplies P
    itself. The bits are equal as long as processors are of one kind and torch uses them alike, which is checked at the
    start (``CompressionRules.facts``).

    On a GPU the arithmetic runs where gradients are, and only what travels is copied to host memory and back
    (``device_streams.py``).

    Threads: :meth:`left` and :meth:`right` run on the codec thread. :meth:`place` runs on the thread that sees the last
    part of the right task arrive, before the task ends, so an error in it fails the task.

    Args:
        buffer: The flat gradient, which is filled with the mean.
        rest: Places of the other parameters in it.
        observer: Times the codec's work, and copies what travels between ``buffer``'s device and host memory.
        weight: This rank's weight, known before anything is sent.
    """

    def __init__(
        self,
        buffer: Tensor,
        matrices: Sequence[Matrix],
        rest: Sequence[slice],
        observer: GradientCompression,
        weight: StepWeight,
    ) -> None:
        self._buffer = buffer
        self._rest = [buffer[place] for place in rest]
        self._copies = observer.copies
        self._weight = weight
        self._observer = observer
        rows = [matrix.shape[0] * matrix.right.shape[1] for matrix in matrices]
        columns = [matrix.shape[1] * matrix.right.shape[1] for matrix in matrices]
        self._lefts = torch.empty(sum(rows), dtype=torch.float32, device=buffer.device)
        self._rights = torch.empty(sum(columns), dtype=torch.float32, device=buffer.device)
        self._factors = list(zip(matrices, self._lefts.split(rows), self._rights.split(columns), strict=True))
        # In host memory, once they are encoded.
        self._sent_left = self._sent_right = torch.empty(0, dtype=torch.float32, device="cpu")
        self._lock = threading.Lock()
        self._missing = len(self._rights)  # elements of the right task that have not arrived

    def reduce(self, reduction: Reduction, bucket: GradientBucket, **_: Any) -> CommTask:
        """See ``EncodedBucket``; it has no shards."""
        ready, launch, share = reduction.route.mark(), reduction.route.launch_encoded, reduction.world_size - 1
        # Unencoded, the bucket would travel once to its owners and once to all.
        half = share / reduction.world_size * self._buffer.nbytes

        def ended(left: CommTask) -> None:
            # If it failed, the core stops, and all waits end.
            if left.error is None:
                right.notify_ready()

        def enqueue(name: str, phase: Phase, size: int, start: EncodedStart, **more: Any) -> CommTask:
            return reduction.enqueue(
                bucket, size, partial(launch, start), name=name, phase=phase, wire_bytes=half / size, **more
            )

        beside = sum(map(len, self._rest))
        left = enqueue(" left", Phase.LEFT, len(self._lefts) + beside, self.left, on_end=ended)
        right = enqueue(" right", Phase.RIGHT, len(self._rights), self.right)
        reduction.notify_ready(left, ready)
        return right

    def left(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Sum a part of all P and of the rest over the ranks; an ``EncodedStart``."""
        if not len(self._sent_left):
            with self._observer.working("encode", sub_task), self._copies.working():
                for matrix, left, _ in self._factors:
                    matrix.begin(self._buffer, self._weight.factor, left)
                message = torch.cat([self._lefts, *self._rest])  # in the wider type of both
                scale(message[len(self._lefts) :], self._weight.factor)
                self._sent_left = self._copies.to_host(message)
        return _sum(group, self._sent_left, sub_task, number)

    def right(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Sum a part of all Q over the ranks; an ``EncodedStart``, after all of :meth:`left`."""
        if not len(self._sent_right):
            with self._observer.working("reduce", sub_task), self._copies.working():
                lefts, *rest = self._copies.to_device(self._sent_left).split([len(self._lefts), *map(len, self._rest)])
                self._lefts.copy_(lefts)
                for place, mean in zip(self._rest, rest, strict=True):
                    place.copy_(mean)
                for matrix, left, right in self._factors:
                    matrix.go_on(left, right)
                self._sent_right = self._copies.to_host(self._rights)
        summed = _sum(group, self._sent_right, sub_task, number)
        return ending_with(summed, partial(self.place, sub_task, group.size()))

    def place(self, part: SubCommTask, ranks: int) -> None:
        """Write the means of matrices into the buffer, once the last part of :meth:`right` has arrived."""
        with self._lock:
            self._missing -= part.size
            if self._missing:
                return
        with self._observer.working("decode", part), self._copies.working():
            self._copies.bring_back(self._sent_right, self._rights)
            for matrix, left, right in self._factors:
                matrix.end_with(self._buffer, ranks, left, right)


def _sum(group: dist.ProcessGroup, values: Tensor, sub_task: SubCommTask, number: int) -> StartedOperation:
    """Sum a part over all ranks by messages that are matched by their number.

    It takes two rounds of messages, or one round if that sends hardly more, as on two ranks. All ranks know the sizes
    on which this depends.
    """
    part = values[sub_task.offset : sub_task.offset + sub_task.size]
    width, others = values.element_size(), group.size() - 1
    first, end = shard_of(sub_task.size, group.rank(), group.size())
    in_shards = (sub_task.size - (end - first) + others * (end - first)) * width
    direct = others * sub_task.size * width
    if direct * (1 - 2 / group.size()) <= _DIRECT:
        sub_task.encoded_bytes = direct
        return all_reduce_direct(group, part, number, 1.0)
    sub_task.encoded_bytes = in_shards
    return all_reduce_in_shards(group, part, number, 1.0)


class GradientCompression(Uncompressed):
    """The compression of one fit's gradients on this rank, with their residuals.

    Args:
        record: Takes the measurements.
        loss_scale: Returns the current factor of losses, which residuals also contain.
        idle: Whether a parameter has got no gradient in this step on this rank; asked when its bucket is ready.

    Attributes:
        ratio: How many times fewer bytes travel for all gradients together, as far as that does not depend on their
            values.
        copies: Copies payloads between the device where gradients are encoded and host memory.
    """

    def __init__(
        self,
        rules: CompressionRules,
        parameters: Mapping[str, nn.Parameter],
        *,
        record: Record,
        loss_scale: Callable[[], float] = lambda: 1.0,
        idle: Callable[[nn.Parameter], bool] = lambda parameter: False,
    ) -> None:
        self._idle = idle
        self._record = record
        self._loss_scale = loss_scale
        self.copies = HostPayloads()
        self._lock = threading.Lock()  # guards the counters, which two threads update
        codecs = {name: rules.codec_for(name, parameter) for name, parameter in parameters.items()}
        known = {name: codec for name, codec in codecs.items() if codec is not None}
        self._codecs = {id(parameters[name]): (name, codec) for name, codec in known.items()}
        self._in_factors = rules.whole_matrices  # then no other codec
        self.compressed = {name: codec.spec for name, codec in known.items()}
        self.ratio = rules.ratio(parameters)
        self.residuals = Residuals()

    def work_on(self, copies: PayloadCopies) -> None:
        """Encode where gradients are, from which ``copies`` copies payloads; before the first step."""
        self.copies = copies
        self.residuals.live_on(copies.device)

    def begin_step(self) -> None:
        """See ``Uncompressed``."""
        self.residuals.scale_to(self._loss_scale())

    def encoded(self, bucket: GradientBucket, weight: StepWeight) -> EncodedBucket | None:
        """See ``Uncompressed``."""
        if not any(id(parameter) in self._codecs for parameter in bucket.parameters):
            return None
        if self._in_factors:
            return LowRankBucket(bucket.buffer, *self._matrices(bucket.parameters), self, weight)
        return CompressedBucket(bucket.buffer, list(self._pieces(bucket.parameters)), self, weight)

    def _matrices(self, parameters: Iterable[nn.Parameter]) -> tuple[list[Matrix], list[slice]]:
        """Return a bucket's matrices, and the places of what is beside them."""
        matrices, rest = [], []
        at = 0
        for parameter in parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            if isinstance(codec, PowerSGD) and (shape := codec.shape_of(parameter)) is not None:
                right, residual = self.residuals.right_of(name, shape[1], codec), self.residuals.of(name, size)
                if self._idle(parameter):
                    matrices.append(Matrix(at, shape, torch.zeros_like(residual), right, later=residual))
                else:
                    matrices.append(Matrix(at, shape, residual, right))
            else:
                rest.append(slice(at, at + size))
            at += size
        return matrices, rest

    def _pieces(self, parameters: Iterable[nn.Parameter]) -> Iterator[Piece]:
        at = 0
        for parameter in parameters:
            with torch._C.DisableTorchFunctionSubclass():
                size = parameter.numel()
            name, codec = self._codecs.get(id(parameter), ("", None))
            if isinstance(codec, Compressor):
                yield Piece(at, at + size, codec, self.residuals.of(name, size), self._idle(parameter))
            else:
                yield Piece(at, at + size, None)
            at += size

    @contextmanager
    def working(self, what: str, sub_task: SubCommTask) -> Iterator[None]:
        """Time a codec's work for a part."""
        record = self._record
        start = record.clock()
        try:
            yield
        finally:
            now = record.span(f"{what} {sub_task.name}", CODEC, start, step=sub_task.parent.key.step)
            with self._lock:
                record.statistics.codec_s += now - start


def has_no_gradient(parameter: nn.Parameter) -> bool:
    """Whether a parameter was not used in the forward passes of this step on this rank."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad is None
