"""What is pushed of compressed gradients to a parameter server: a description, and what it is of.

A server knows nothing of a model. So each push says which parameters its pieces are of, where they are in these, and in
what codec they travel, as options name it. See ``encoded_sums.py`` for what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import msgspec
import torch
from torch import Tensor

from lightning_bytescheduler.compression.compressor import Compressor
from lightning_bytescheduler.compression.registry import make_compressor
from lightning_bytescheduler.ddp.encoded_pieces import Piece, aligned
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

_LENGTH = 8  # bytes: of a description's length in front of it, and of a loss scale in front of an answer


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


def room_for_answer(size: int) -> Tensor:
    """Memory that an answer about so many elements is received in."""
    return torch.zeros(_LENGTH + 4 * size, dtype=torch.uint8)


def left_in(answer: Tensor, loss_scale: float) -> Tensor | None:
    """What an answer says is left, of gradients of losses so much scaled; ``None`` for nothing."""
    scale = float(answer[:_LENGTH].view(torch.float64)[0])
    return answer[_LENGTH:].view(torch.float32) * (loss_scale / scale) if scale else None


@cache
def _codec(spec: str) -> Compressor:
    return make_compressor(spec, error_feedback=False, min_size=0)


def require_known_to_servers(codecs: Iterable[tuple[str, Compressor | None]], servers: int) -> None:
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
            known: Compressor | None = _codec(codec.spec)
        except OptionError:
            known = None
        if type(known) is not type(codec):
            raise OptionError(
                f"compression[{pattern!r}]",
                codec,
                f"one of the package's compressors with servers={servers}, which have no other code, or servers=0",
            )
