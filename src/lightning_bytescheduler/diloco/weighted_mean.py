"""The weighted mean of pseudo-gradients, in the memory of one sum, and the same for any order of arrival.

The weighted sum of each element is kept in fixed point, as two 64-bit integers: multiples of 2^-24, and the remainder
in multiples of 2^-64. Integers add up to the same in any order; floating-point numbers do not. Weights are integers,
too.

Bound: a pseudo-gradient of weight w adds w times its fp32 value with an error of at most 2^-65, and of 0 if the value
is 0 or at least 2^-40. Before rounding, the mean of n of them differs from the exact one by at most ``n * 2^-65 / total
weight``. It is then rounded relatively by 2^-51, and to fp32.

Adding works on chunks that fit into a core's cache. Splitting a number in two costs two additions. Next to 1.5 * 2^28 a
double has no smaller unit than 2^-24, so the sum is rounded to such units, and its bits, read as an integer, count them
from a constant on. Next to 1.5 * 2^-12 the unit is 2^-64. The bits are added up as they are, and the constants are
subtracted when the mean is formed. Numbers that are too large for that are split with a conversion.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.compression.dense import chunk_size, chunks_of
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.exceptions import OptionError

_CPU = torch.device("cpu")
_COARSE_BITS, _FINE_BITS = 24, 40
LARGEST = 2.0**38
"""Bound of the weighted sum: 2^62 multiples of 2^-24."""
MOST_WEIGHT = 2**28
"""Its product with the 24 bits of fp32 fits into the 53 bits of fp64, so the product is exact."""
_MOST_ADDED = 2**22  # fine parts of up to 2^40 units each add up to 2^62 at most, which fits into 64 bits
_COARSE_SHIFT, _FINE_SHIFT = 1.5 * 2.0 ** (52 - _COARSE_BITS), 1.5 * 2.0 ** (52 - _COARSE_BITS - _FINE_BITS)
"""Beside these, a double has no smaller unit than 2^-24, and 2^-64."""
_COARSE_BITS_OF_SHIFT, _FINE_BITS_OF_SHIFT = struct.unpack("<2q", struct.pack("<2d", _COARSE_SHIFT, _FINE_SHIFT))
_EXACT_FINE = 2**10  # the fine parts of so many pseudo-gradients add up next to _FINE_SHIFT without rounding
_MOST_SPLIT = _COARSE_SHIFT / 6
"""The sum of ``_COARSE_SHIFT`` and a number up to this one has units of 2^-24."""


class WeightedMean:
    """Weighted mean of pseudo-gradients in their wire format.

    Args:
        elements: Number of elements of each pseudo-gradient.

    Attributes:
        weight: Sum of the weights of all that were added.
        added: How many were added.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._coarse = torch.zeros(elements, dtype=torch.int64)
        self._fine = torch.zeros(elements, dtype=torch.int64)
        self.clear()

    def clear(self) -> None:
        """Begin anew, in the same memory."""
        self._coarse.zero_()
        self._fine.zero_()
        self._largest = 0.0
        self.weight = self.added = 0
        self._shifted = 0  # how many of them were added by the bits of doubles

    def add(self, payload: Tensor, wire: WireFormat, *, weight: int, largest: float | None = None) -> None:
        """Add a pseudo-gradient, decoded chunk by chunk. If it is refused, nothing of it was added.

        Args:
            payload: All tensors, encoded, one after the other.
            wire: The format of the payload.
            weight: Its weight relative to the others', 1 or more.
            largest: A bound of the magnitudes in it, if one is known; else it is computed from the payload.

        Raises:
            OptionError: If the weight is not allowed.
            ValueError: If the payload has another size, or is damaged, or a number is not finite, or too large: the
                weighted sum must stay below 2^38.
        """
        require_whole("weight", weight, 1)
        if weight > MOST_WEIGHT or self.added >= _MOST_ADDED:
            raise OptionError(
                "weight", weight, f"{MOST_WEIGHT} at most, and that of {_MOST_ADDED} pseudo-gradients at most"
            )
        extent = wire.largest(payload, self._elements) if largest is None else largest
        bound = self._largest + extent * weight
        if not bound < LARGEST:  # NaN is not less, either
            raise ValueError(f"The pseudo-gradient was not added: its largest value is {extent:g}.")
        entries = wire.entries(payload, self._elements)
        # Single entries are added by conversions: the constants of the other way would be missing at other elements.
        shifted = entries is None and extent * weight <= _MOST_SPLIT
        if entries is None:
            splitter = _Splitter(min(chunk_size(_CPU), self._elements), weight, shifted=shifted)
            place = 0
            for chunk in wire.decode_chunks(payload, self._elements):
                part = slice(place, place + chunk.numel())
                splitter.add(chunk, self._coarse[part], self._fine[part])
                place = part.stop
        else:
            indices, values = entries
            coarse, fine = self._coarse[indices], self._fine[indices]
            _Splitter(values.numel(), weight, shifted=shifted).add(values, coarse, fine)
            self._coarse[indices], self._fine[indices] = coarse, fine
        self._largest = bound
        self.weight += weight
        self.added += 1
        self._shifted += shifted

    def encode_mean(
        self, wire: WireFormat, *, seed: int = 0, out: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Encode the weighted mean chunk by chunk, so that it is never in memory as fp32.

        Args:
            wire: Encodes it.
            seed: See ``WireFormat.encode``.
            out: See ``WireFormat.encode``.
            residual: See ``WireFormat.encode``.

        Raises:
            ValueError: If nothing was added.
        """
        chunks = self._mean_chunks()
        return wire.encode_chunks(chunks, self._elements, device=_CPU, seed=seed, out=out, residual=residual)

    def _mean_chunks(self) -> Iterator[Tensor]:
        """The mean in fp32, in chunks of which each is overwritten when the next is asked for."""
        if not self.added:
            raise ValueError("There is no mean: no pseudo-gradient was added.")
        size = min(chunk_size(_CPU), self._elements)
        # Then both parts are doubles without rounding, and so is their sum: its bits are those of a carried sum.
        exact = self._largest <= _MOST_SPLIT and self.added <= _EXACT_FINE
        one, other = (torch.empty(size, dtype=torch.int64) for _ in range(2))
        total, high = (torch.empty(size, dtype=torch.float64) for _ in range(2))
        mean = torch.empty(size, dtype=torch.float32)
        share = 1 / self.weight  # to multiply with it is several times as fast as to divide
        for first, length in chunks_of(self._elements, size):
            part, here = slice(first, first + length), slice(0, length)
            sums = self._coarse[part], self._fine[part]
            if exact:
                added = self._exact_sum(*sums, one[here], other[here])
            else:
                added = self._carried_sum(*sums, one[here], other[here], total[here], high[here])
            yield mean[here].copy_(added.mul_(share))

    def _exact_sum(self, coarse: Tensor, fine: Tensor, one: Tensor, other: Tensor) -> Tensor:
        high = _add_whole(coarse, _signed((1 - self._shifted) * _COARSE_BITS_OF_SHIFT), out=one).view(torch.float64)
        low = _add_whole(fine, _signed((1 + self._shifted) * _FINE_BITS_OF_SHIFT), out=other).view(torch.float64)
        return high.sub_(_COARSE_SHIFT).add_(low.sub_(_FINE_SHIFT))

    def _carried_sum(
        self, coarse: Tensor, fine: Tensor, one: Tensor, other: Tensor, total: Tensor, high: Tensor
    ) -> Tensor:
        # The fine part is brought below one coarse unit, so that both parts are a function of their sum.
        _add_whole(fine, _signed(self._shifted * _FINE_BITS_OF_SHIFT), out=one)
        total.copy_(torch.bitwise_and(one, (1 << _FINE_BITS) - 1, out=other)).mul_(2.0**-_FINE_BITS)
        _add_whole(one.bitwise_right_shift_(_FINE_BITS), coarse, out=one)
        high.copy_(_add_whole(one, _signed(-self._shifted * _COARSE_BITS_OF_SHIFT), out=one))
        return total.add_(high).mul_(2.0**-_COARSE_BITS)


class _Splitter:
    """Adds ``weight`` times a chunk to its sums, as two whole numbers; keeps the memory for that.

    Args:
        size: Most elements of a chunk.
        weight: Weight of the pseudo-gradient that is added.
        shifted: Whether it adds by the bits of doubles.
    """

    def __init__(self, size: int, weight: int, *, shifted: bool) -> None:
        self._weight = weight
        self._shifted = shifted
        self._value, self._sum = (torch.empty(size, dtype=torch.float64) for _ in range(2))
        self._shift = torch.tensor(_COARSE_SHIFT, dtype=torch.float64)

    def add(self, chunk: Tensor, coarse: Tensor, fine: Tensor) -> None:
        size = chunk.numel()
        value, split = self._value[:size], self._sum[:size]
        value.copy_(chunk)
        if self._shifted:
            torch.add(self._shift, value, alpha=self._weight, out=split)
            _add_whole(coarse, split.view(torch.int64), out=coarse)
            # What the coarse part has too much: exact, as it is made of digits of the number that was split.
            split.sub_(_COARSE_SHIFT).sub_(value, alpha=self._weight).add_(_FINE_SHIFT)
            _add_whole(fine, split.view(torch.int64), out=fine, sign=-1)
            return
        value.mul_(self._weight * 2.0**_COARSE_BITS)
        torch.trunc(value, out=split)
        coarse.add_(split.to(torch.int64))
        fine.add_(value.sub_(split).mul_(2.0**_FINE_BITS).round_().to(torch.int64))


def _add_whole(one: Tensor, other: Tensor | int, *, out: Tensor, sign: int = 1) -> Tensor:
    """``one + other``, or ``one - other`` with a sign of -1, modulo 2^64."""
    if not _by_numpy():
        return torch.add(one, other, alpha=sign, out=out)
    number = other.numpy() if isinstance(other, Tensor) else np.int64(other)
    (np.add if sign > 0 else np.subtract)(one.numpy(), number, out=out.numpy())
    return out


def _by_numpy() -> bool:
    """Whether NumPy is to add whole numbers: on one thread three times as fast as torch 2.13, which multiplies by 1."""
    return torch.get_num_threads() == 1


def _signed(number: int) -> int:
    """Return ``number`` modulo 2^64, as a signed number of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
