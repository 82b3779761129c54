"""The weighted mean of pseudo-gradients, in the memory of one sum, and the same for any order of arrival.

The weighted sum of each element is kept as two doubles that count whole units: of 2^-14, and for the remainder of
2^-56. Up to 2^53 units add up without rounding, so sums are the same in any order, as those of arbitrary floating-point
numbers are not. Weights are integers.

Bound: a pseudo-gradient of weight w adds w times its fp32 value with an error of at most 2^-57, and of 0 if the value
is 0 or at least 2^-33. Before rounding, the mean of n of them differs from the exact one by at most ``n * 2^-57 / total
weight``. It is then rounded relatively by 2^-51, and to fp32.

Work is done on chunks that fit into a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.compression.dense import chunk_size, chunks_of
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.exceptions import OptionError

_CPU = torch.device("cpu")
_COARSE = 2.0**14
"""Coarse units in 1."""
_FINE = 2.0**42
"""Fine units in a coarse one."""
LARGEST = 2.0**38
"""Bound of the weighted sum: 2^52 coarse units, to which rounding adds half a unit for each pseudo-gradient."""
MOST_WEIGHT = 2**28
"""Its product with the 24 bits of fp32 fits into the 53 bits of a double, so the product is exact."""
_MOST_ADDED = 2**12  # remainders of up to 2^41 fine units each add up to 2^53 at most


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
        self._coarse = torch.zeros(elements, dtype=torch.float64)
        self._fine = torch.zeros(elements, dtype=torch.float64)
        self.clear()

    def clear(self) -> None:
        """Begin anew, in the same memory."""
        self._coarse.zero_()
        self._fine.zero_()
        self._largest = 0.0
        self.weight = self.added = 0

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
        if entries is None:
            rows = torch.empty(2, min(chunk_size(_CPU), self._elements), dtype=torch.float64)
            place = 0
            for chunk in wire.decode_chunks(payload, self._elements):
                part = slice(place, place + chunk.numel())
                _add(chunk, weight, self._coarse[part], self._fine[part], rows[:, : chunk.numel()])
                place = part.stop
        else:
            indices, values = entries
            coarse, fine = self._coarse[indices], self._fine[indices]
            _add(values, weight, coarse, fine, torch.empty(2, values.numel(), dtype=torch.float64))
            self._coarse[indices], self._fine[indices] = coarse, fine
        self._largest = bound
        self.weight += weight
        self.added += 1

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
        total, mean = torch.empty(size, dtype=torch.float64), torch.empty(size, dtype=torch.float32)
        share = 1 / (self.weight * _COARSE)  # to multiply with it is several times as fast as to divide
        for first, length in chunks_of(self._elements, size):
            part, here = slice(first, first + length), slice(0, length)
            # Rounds the exact sum once, so that it does not matter how it is divided into coarse and fine units.
            added = torch.add(self._coarse[part], self._fine[part], alpha=1 / _FINE, out=total[here])
            yield mean[here].copy_(added.mul_(share))


def _add(values: Tensor, weight: int, coarse: Tensor, fine: Tensor, scratch: Tensor) -> None:
    """Add ``weight`` times a chunk to its sums, as two whole numbers of units."""
    value, whole = scratch
    value.copy_(values).mul_(weight * _COARSE)
    coarse.add_(torch.round(value, out=whole))
    fine.add_(value.sub_(whole).mul_(_FINE).round_())
