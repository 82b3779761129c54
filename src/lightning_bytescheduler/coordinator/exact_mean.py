"""The exact weighted mean of a few payloads at once, chunk by chunk: the bits of ``WeightedMean``, without its sums.

Sums in fixed point take 16 bytes for each element; to read and to write them costs several times what is computed. As
long as there are few payloads, a chunk of each is decoded, summed and encoded again while it is in a core's cache.

Where all numbers are multiples of one unit, and their weighted sum has less than 53 binary digits beside it, doubles
add them up without rounding, and the sum is exact in any order. Else each product is split beside 1.5 * 2^28, as
``WeightedMean`` does, into multiples of 2^-24 and of 2^-64, and each half has a double of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bytescheduler.compression.blocks import chunk_size
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.coordinator.pieces import Extent
from lightning_bytescheduler.diloco.weighted_mean import COARSE_SHIFT, FINE_SHIFT, FINEST, MOST_SPLIT

__all__ = ["Weighted", "exact_mean", "is_exact"]

_DIGITS = 53  # binary, of a double


class Weighted(NamedTuple):
    """A payload that is part of a mean.

    Attributes:
        payload: As it has travelled.
        weight: With which it counts, 1 or more.
        extent: Of its numbers.
    """

    payload: Tensor
    weight: int
    extent: Extent


def is_exact(parts: Iterable[tuple[int, Extent]]) -> bool:
    """Whether :func:`exact_mean` can form the mean of payloads: what is larger is for ``WeightedMean``.

    Args:
        parts: Weight and extent of each.
    """
    return sum(weight * extent.largest for weight, extent in parts) <= MOST_SPLIT


def exact_mean(parts: Sequence[Weighted], wire: WireFormat, elements: int) -> Iterator[Tensor]:
    """The weighted mean of payloads for which :func:`is_exact` holds.

    Args:
        parts: The payloads, one at least.
        wire: What they were encoded with.
        elements: Of each.

    Yields:
        Flat tensors in fp32, of which each is overwritten when the next is asked for.
    """
    bound = sum(part.weight * part.extent.largest for part in parts)
    unit = min(part.extent.unit for part in parts)
    share = 1 / sum(part.weight for part in parts)
    weights = [part.weight for part in parts]
    plain = unit >= FINEST and bound < unit * 2.0**_DIGITS
    scratch = _Scratch.of_thread(min(chunk_size(torch.device("cpu")), elements))
    add = _Plain(scratch) if plain else _Split(scratch, rounds=unit < FINEST)
    mean = scratch.mean
    for chunks in zip(*(wire.decode_chunks(part.payload, elements) for part in parts), strict=True):
        sums = add.of(chunks, weights)
        yield mean[: sums.numel()].copy_(sums.mul_(share))


class _Scratch:
    """What a thread needs, and keeps: to touch fresh memory takes as long as to sum in it."""

    _kept = threading.local()

    def __init__(self, size: int) -> None:
        self.doubles: list[Tensor] = [torch.empty(size, dtype=torch.float64) for _ in range(4)]
        self.mean = torch.empty(size, dtype=torch.float32)

    @classmethod
    def of_thread(cls, size: int) -> _Scratch:
        """That of the thread which calls, for chunks of ``size`` elements at most."""
        kept: _Scratch | None = getattr(cls._kept, "scratch", None)
        if kept is None or kept.mean.numel() < size:
            kept = cls._kept.scratch = cls(size)
        return kept


class _Plain:
    """Adds in doubles."""

    def __init__(self, scratch: _Scratch) -> None:
        self._sum, self._value, *_ = scratch.doubles

    def of(self, chunks: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        size = chunks[0].numel()
        sums, value = self._sum[:size], self._value[:size]
        sums.copy_(chunks[0]).mul_(weights[0])
        for chunk, weight in zip(chunks[1:], weights[1:], strict=True):
            sums.add_(value.copy_(chunk), alpha=weight)
        return sums


class _Split:
    """Adds in two doubles, each of multiples of its own unit."""

    def __init__(self, scratch: _Scratch, *, rounds: bool) -> None:
        self._rounds = rounds  # whether there may be more digits than are kept
        self._high, self._low, self._value, self._part = scratch.doubles
        self._shift = torch.tensor(COARSE_SHIFT, dtype=torch.float64)

    def of(self, chunks: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        size = chunks[0].numel()
        high, low, value, part = self._high[:size], self._low[:size], self._value[:size], self._part[:size]
        high.zero_()
        low.zero_()
        for chunk, weight in zip(chunks, weights, strict=True):
            value.copy_(chunk)
            torch.add(self._shift, value, alpha=weight, out=part)
            high.add_(part.sub_(COARSE_SHIFT))
            part.sub_(value, alpha=weight)  # what the high part has too much
            if self._rounds:
                part.add_(FINE_SHIFT).sub_(FINE_SHIFT)
            low.sub_(part)
        return high.add_(low)
