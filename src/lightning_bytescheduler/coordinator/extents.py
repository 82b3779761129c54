"""How large and how fine numbers are: what says whether a sum of them is exact, without forming it.

A number of fp32 is a whole multiple of the unit of its last digit, and so of that of every smaller number. Of the bits
of all numbers, the largest and the smallest that is not 0 are enough: without their signs, bits are ordered as the
magnitudes are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

__all__ = ["NOTHING", "Extent", "extent_of"]

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
