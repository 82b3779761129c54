"""The exact sum of a round's updates, piece by piece, in several threads; the same bits in any order of arrival.

Updates are held as they came as long as there are few: their mean is then formed in one pass, without sums in memory.
When they would take more memory than the sums do, 16 bytes for each element, all of them are added to these in one
pass. What is held and what the sums take does not depend on the number of workers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from torch import Tensor

from lightning_bytescheduler.coordinator.exact_mean import is_exact
from lightning_bytescheduler.coordinator.extents import Extent
from lightning_bytescheduler.coordinator.piece_sums import Addend, MeanPlace, PieceSums
from lightning_bytescheduler.coordinator.pieces import PiecedFormat
from lightning_bytescheduler.diloco.weighted_mean import FINEST, LARGEST, MOST_WEIGHT
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["Summation", "Update", "UpdateSum"]

_SUM_BYTES = 16  # of an element


class Update:
    """An update that is verified.

    Args:
        payload: As it came.
        extents: Of its pieces.
        digest: Of the payload.
    """

    def __init__(self, payload: Tensor, extents: Sequence[Extent], digest: str) -> None:
        self.payload = payload
        self.extents = extents
        self.digest = digest
        self.weight = 0  # once it is part of a sum

    @property
    def largest(self) -> float:
        """A bound of the magnitudes of its numbers; infinity if one is not finite."""
        return max((extent.largest for extent in self.extents), default=0.0)

    @property
    def unit(self) -> float:
        """A power of two that all numbers are multiples of."""
        return min((extent.unit for extent in self.extents), default=math.inf)


class Summation(Protocol):
    """Who adds updates up and writes their mean, all pieces of them: threads of this process, or shards."""

    async def add(self, updates: Sequence[Addend]) -> None:
        """See ``PieceSums.add``."""
        ...

    async def encode(self, held: Sequence[Addend], place: MeanPlace) -> None:
        """See ``PieceSums.encode``."""
        ...

    async def clear(self) -> None:
        """See ``PieceSums.clear``."""
        ...


class _Threads:
    """Adds up in threads of this process.

    Args:
        pieced: The format of the updates.
        executor: Of the threads.
    """

    def __init__(self, pieced: PiecedFormat, executor: Executor) -> None:
        self._sums = PieceSums(pieced)
        self._executor = executor

    async def add(self, updates: Sequence[Addend]) -> None:
        await self._of_pieces(lambda index: self._sums.add(updates, index))

    async def encode(self, held: Sequence[Addend], place: MeanPlace) -> None:
        await self._of_pieces(lambda index: self._sums.encode(held, place, index))

    async def clear(self) -> None:
        await self._of_pieces(self._sums.clear)

    async def _of_pieces(self, work: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        indices = range(len(self._sums.pieced.pieces))
        await asyncio.gather(*(loop.run_in_executor(self._executor, work, index) for index in indices))


class UpdateSum:
    """Sum of one fragment's updates in one round. Its methods are called on the event loop, its work is done elsewhere.

    Additions are announced on the loop with :meth:`begin`, so that :meth:`settled` waits for all of them.

    Args:
        pieced: The format of the updates.
        executor: Of the threads that add,
        by: unless somebody else does.
    """

    def __init__(self, pieced: PiecedFormat, executor: Executor, *, by: Summation | None = None) -> None:
        self.pieced = pieced
        self._work = _Threads(pieced, executor) if by is None else by
        self._held: list[Update] = []
        size = max(pieced.payload_bytes, 1)
        self._most_held = max(_SUM_BYTES * pieced.elements // size, 1) if pieced.is_cut else 0
        self._summed = False  # whether something is in the sums
        self._under_way = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._bound = 0.0
        self.weight = 0
        self.failed: BaseException | None = None

    def begin(self, update: Update, *, weight: int) -> None:
        """Reserve room for an update, and make :meth:`settled` wait for it.

        Args:
            update: The update.
            weight: With which it counts, 1 or more.

        Raises:
            OptionError: If it is not finite, or the sum could become too large with it.
        """
        largest = update.largest
        bound = self._bound + largest * weight
        if not bound < LARGEST:  # NaN is not less, either
            state = f"{largest:.3g} in it" if math.isfinite(largest) else "infinities or NaN in it"
            raise OptionError("update", state, f"finite, and below {LARGEST:.3g} when it is weighted and summed")
        if weight > MOST_WEIGHT:
            raise OptionError("weight", weight, f"{MOST_WEIGHT} at most")
        self._bound = bound
        self.weight += weight
        update.weight = weight
        self._under_way += 1
        self._settled.clear()

    async def add(self, update: Update) -> None:
        """Add an update that was begun; its payload belongs to the sum from now on."""
        self._held.append(update)
        try:
            if len(self._held) > self._most_held:
                await self._sum_held()
        except BaseException as error:
            self.failed = error  # part of it may be in the sum: nobody is to use that
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._settled.set()

    async def settled(self) -> None:
        """Wait until nothing is being added."""
        # No timeout: what is waited for are additions in memory under way in threads, each of which sets the event
        # whether it succeeds or fails. The connection of the worker that sent the update does not matter any more.
        await self._settled.wait()
        if self._held and (self._summed or not self._is_exact()):
            await self._sum_held()

    @property
    def only(self) -> Update | None:
        """The one update that the sum is of, if its payload is the mean; to be asked once it is settled.

        That is so where the mean has the update's bits when it is formed: nothing is below the unit of the sums. In 8
        or 4 bits the mean would be rounded once more, for nothing.
        """
        if self._summed or len(self._held) != 1 or self._held[0].unit < FINEST:
            return None
        return self._held[0]

    async def encode_mean(
        self, payload: Tensor, *, round: int, known: Tensor | None = None, lost: Tensor | None = None
    ) -> None:
        """Write the mean into a payload; once it is settled and something was added. See ``MeanPlace``."""
        held = [] if self._summed else [_addend(one) for one in self._held]
        await self._work.encode(held, MeanPlace(payload, round, known, lost))

    async def reopen(self) -> None:
        """Begin anew, in the same memory."""
        self._held = []
        if self._summed:
            await self._work.clear()
        self._summed = False
        self._bound = 0.0
        self.weight = 0

    def _is_exact(self) -> bool:
        pieces = range(len(self.pieced.pieces))
        return all(is_exact((one.weight, one.extents[index]) for one in self._held) for index in pieces)

    async def _sum_held(self) -> None:
        held, self._held = self._held, []
        self._summed = True
        await self._work.add([_addend(one) for one in held])


def _addend(update: Update) -> Addend:
    return Addend(update.payload, update.weight, update.extents)
