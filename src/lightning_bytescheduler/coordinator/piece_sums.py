"""The arithmetic on one piece of a round's updates: adding them up, and writing their mean. For any thread or process.

No piece depends on another: who works on which, in threads of the coordinator or in its shards, changes no bit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.exact_mean import Weighted, exact_mean
from lightning_bytescheduler.coordinator.extents import Extent
from lightning_bytescheduler.coordinator.pieces import PiecedFormat
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean

__all__ = ["Addend", "MeanPlace", "PieceSums"]

_PIECE = "piece"
_CPU = torch.device("cpu")


class Addend(NamedTuple):
    """An update as one piece's work sees it.

    Attributes:
        payload: The whole.
        weight: With which it counts.
        extents: Of its pieces by their index; empty where they are not asked for.
    """

    payload: Tensor
    weight: int
    extents: Sequence[Extent] = ()


class MeanPlace(NamedTuple):
    """Where a mean is written to.

    Attributes:
        payload: Of the whole fragment.
        round: Whose mean it is, for its rounding.
        known: What former means have lost of the whole fragment, or ``None`` for nothing; only read, so that a mean
            can be formed once more.
        lost: What is lost with this one; ``None`` where the wire keeps none.
    """

    payload: Tensor
    round: int
    known: Tensor | None = None
    lost: Tensor | None = None


class PieceSums:
    """Sums of pieces in fixed point.

    Args:
        pieced: The format of the updates.
    """

    def __init__(self, pieced: PiecedFormat) -> None:
        self.pieced = pieced
        self._sums: list[WeightedMean | None] = [None] * len(pieced.pieces)
        self._locks = [threading.Lock() for _ in pieced.pieces]  # each for its piece; no other is taken under one

    def add(self, updates: Sequence[Addend], index: int) -> None:
        """Add updates to the sum of one piece."""
        parts = [(self.pieced.part(update.payload, index), update.weight) for update in updates]
        with self._locks[index]:
            sums = self._sums[index]
            if sums is None:
                sums = self._sums[index] = WeightedMean(
                    {_PIECE: torch.empty(self.pieced.length_of(index), dtype=torch.float32)}
                )
            sums.add_several(parts, self.pieced.wire)

    def encode(self, held: Sequence[Addend], place: MeanPlace, index: int) -> None:
        """Write the mean of one piece.

        Args:
            held: Updates of which it is formed at once; without any, it is that of what was added.
            place: Where to.
            index: Of the piece.

        Raises:
            ValueError: If there is nothing to form it of.
        """
        means, length = self.pieced.of_means, self.pieced.length_of(index)
        wire, out, seed = means.wire, means.place_of(place.payload, index), self.pieced.seed(place.round, index)
        unsent = self._residual(place, index)
        sums = self._sums[index]
        if held:
            parts = [Weighted(self.pieced.part(one.payload, index), one.weight, one.extents[index]) for one in held]
            chunks = exact_mean(parts, self.pieced.wire, length)
            part = wire.encode_chunks(chunks, length, device=_CPU, seed=seed, out=out, residual=unsent)
        elif sums is not None:
            part = sums.encode_mean(wire, seed=seed, out=out, residual=unsent)
        else:
            raise ValueError("There is no mean: nothing was added.")
        if out is None:
            means.place(part, place.payload, index)

    def _residual(self, place: MeanPlace, index: int) -> Tensor | None:
        if place.lost is None:
            return None
        start, stop = self.pieced.pieces[index]
        unsent = place.lost[start:stop]
        return unsent.zero_() if place.known is None else unsent.copy_(place.known[start:stop])

    def clear(self, index: int) -> None:
        """Begin the sum of one piece anew, in the same memory."""
        sums = self._sums[index]
        if sums is not None:
            sums.clear()
