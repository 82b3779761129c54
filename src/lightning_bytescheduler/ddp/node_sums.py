"""What each rank of a node has of a part that its node pushes encoded: not encoded yet, and how that is added up.

It travels in fp32 where the sum is encoded with what was left of it, else in the gradient's own type; behind it is a
byte for each piece, which says whether the rank has got no gradient of the parameter.

A residual is that of the rank that pushes, and parts are pushed by the same ranks for as long as they are cut alike. A
rank that has something left of what it does not push, as after they were cut anew or when a fit goes on from a
checkpoint, adds it to what it has, and has nothing left: whether it is added before or after the node's sum is formed
makes no difference to the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_bytescheduler.ddp.encoded_pieces import Piece, aligned, is_finite

__all__ = ["given", "room_for", "summed"]


def given(pieces: Sequence[Piece], values: Sequence[Tensor]) -> Tensor:
    """A message of what this rank has of pieces that another one pushes.

    Args:
        pieces: With their residuals, of which nothing is left then: but of what is idle or not finite.
        values: The numbers of each, in fp32 where it has a residual.
    """
    dtypes = [value.dtype for value in values]
    message = torch.empty(_size(pieces, dtypes), dtype=torch.uint8)
    for piece, value, room in zip(pieces, values, _rooms(pieces, dtypes, message), strict=True):
        left = piece.residual
        if left is not None and not piece.idle and _is_any(left) and is_finite(value):
            torch.add(value, left, out=room)
            left.zero_()
        else:
            room.copy_(value)
    message[len(message) - len(pieces) :] = torch.tensor([piece.idle for piece in pieces])
    return message


def room_for(pieces: Sequence[Piece], values: Sequence[Tensor]) -> Tensor:
    """Memory that such a message of the same pieces is received in."""
    return torch.empty(_size(pieces, [value.dtype for value in values]), dtype=torch.uint8)


def summed(
    pieces: Sequence[Piece], values: Sequence[Tensor], before: int, messages: Iterator[Tensor]
) -> tuple[list[Piece], list[Tensor]]:
    """The node's sum of pieces, on the rank that pushes them.

    Args:
        pieces: As this rank has them.
        values: Its numbers of each; may be written to.
        before: How many ranks of the node come before this one.
        messages: Of all others, in the order of ranks; these may be written to.

    Returns:
        Pieces, idle where they are on all ranks, and their numbers, added up in the order of ranks.
    """
    dtypes = [value.dtype for value in values]
    totals: list[Tensor] = []
    idle = [piece.idle for piece in pieces]

    def add(numbers: Sequence[Tensor]) -> None:
        if not totals:
            totals.extend(numbers)
            return
        for total, number in zip(totals, numbers, strict=True):
            total.add_(number)

    at = 0
    for at, message in enumerate(messages):
        if at == before:
            add(values)
        add(list(_rooms(pieces, dtypes, message)))
        flags = message[len(message) - len(pieces) :].tolist()
        idle = [known and bool(flag) for known, flag in zip(idle, flags, strict=True)]
    if before > at:  # the last one
        add(values)
    return [replace(piece, idle=flag) for piece, flag in zip(pieces, idle, strict=True)], totals


def _is_any(left: Tensor) -> bool:
    """Whether something is left: several times as fast as ``any``, whose answer is no in most steps."""
    return any(map(float, left.aminmax()))


def _size(pieces: Sequence[Piece], dtypes: Sequence[torch.dtype]) -> int:
    return sum(map(aligned, _sizes(pieces, dtypes))) + len(pieces)


def _sizes(pieces: Sequence[Piece], dtypes: Sequence[torch.dtype]) -> list[int]:
    return [(piece.end - piece.first) * dtype.itemsize for piece, dtype in zip(pieces, dtypes, strict=True)]


def _rooms(pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], message: Tensor) -> Iterator[Tensor]:
    """The numbers of each piece in a message."""
    at = 0
    for size, dtype in zip(_sizes(pieces, dtypes), dtypes, strict=True):
        yield message[at : at + size].view(dtype)
        at += aligned(size)
