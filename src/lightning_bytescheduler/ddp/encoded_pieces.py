"""Buckets that travel encoded: of neighbouring elements each parameter's in its own codec, one behind the other.

A *payload* is the bodies of pieces, each beginning at a multiple of eight bytes. Among ranks both sides know the
pieces, so nothing else has to be said. A parameter server knows nothing of a model: so a push there says which
parameters its pieces are of, where they are in these, and in what codec they travel, as options name it. See
``encoded_sums.py`` for what becomes of it.
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

_ALIGNED = 8  # bytes: so that a body can be read as numbers
_LENGTH = 8  # bytes: of a description's length in front of it, and of a loss scale in front of an answer


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


class PushedPiece(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring elements of one parameter.

    Attributes:
        name: Of the parameter.
        of: Its elements.
        at: Position of the first of these among them.
        size: How many these are.
        first: Position in the bucket; tells random numbers apart.
        codec: As options name it; ``None`` for as they are.
        idle: Whether the parameter has got no gradient on the rank that pushes.
    """

    name: str
    of: int
    at: int
    size: int
    first: int
    codec: str | None
    idle: bool

    def piece(self) -> Piece:
        """As the codecs want it, without what is left."""
        codec = None if self.codec is None else _codec(self.codec)
        return Piece(self.first, self.first + self.size, codec, None, name=self.name, idle=self.idle)


class PushedPieces(msgspec.Struct, frozen=True, kw_only=True, tag="pieces"):
    """What a push is of.

    Attributes:
        step: The same on all ranks.
        seed: Of random numbers.
        kind: Index of the gradients' type, in ``summing_server.DTYPES``.
        loss_scale: What losses are multiplied with; ``None`` if that never changes.
        pieces: In the order of their bodies.
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
        """Make sure that the sum of both has a meaning.

        Raises:
            UnsupportedError: If it has none.
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
    """Asks for what a server has left to send of a parameter.

    Attributes:
        name: Of the parameter.
        size: Its elements.
    """

    name: str
    size: int


def described(description: PushedPieces | LeftQuestion, payload: Tensor | None = None) -> Tensor:
    """A message: a description, and what it is of."""
    text = msgspec.json.encode(description)
    text += b" " * (aligned(len(text)) - len(text))
    parts = [torch.tensor([len(text)]).view(torch.uint8), torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    return torch.cat(parts if payload is None else [*parts, payload])


def read(message: Tensor) -> tuple[PushedPieces | LeftQuestion, Tensor]:
    """A message's description, and the rest.

    Raises:
        ValueError: If it has none.
    """
    end = _LENGTH + int(message[:_LENGTH].view(torch.int64)[0])
    if not _LENGTH < end <= len(message) or end % _LENGTH:
        raise ValueError(f"A description of {end - _LENGTH} bytes, in a message of {len(message)}.")
    text = message[_LENGTH:end].numpy().tobytes()
    return msgspec.json.decode(text, type=PushedPieces | LeftQuestion), message[end:]  # msgspec's error is a ValueError


def answered(left: Tensor | None, loss_scale: float) -> Tensor:
    """The answer to a question: what is left of each element, in fp32, of gradients of losses so much scaled."""
    if left is None:
        return torch.zeros(_LENGTH, dtype=torch.uint8)
    return torch.cat([torch.tensor([loss_scale], dtype=torch.float64).view(torch.uint8), left.view(torch.uint8)])


def left_on_servers(
    ask: Callable[[Tensor, int], list[Tensor]], name: str, size: int, loss_scale: float
) -> Tensor | None:
    """What spare servers have left to send of a parameter; see ``residuals.LeftElsewhere``.

    Args:
        ask: Of ``push_pull.PushPull``.
        name: The parameter's.
        size: Its elements.
        loss_scale: Of the gradients that are wanted.

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
    """Make sure that servers on machines of their own can make the codecs that a user has.

    Args:
        codecs: With a pattern of parameter names each.
        servers: On machines of their own.

    Raises:
        OptionError: If one is not as its name says, or does not work with servers.
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
