"""The check of an update while it comes in: its digest, and how large and how fine its numbers are."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from torch import Tensor

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.coordinator.extents import Extent
from lightning_bytescheduler.coordinator.pieces import PiecedFormat
from lightning_bytescheduler.coordinator.spool import view_of

__all__ = ["Inspection"]

_AT_ONCE = 1 << 23  # bytes


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
            self._job = asyncio.get_running_loop().run_in_executor(self._executor, self._check, filled)

    async def finish(self) -> tuple[str, list[Extent]]:
        """The digest in hexadecimal digits, and the extent of each piece: infinite if a number is not finite."""
        if self._job is not None:
            await self._job
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._check, self._payload.numel())
        return self._hash.hexdigest(), self._extents

    def _check(self, filled: int) -> None:
        self._hash.update(view_of(self._payload)[self._hashed : filled])
        self._hashed = filled
        pieced, extents = self._pieced, self._extents
        while len(extents) < len(pieced.pieces) and pieced.end_of(len(extents)) <= filled:
            extents.append(pieced.extent(self._payload, len(extents)))
