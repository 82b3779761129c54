"""The check of an update while it comes in: its digest, and how large and how fine its numbers are."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from torch import Tensor

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.coordinator.extents import Extent
from lightning_bytescheduler.coordinator.pieces import PiecedFormat
from lightning_bytescheduler.coordinator.shards import Shards
from lightning_bytescheduler.coordinator.spool import view_of

__all__ = ["Inspection"]

_AT_ONCE = 1 << 23  # bytes


class Inspection:
    """Checks one payload, in a thread beside its transfer.

    Args:
        pieced: Its format.
        payload: Filled from the front.
        executor: Of the threads.
        shards: Look at the numbers of what is large, in place of the threads; ``None`` for none.
    """

    def __init__(
        self, pieced: PiecedFormat, payload: Tensor, executor: Executor, *, shards: Shards | None = None
    ) -> None:
        with importing("The coordinator", extra="coordinator"):
            import xxhash
        self._pieced = pieced
        self._payload = payload
        self._executor = executor
        self._shards = shards if shards is not None and shards.serves(pieced) else None
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._extents: list[Extent] = []  # of the first pieces
        self._job: asyncio.Future[None] | None = None

    def advance(self, filled: int) -> None:
        """So many bytes are there; returns at once."""
        if filled - self._hashed >= _AT_ONCE and (self._job is None or self._job.done()):
            if self._job is not None:
                self._job.result()
            self._job = asyncio.ensure_future(self._check(filled))

    async def finish(self) -> tuple[str, list[Extent]]:
        """The digest in hexadecimal digits, and the extent of each piece: infinite if a number is not finite."""
        if self._job is not None:
            await self._job
        await self._check(self._payload.numel())
        return self._hash.hexdigest(), self._extents

    async def _check(self, filled: int) -> None:
        loop, shards, indices = asyncio.get_running_loop(), self._shards, self._pieces(filled)
        if shards is None:
            await loop.run_in_executor(self._executor, self._look, filled, indices)
            return
        hashing = loop.run_in_executor(self._executor, self._digest, filled)
        extents, _ = await asyncio.gather(shards.extents(self._pieced, self._payload, indices), hashing)
        self._extents += extents

    def _pieces(self, filled: int) -> range:
        """Those that are complete, and were not looked at."""
        first = last = len(self._extents)
        while last < len(self._pieced.pieces) and self._pieced.end_of(last) <= filled:
            last += 1
        return range(first, last)

    def _digest(self, filled: int) -> None:
        self._hash.update(view_of(self._payload)[self._hashed : filled])
        self._hashed = filled

    def _look(self, filled: int, indices: range) -> None:
        self._digest(filled)
        self._extents += [self._pieced.extent(self._payload, index) for index in indices]
