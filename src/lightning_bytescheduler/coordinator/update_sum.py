"""The exact sum of a round's updates, piece by piece, in several threads; the same bits in any order of arrival.

An update is checked while it comes in: its digest, and how large and how fine its numbers are. Updates are held as they
came as long as there are few: their mean is then formed in one pass, without sums in memory. When they would take more
memory than the sums do, 16 bytes for each element, all of them are added to these in one pass. What is held and what
the sums take does not depend on the number of workers. No piece depends on another: who works on which changes no bit.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.coordinator.exact_mean import Weighted, exact_mean, is_exact
from lightning_bytescheduler.coordinator.pieces import Extent, PiecedFormat
from lightning_bytescheduler.coordinator.spool import view_of
from lightning_bytescheduler.diloco.weighted_mean import FINEST, LARGEST, MOST_WEIGHT, WeightedMean
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["Inspection", "Update", "UpdateSum"]

_SUM_BYTES = 16  # of an element
_AT_ONCE = 1 << 23  # bytes that are checked together
_PIECE = "piece"
_CPU = torch.device("cpu")


class Inspection:
    """Checks one payload, in a thread beside its transfer.

    Args:
        pieced: Its format.
        payload: Filled from the front.
        executor: Of the threads.
    """

    def __init__(self, pieced: PiecedFormat, payload: Tensor, executor: Executor) -> None:
        with importing("The coordinator", extra="coordinator"):
            import xxhash
        self._pieced = pieced
        self._payload = payload
        self._executor = executor
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._extents: list[Extent] = []  # of the first pieces
        self._job: asyncio.Future[None] | None = None

    def advance(self, filled: int) -> None:
        """So many bytes are there; returns at once."""
        if filled - self._hashed >= _AT_ONCE and (self._job is None or self._job.done()):
            if self._job is not None:
                self._job.result()
            self._job = asyncio.get_running_loop().run_in_executor(self._executor, self._look, filled)

    async def finish(self) -> Update:
        """The update, once all of it is there."""
        if self._job is not None:
            await self._job
        await asyncio.get_running_loop().run_in_executor(self._executor, self._look, self._payload.numel())
        return Update(self._payload, self._extents, self._hash.hexdigest())

    def _look(self, filled: int) -> None:
        self._hash.update(view_of(self._payload)[self._hashed : filled])
        self._hashed = filled
        for index in range(len(self._extents), len(self._pieced.pieces)):
            if self._pieced.end_of(index) > filled:
                break
            self._extents.append(self._pieced.extent(self._payload, index))


class Update:
    """An update whose numbers are known.

    Args:
        payload: As it came.
        extents: Of its pieces.
        digest: Of the payload, in hexadecimal digits.
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


class _MeanPlace(NamedTuple):
    """Where a mean is written to; see ``UpdateSum.encode_mean``."""

    payload: Tensor
    round: int
    known: Tensor | None
    lost: Tensor | None


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
        self._held: list[Update] = []
        size = max(pieced.payload_bytes, 1)
        self._most_held = max(_SUM_BYTES * pieced.elements // size, 1) if pieced.is_cut else 0
        self._sums: list[WeightedMean | None] = [None] * len(pieced.pieces)
        self._locks = [threading.Lock() for _ in pieced.pieces]  # each for its piece; no other is taken under one
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
        """Write the mean; once it is settled and something was added.

        Args:
            payload: Of the whole fragment, which is written to.
            round: Whose mean it is, for its rounding.
            known: What former means have lost of the whole fragment, or ``None`` for nothing; only read, so that a
                mean can be formed once more.
            lost: What is lost with this one; ``None`` where the wire keeps none.

        Raises:
            ValueError: If nothing was added.
        """
        held = [] if self._summed else self._held
        place = _MeanPlace(payload, round, known, lost)
        await self._of_pieces(lambda index: self._encode(held, place, index))

    async def reopen(self) -> None:
        """Begin anew, in the same memory."""
        self._held = []
        if self._summed:
            await self._of_pieces(self._clear)
        self._summed = False
        self._bound = 0.0
        self.weight = 0

    def _is_exact(self) -> bool:
        pieces = range(len(self.pieced.pieces))
        return all(is_exact((one.weight, one.extents[index]) for one in self._held) for index in pieces)

    async def _sum_held(self) -> None:
        held, self._held = self._held, []
        self._summed = True
        await self._of_pieces(lambda index: self._add(held, index))

    # ── One piece, in a thread ───────────────────────────────────────────────────────────

    async def _of_pieces(self, work: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        indices = range(len(self.pieced.pieces))
        await asyncio.gather(*(loop.run_in_executor(self._executor, work, index) for index in indices))

    def _add(self, updates: Sequence[Update], index: int) -> None:
        parts = [(self.pieced.part(update.payload, index), update.weight) for update in updates]
        with self._locks[index]:
            sums = self._sums[index]
            if sums is None:
                sums = self._sums[index] = WeightedMean(
                    {_PIECE: torch.empty(self.pieced.length_of(index), dtype=torch.float32)}
                )
            sums.add_several(parts, self.pieced.wire)

    def _encode(self, held: Sequence[Update], place: _MeanPlace, index: int) -> None:
        """Write the mean of one piece: of what is held, or else of what was added."""
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

    def _residual(self, place: _MeanPlace, index: int) -> Tensor | None:
        if place.lost is None:
            return None
        start, stop = self.pieced.pieces[index]
        unsent = place.lost[start:stop]
        return unsent.zero_() if place.known is None else unsent.copy_(place.known[start:stop])

    def _clear(self, index: int) -> None:
        sums = self._sums[index]
        if sums is not None:
            sums.clear()
