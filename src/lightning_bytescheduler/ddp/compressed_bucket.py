"""One bucket of one step that travels encoded, part by part, to the owners of its shards and back.

A bucket consists of *pieces*: neighbouring elements of one parameter, each encoded by that parameter's codec. A
*payload* is the encoded bodies of pieces, each beginning at a multiple of eight bytes. Ranks all know the pieces, so
nothing else is sent between them. ``compressed_reduction.py`` says what is left out, and on which threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.host_copies import HostPayloads
from lightning_bytescheduler.collectives.operations import StartedOperation, others_of, scale, shard_of
from lightning_bytescheduler.compression import Compressor
from lightning_bytescheduler.compression.compressor import is_finite
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.task import SubCommTask

__all__ = ["CompressedBucket", "Piece", "WorkObserver"]

_ALIGNED = 8  # bytes, so that a body can be read as numbers
_WIDTH = 4  # bytes of an element of a residual


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of a bucket that belong to one parameter.

    Attributes:
        codec: Their codec; ``None`` for uncompressed.
        residual: Flat, fp32, as long as the piece; ``None`` if nothing was left out so far.
        before: Receives a copy of the residual at the beginning of the step, if it may have to be restored.
        idle: Whether the parameter has no gradient on this rank. If that holds on all ranks, no optimizer applies what
            is sent, so no residual may be sent with it.
    """

    first: int
    end: int
    codec: Compressor | None
    residual: Tensor | None = None
    before: Tensor | None = None
    name: str = ""
    idle: bool = False

    def within(self, first: int, end: int) -> Piece | None:
        """Return the part between two positions in the bucket, or ``None``."""
        start, stop = max(first, self.first), min(end, self.end)
        if start >= stop:
            return None
        here = slice(start - self.first, stop - self.first)
        residual = None if self.residual is None else self.residual[here]
        before = None if self.before is None else self.before[here]
        return Piece(start, stop, self.codec, residual, before, self.name, self.idle)

    def nbytes(self, width: int) -> int:
        """Return the bytes on the wire; an uncompressed element takes ``width`` bytes."""
        size = self.end - self.first
        return size * width if self.codec is None else self.codec.payload_bytes(size)

    def encode(self, values: Tensor, *, seed: int, worker: int, squares: list[float]) -> Tensor:
        """Return the body of the piece, and keep what it leaves out.

        Args:
            values: Its values; in fp32 if it has a codec.
            seed: Random seed, the same on all ranks for this part of a step.
            worker: Number that gives each rank other random numbers.
            squares: Receives the squared norm of the residual.
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
        squares.append(float(torch.dot(residual, residual)))
        return body


class WorkObserver(Protocol):
    """Records the codecs' work."""

    def working(self, what: str, sub_task: SubCommTask) -> AbstractContextManager[list[float]]:
        """Wrap work for a part; the list collects squared norms of residuals."""


class _Compression(WorkObserver, Protocol):
    failure: Callable[[], BaseException | None]

    def with_residual(self, piece: Piece, *, make: bool = True) -> Piece:
        """Return the piece of a whole parameter together with its residual."""


class CompressedBucket:
    """One bucket in one step; see the module.

    Args:
        pieces: Those of whole parameters, without residuals.
        weight: This rank's weight, known before anything is sent; residuals hold gradients times its factor.
        copies: Copies payloads between ``buffer``'s device and host memory.
        fold: How many times larger its parts are than others', see :class:`CommTask`.
    """

    def __init__(
        self,
        buffer: Tensor,
        pieces: list[Piece],
        observer: _Compression,
        weight: StepWeight,
        copies: HostPayloads,
        fold: int = 1,
    ) -> None:
        self.fold = fold
        self._copies = copies
        self._buffer = buffer
        self._width = buffer.element_size()
        self._pieces = pieces
        self._observer = observer
        self._weight = weight
        self._sums: dict[int, Tensor] = {}  # by index of the part: this rank's encoded shard

    def add_left(self) -> None:
        """Add residuals to the gradient, as the bucket is about to travel unencoded.

        Where the residual is zero, the gradient keeps its bits. Otherwise this waits until this rank's weight is known.
        A rank with weight 0 keeps its residual for a later step.
        """
        for piece in self._pieces:
            piece = self._observer.with_residual(piece, make=False)
            residual = piece.residual
            if residual is None:
                continue
            if piece.before is not None:
                piece.before.copy_(residual)
            if residual.any():
                self._weight.wait(self._observer.failure)
                self._add_left(piece, residual, self._weight.factor)

    def _add_left(self, piece: Piece, residual: Tensor, factor: float) -> None:
        gradient = self._buffer[piece.first : piece.end]
        if not factor or piece.idle or not is_finite(gradient):
            return
        before = gradient.float() if self._width < _WIDTH else None
        gradient.add_(residual, alpha=1.0 / factor)  # the gradient is multiplied by the factor later
        if before is None:
            residual.zero_()
        elif is_finite(gradient):  # subtract only what the gradient's precision could take
            residual.sub_(gradient.float().sub_(before), alpha=factor)
        else:
            gradient.copy_(before)

    def scatter(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Send a part's shards to their owners, and sum this rank's shard; an ``EncodedStart``."""
        rank, seed = group.rank(), _seed(sub_task)
        with self._observer.working("encode", sub_task) as squares, self._copies.working():
            self._take_residuals(sub_task)
            shards = self._shards(group, sub_task)
            scale(self._buffer[sub_task.offset : sub_task.offset + sub_task.size], self._weight.factor)
            sent = {
                other: self._copies.to_host(self._packed(shard, self._values(shard), seed, rank, squares))
                for other, shard in shards.items()
                if other != rank
            }
        own = shards.get(rank, [])

        def add_up(received: dict[int, Tensor]) -> None:
            if own:
                with self._observer.working("reduce", sub_task) as squares, self._copies.working():
                    sums = self._values(own)
                    for payload in received.values():
                        self._add(own, self._copies.to_device(payload), sums)
                    packed = self._packed(own, sums, seed, rank, squares, place=True)
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

    def _take_residuals(self, sub_task: SubCommTask) -> None:
        """Give each piece of a part its residual, and save it in case the step is skipped."""
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
        """Exchange payloads, then call ``then`` with those of ``senders``."""
        sub_task.encoded_bytes = (sub_task.encoded_bytes or 0) + sum(len(payload) for payload in sent.values())
        received = {rank: self._copies.memory(self._payload_bytes(shard)) for rank, shard in senders.items()}
        return StartedOperation(_works(group, received, sent, number), partial(then, received), messages=True)

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
        squares: list[float],
        *,
        place: bool = False,
    ) -> Tensor:
        """Encode a shard and keep its residual; with ``place``, write the decoded values into the buffer."""
        bodies = []
        for piece, part in zip(shard, values, strict=True):
            bodies.append(piece.encode(part, seed=seed, worker=worker, squares=squares))
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


def _works(
    group: dist.ProcessGroup, received: Mapping[int, Tensor], sent: Mapping[int, Tensor], number: int
) -> list[dist.Work]:
    works = [group.recv([payload], rank, number) for rank, payload in received.items()]
    return works + [group.send([sent[rank]], rank, number) for rank in others_of(group) if rank in sent]
