"""The exact sum of a round's updates, piece by piece, in several threads; the same bits in any order of arrival."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Executor

import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.pieces import PiecedFormat
from lightning_bytescheduler.diloco.weighted_mean import LARGEST, WeightedMean
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["UpdateSum"]

_PIECE = "piece"


class UpdateSum:
    """Sum of one fragment's updates in one round. Its methods are called on the event loop, its work is done elsewhere.

    Additions are announced on the loop with :meth:`begin`, so that :meth:`settled` waits for all of them.

    Args:
        pieced: The format of the updates.
        executor: Of the threads that add.
    """

    def __init__(self, pieced: PiecedFormat, executor: Executor) -> None:
        self.pieced = pieced
        self._executor = executor
        self._sums: list[WeightedMean | None] = [None] * len(pieced.pieces)
        self._locks = [threading.Lock() for _ in pieced.pieces]  # each for its piece; no other is taken under one
        self._under_way = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._bound = 0.0
        self.weight = 0
        self.failed: BaseException | None = None

    def begin(self, *, extent: float, weight: int) -> None:
        """Reserve room for an update that is verified, and make :meth:`settled` wait for it.

        Args:
            extent: Its largest magnitude.
            weight: With which it counts, 1 or more.

        Raises:
            OptionError: If it is not finite, or the sum could become too large with it.
        """
        bound = self._bound + extent * weight
        if not bound < LARGEST:  # NaN is not less, either
            state = f"{extent:.3g} in it" if math.isfinite(extent) else "infinities or NaN in it"
            raise OptionError("update", state, f"finite, and below {LARGEST:.3g} when it is weighted and summed")
        self._bound = bound
        self.weight += weight
        self._under_way += 1
        self._settled.clear()

    async def add(self, payload: Tensor, *, weight: int) -> None:
        """Add an update that was begun."""
        try:
            await self._of_pieces(self._add_piece, payload, weight)
        except BaseException as error:
            self.failed = error  # part of it may be in the sum: nobody is to use that
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._settled.set()

    async def settled(self) -> None:
        """Wait until nothing is being added."""
        await self._settled.wait()

    def encode_mean(self, payload: Tensor, index: int, *, seed: int, residual: Tensor | None = None) -> None:
        """Write the mean of one piece into a payload; for any thread, once it is settled and something was added.

        Args:
            payload: Of the whole fragment.
            index: Of the piece.
            seed: For its rounding.
            residual: What former means have lost of the whole fragment; is left with what this one loses.
        """
        sums = self._sums[index]
        if sums is None:
            raise ValueError("There is no mean: nothing was added.")
        start, stop = self.pieced.pieces[index]
        unsent = None if residual is None else residual[start:stop]
        self.pieced.place(sums.encode_mean(self.pieced.wire, seed=seed, residual=unsent), payload, index)

    async def reopen(self) -> None:
        """Begin anew, in the same memory."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(loop.run_in_executor(self._executor, one.clear) for one in self._sums if one is not None)
        )
        self._bound = 0.0
        self.weight = 0

    async def _of_pieces(self, work: Callable[[Tensor, int, int], None], payload: Tensor, weight: int) -> None:
        loop = asyncio.get_running_loop()
        indices = range(len(self.pieced.pieces))
        await asyncio.gather(*(loop.run_in_executor(self._executor, work, payload, weight, i) for i in indices))

    def _add_piece(self, payload: Tensor, weight: int, index: int) -> None:
        part = self.pieced.part(payload, index)
        with self._locks[index]:
            sums = self._sums[index]
            if sums is None:
                sums = self._sums[index] = WeightedMean({_PIECE: torch.empty(self.pieced.length_of(index))})
            sums.add_encoded(part, self.pieced.wire, weight=weight)
