"""Buckets that travel encoded: of neighbouring elements each parameter's in its own codec, one behind the other.

A *payload* is the bodies of pieces, each beginning at a multiple of eight bytes. Both sides know the pieces, so nothing
else has to be said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.collectives.push_pull import PushPull, Way
from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.scheduler.task import SubCommTask

__all__ = ["EncodedBucket", "Piece", "aligned", "bodies_of", "encoded", "is_finite", "joined", "payload_bytes"]

_ALIGNED = 8  # bytes: so that a body can be read as numbers


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring elements of a bucket that travel alike: those of one parameter.

    Attributes:
        first: Position in the bucket.
        end: Position after the last.
        codec: What they travel in; ``None`` for as they are.
        residual: Flat, in fp32, as long as the piece; ``None`` where nothing was ever left out.
        before: Is filled with the residual as it was before the step, if that may have to be taken back.
        name: The parameter's.
        idle: Whether the parameter has got no gradient on this rank. If it has on none, no optimizer sees what travels,
            so that nothing that was left may travel with it.
    """

    first: int
    end: int
    codec: Compressor | None
    residual: Tensor | None
    before: Tensor | None = None
    name: str = ""
    idle: bool = False

    def within(self, first: int, end: int) -> Piece | None:
        """The part of it between two positions in the bucket, or ``None``."""
        start, stop = max(first, self.first), min(end, self.end)
        if start >= stop:
            return None
        here = slice(start - self.first, stop - self.first)
        residual = None if self.residual is None else self.residual[here]
        before = None if self.before is None else self.before[here]
        return Piece(start, stop, self.codec, residual, before, self.name, self.idle)

    def nbytes(self, width: int) -> int:
        """What it takes on the wire, where an element as it is takes ``width`` bytes."""
        size = self.end - self.first
        return size * width if self.codec is None else self.codec.payload_bytes(size)


class EncodedBucket(Protocol):
    """A bucket whose shards travel encoded; see ``compressed_reduction.py``."""

    @property
    def fold(self) -> int:
        """How many times as large as others its parts are, see :class:`CommTask`."""

    def scatter(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Send a part's shards to their owners, and add up this rank's; an ``EncodedStart``."""

    def gather(self, group: dist.ProcessGroup, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Send this rank's shard of a part to all, and take theirs; an ``EncodedStart``, after :meth:`scatter`."""

    def serve(self, servers: PushPull, way: Way, sub_task: SubCommTask, number: int) -> StartedOperation:
        """Push a part to a server, and pull the sum from there; a ``ServedStart``."""


def payload_bytes(pieces: Sequence[Piece], width: int) -> int:
    """Size of the payload of pieces, where an element as it is takes ``width`` bytes."""
    return sum(aligned(piece.nbytes(width)) for piece in pieces)


def bodies_of(pieces: Sequence[Piece], payload: Tensor, width: int) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with its part of a payload."""
    at = 0
    for piece in pieces:
        size = piece.nbytes(width)
        yield piece, payload[at : at + size]
        at += aligned(size)


def joined(pieces: Sequence[Piece], bodies: Sequence[Tensor], width: int) -> Tensor:
    """The payload that has these bodies of pieces."""
    size = payload_bytes(pieces, width)
    if len(bodies) == 1 and pieces[0].codec is not None and size == len(bodies[0]):
        return bodies[0]
    at, payload = 0, bodies[0].new_empty(size)
    for body in bodies:
        payload[at : at + len(body)] = body
        at += aligned(len(body))
    return payload


def encoded(piece: Piece, part: Tensor, *, seed: int, worker: int, squares: list[float]) -> Tensor:
    """Encode the numbers of a piece, and keep what is left out.

    Args:
        piece: Whose codec and residual count.
        part: Its numbers; in fp32 where it has a residual.
        seed: Of random numbers, the same on all who encode the same part of a step.
        worker: Tells those apart.
        squares: Is told the square of the norm of what is left.
    """
    codec, residual = piece.codec, piece.residual
    if codec is None:
        return part.view(torch.uint8)
    if residual is None or not is_finite(part):  # what overflows is lost, and the residual stays
        return codec.compress(part, seed=seed + piece.first, worker=worker)
    left = torch.zeros_like(residual) if piece.idle else residual
    body = codec.compress_with(left, part, seed=seed + piece.first, worker=worker)
    if piece.idle:
        residual.add_(left)
    squares.append(float(torch.dot(residual, residual)))
    return body


def aligned(size: int) -> int:
    """The next multiple of what a body begins at."""
    return -(-size // _ALIGNED) * _ALIGNED


def is_finite(part: Tensor) -> bool:
    """Whether all numbers are; looked at one by one only if their squares overflow."""
    flat = part.view(-1)
    return math.isfinite(torch.dot(flat, flat)) or bool(torch.isfinite(flat).all())
