"""Payloads in pieces of whole blocks, so that several threads work on one, and what they need besides stays small.

A payload of ``WireFormat`` has the scales of all blocks before the elements. A piece is a payload of its own: the
scales of its blocks, then its elements.

The extent of a piece says whether a sum is exact, without forming it. A number of fp32 is a whole multiple of the unit
of its last digit, and so of that of every smaller number. Of the bits of all numbers, the largest and the smallest that
is not 0 are enough: without their signs, bits are ordered as the magnitudes are.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireFormat

__all__ = ["NOTHING", "PIECE", "Extent", "PiecedFormat", "extent_of"]

PIECE = 1 << 20
"""Elements of a piece: whole blocks of every format, and whole bytes."""

_LARGEST_INTEGER = 128  # of int8; int4's are smaller
_ELEMENT_BITS: dict[str, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Formats that can be cut; a payload of another one is one piece."""
_AT_ONCE = 1 << 16  # numbers, whose bits fit into a core's cache
_BIAS = 127  # of the exponents of fp32 and bf16


class Extent(NamedTuple):
    """Of numbers.

    Attributes:
        largest: A bound of their magnitudes; infinity if one is not finite.
        unit: A power of two that they all are multiples of; infinity if all are 0.
    """

    largest: float
    unit: float


NOTHING = Extent(0.0, math.inf)
"""Of no numbers."""


def extent_of(payload: Tensor, *, bits: int) -> Extent:
    """The extent of numbers in fp32 or bf16, in one pass.

    Args:
        payload: Their bytes: uint8, on the CPU.
        bits: Of a number, 32 or 16.
    """
    kind: Any = np.uint32 if bits == 32 else np.uint16
    numbers = payload.numpy().view(kind)
    scratch = np.empty(min(_AT_ONCE, numbers.size), kind)
    most, least = 0, (1 << bits) - 1  # of the bits without sign, twice as large; the least is one less
    for first in range(0, numbers.size, _AT_ONCE):
        part = numbers[first : first + _AT_ONCE]
        doubled = np.left_shift(part, 1, out=scratch[: part.size])
        most = max(most, int(doubled.max()))
        doubled -= kind(1)  # what is 0 becomes the largest of all
        least = min(least, int(doubled.min()))
    if not most:
        return NOTHING
    digits = bits - 9  # after the point: 8 bits are the exponent's, and one is the sign
    if most >> (digits + 1) == 0xFF:
        return Extent(math.inf, 0.0)
    largest = np.array([most >> 1 << (32 - bits)], np.uint32).view(np.float32)
    exponent = max((least + 1) >> (digits + 1), 1)
    return Extent(float(largest[0]), math.ldexp(1.0, exponent - _BIAS - digits))


class PiecedFormat:
    """Cuts payloads of so many elements, and puts them together.

    Args:
        wire: The format.
        elements: Of the whole.
        piece: Elements of a piece; 0 for ``PIECE``.
    """

    def __init__(self, wire: WireFormat, elements: int, piece: int = 0) -> None:
        self.wire = wire
        self.elements = elements
        self.piece = piece or PIECE
        self.payload_bytes: int = wire.payload_bytes(elements)
        self._bits = _ELEMENT_BITS.get(wire.dtype, 0)
        length = self.piece if self._bits else elements
        self.pieces = [(start, min(start + length, elements)) for start in range(0, elements, length)]
        self._scales = self.payload_bytes - self._element_bytes(elements)
        self._scales_of_piece = wire.payload_bytes(self.piece) - self._element_bytes(self.piece)

    @cached_property
    def of_means(self) -> PiecedFormat:
        """The same for the means of such payloads."""
        wire = self.wire.of_means
        return self if wire == self.wire else PiecedFormat(wire, self.elements, self.piece)

    def _element_bytes(self, elements: int) -> int:
        return -(-elements * self._bits // 8)

    def _sections(self, index: int) -> list[slice]:
        if not self._bits:
            return [slice(0, self.payload_bytes)]
        start, stop = self.pieces[index]
        elements = slice(self._scales + self._element_bytes(start), self._scales + self._element_bytes(stop))
        if not self._scales:
            return [elements]
        first = index * self._scales_of_piece
        last = self._scales if stop == self.elements else first + self._scales_of_piece
        return [slice(first, last), elements]

    def end_of(self, index: int) -> int:
        """Bytes of the payload that have to be there before a piece can be read."""
        return int(self._sections(index)[-1].stop)

    def length_of(self, index: int) -> int:
        """Elements of a piece."""
        start, stop = self.pieces[index]
        return stop - start

    @property
    def is_cut(self) -> bool:
        """Whether the format can be cut, as its payload has all elements in order."""
        return bool(self._bits)

    def extent(self, payload: Tensor, index: int) -> Extent:
        """How large and how fine the numbers of one piece are, without decoding them."""
        if not self._bits:
            largest = self.wire.largest(self.part(payload, index), self.length_of(index))
            return Extent(largest if largest == largest else math.inf, 0.0)
        sections = self._sections(index)
        if len(sections) == 1:
            return extent_of(payload[sections[0]], bits=self._bits)
        # The product of a scale and a whole number is a multiple of the scale's unit, also once it is rounded.
        scales = extent_of(payload[sections[0]], bits=32)
        return scales._replace(largest=scales.largest * _LARGEST_INTEGER)

    def part(self, payload: Tensor, index: int) -> Tensor:
        """One piece of a payload; without a copy where the format has no scales."""
        sections: list[Tensor] = [payload[section] for section in self._sections(index)]
        return sections[0] if len(sections) == 1 else torch.cat(sections)

    def place_of(self, payload: Tensor, index: int) -> Tensor | None:
        """Where one piece lies in a payload, if it lies in one place."""
        sections = self._sections(index)
        return payload[sections[0]] if len(sections) == 1 else None

    def place(self, part: Tensor, payload: Tensor, index: int) -> None:
        """Write one piece into a payload."""
        offset = 0
        for section in self._sections(index):
            length = section.stop - section.start
            payload[section] = part[offset : offset + length]
            offset += length

    def seed(self, round: int, index: int) -> int:
        """For a piece of a round's mean: each its own, as a seed makes the same roundings in every tensor."""
        return round * len(self.pieces) + index
