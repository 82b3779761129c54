"""Pieces of a bucket, each encoded by its parameter's codec, and the messages that carry them.

A *payload* is the encoded bodies of pieces, each beginning at a multiple of eight bytes. Ranks all know the pieces, so
nothing else is sent between them. A parameter server does not know the model, so a push to it also says which
parameters its pieces belong to, at which positions, and in which codec. ``encoded_sums.py`` describes the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import torch
from torch import Tensor

from lightning_bytescheduler.compression import Codec, Compressor, make_codec, make_compressor
from lightning_bytescheduler.compression.compressor import is_finite
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

_ALIGNED = 8  # bytes, so that a body can be read as numbers
_LENGTH = 8  # bytes of the length before a description, and of the loss scale before an answer


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
    residual: Tensor | None
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


def payload_bytes(pieces: Sequence[Piece], width: int) -> int:
    """Return the size of a payload; an uncompressed element takes ``width`` bytes."""
    return sum(aligned(piece.nbytes(width)) for piece in pieces)


def bodies_of(pieces: Sequence[Piece], payload: Tensor, width: int) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each piece with its part of a payload."""
    at = 0
    for piece in pieces:
        size = piece.nbytes(width)
        yield piece, payload[at : at + size]
        at += aligned(size)


def joined(pieces: Sequence[Piece], bodies: Sequence[Tensor], width: int) -> Tensor:
    """Return the payload that consists of these bodies."""
    size = payload_bytes(pieces, width)
    if len(bodies) == 1 and pieces[0].codec is not None and size == len(bodies[0]):
        return bodies[0]
    at, payload = 0, bodies[0].new_empty(size)
    for body in bodies:
        payload[at : at + len(body)] = body
        at += aligned(len(body))
    return payload


def encoded(piece: Piece, part: Tensor, *, seed: int, worker: int, squares: list[float]) -> Tensor:
    """Encode a piece and keep its residual.

    Args:
        piece: The piece, with codec and residual.
        part: Its values; in fp32 if it has a residual.
        seed: Random seed, the same for all that encode this part of a step.
        worker: Number that gives each of them other random numbers.
        squares: Receives the squared norm of the residual.
    """
    codec, residual = piece.codec, piece.residual
    if codec is None:
        return part.view(torch.uint8)
    if residual is None or not is_finite(part):  # an overflowed gradient is lost, and the residual stays
        return codec.compress(part, seed=seed + piece.first, worker=worker)
    left = torch.zeros_like(residual) if piece.idle else residual
    body = codec.compress_with(left, part, seed=seed + piece.first, worker=worker)
    if piece.idle:
        residual.add_(left)
    squares.append(float(torch.dot(residual, residual)))
    return body


def aligned(size: int) -> int:
    """Round up to a multiple of the alignment of bodies."""
    return -(-size // _ALIGNED) * _ALIGNED


class PushedPiece(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring elements of one parameter, as described to a server.

    Attributes:
        codec: The codec's name; ``None`` for uncompressed.
        idle: Whether the parameter has no gradient on the rank that pushes.
    """

    name: str
    of: int
    at: int
    size: int
    first: int
    codec: str | None
    idle: bool

    def piece(self) -> Piece:
        """Return it with its codec and without a residual."""
        codec = None if self.codec is None else _codec(self.codec)
        return Piece(self.first, self.first + self.size, codec, None, name=self.name, idle=self.idle)


class PushedPieces(msgspec.Struct, frozen=True, kw_only=True, tag="pieces"):
    """The description of a push.

    Attributes:
        step: Number of the step, the same on all ranks.
        loss_scale: The factor of losses; ``None`` if it never changes.
    """

    step: int
    seed: int
    kind: int
    loss_scale: float | None
    pieces: list[PushedPiece]

    def __str__(self) -> str:
        pieces = (f"{one.name}[{one.at}:{one.at + one.size}] in {one.codec or 'its own type'}" for one in self.pieces)
        return f"step {self.step} ({', '.join(pieces)})"

    def require_alike(self, other: PushedPieces) -> None:
        """Check that two pushes can be added.

        Raises:
            UnsupportedError: If they cannot.
        """
        if self._without_idle() != other._without_idle():
            raise UnsupportedError(
                f"Pushes of {self} and of {other} cannot be added up. All ranks need the same model, and the same "
                "compression."
            )

    def _without_idle(self) -> PushedPieces:
        pieces = [msgspec.structs.replace(piece, idle=False) for piece in self.pieces]
        return msgspec.structs.replace(self, pieces=pieces)


class LeftQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """Asks a server for its residual of a parameter."""

    name: str
    size: int


def described(description: PushedPieces | LeftQuestion, payload: Tensor | None = None) -> Tensor:
    """Return a message: a description and its payload."""
    text = msgspec.json.encode(description)
    text += b" " * (aligned(len(text)) - len(text))
    parts = [torch.tensor([len(text)]).view(torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    return torch.cat(parts if payload is None else [*parts, payload])


def read(message: Tensor) -> tuple[PushedPieces | LeftQuestion, Tensor]:
    """Split a message into its description and payload.

    Raises:
        ValueError: If it has no description.
    """
    end = _LENGTH + int(message[:_LENGTH].view(torch.int64)[0])
    if not _LENGTH < end <= len(message) or end % _LENGTH:
        raise ValueError(f"A description of {end - _LENGTH} bytes, in a message of {len(message)}.")
    text = message[_LENGTH:end].numpy().tobytes()
    return msgspec.json.decode(text, type=PushedPieces | LeftQuestion), message[end:]  # msgspec's error is a ValueError


def answered(left: Tensor | None, loss_scale: float) -> Tensor:
    """Return the answer to a question: the residual in fp32, and the loss scale that it contains."""
    if left is None:
        return torch.zeros(_LENGTH, dtype=torch.uint8)
    return torch.cat([torch.tensor([loss_scale], dtype=torch.float64).view(torch.uint8), left.view(torch.uint8)])


def left_on_servers(
    ask: Callable[[Tensor, int], list[Tensor]], name: str, size: int, loss_scale: float
) -> Tensor | None:
    """Return the sum of spare servers' residuals of a parameter; see ``residuals.LeftElsewhere``.

    Raises:
        RuntimeError: If a connection has ended.
    """
    left = []
    for answer in ask(described(LeftQuestion(name=name, size=size)), _LENGTH + 4 * size):
        scale = float(answer[:_LENGTH].view(torch.float64)[0])
        if scale:
            left.append(answer[_LENGTH:].view(torch.float32) * (loss_scale / scale))
    return torch.stack(left).sum(0) if left else None


@cache
def _codec(spec: str) -> Compressor:
    return make_compressor(spec)


def require_known_to_servers(codecs: Iterable[tuple[str, Codec | None]], servers: int) -> None:
    """Check that servers on separate machines can make the user's codecs.

    Raises:
        OptionError: If a codec's name does not make the same codec, or it does not work with servers.
    """
    for pattern, codec in codecs:
        if codec is None or not servers:
            continue
        try:
            known: Codec | None = make_codec(codec.spec)
        except OptionError:
            known = None
        if type(known) is not type(codec):
            raise OptionError(
                f"compression[{pattern!r}]",
                codec,
                f"one of the package's compressors with servers={servers}, which have no other code, or servers=0",
            )
