"""Room in memory for bodies of requests while they come in, and until they are added; bounded together.

What is taken is given back when the :class:`Spooled` is closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError


def view_of(payload: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy."""
    array: Any = payload.numpy()  # numpy's types do not say that it is a buffer
    return memoryview(array)


def buffer_of(length: int) -> Tensor:
    """So many bytes, which hold anything. NumPy makes them, as it asks the system for large pages."""
    return torch.from_numpy(np.empty(length, dtype=np.uint8))


class Spooled:
    """A body of known length, filled from the front.

    Args:
        spool: Whose room it takes.
        length: In bytes.
    """

    def __init__(self, spool: Spool, length: int) -> None:
        self._spool = spool
        self._length = length
        self._closed = False
        self.payload = buffer_of(length)
        self._view = view_of(self.payload)
        self.filled = 0

    def write(self, chunk: bytes) -> None:
        """Append.

        Raises:
            OptionError: If it is more than was announced.
        """
        end = self.filled + len(chunk)
        if end > self._length:
            raise OptionError("body", f"{end} bytes", f"{self._length} bytes, as announced")
        self._view[self.filled : end] = chunk
        self.filled = end

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there."""
        return self.filled == self._length

    def close(self) -> None:
        """Give the room back; may be repeated. Who still works on the payload keeps its memory until then."""
        if self._closed:
            return
        self._closed = True
        self._view = memoryview(b"")
        self.payload = torch.empty(0, dtype=torch.uint8)
        self._spool.give_back(self._length)


class Spool:
    """Bounded room. For one event loop.

    Args:
        limit: Bytes of all together; a larger body is taken alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def taken(self) -> int:
        """Bytes that are taken now."""
        return self._taken

    async def room_for(self, length: int, *, timeout: float) -> Spooled:
        """Take room, or wait for some.

        Args:
            length: In bytes.
            timeout: Longest wait in seconds.

        Raises:
            SchedulerTimeoutError: If there is not enough in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self._taken and self._taken + length > self._limit:
            changed = loop.create_future()
            self._waiting.append(changed)
            try:
                await asyncio.wait_for(changed, deadline - loop.time())
            except (TimeoutError, asyncio.TimeoutError):
                raise SchedulerTimeoutError(
                    f"There is no room for {length} bytes more: {self._taken} of {self._limit} are taken by updates "
                    "that are not added yet."
                ) from None
        spooled = Spooled(self, length)
        self._taken += length
        return spooled

    def give_back(self, length: int) -> None:
        """Room is free again."""
        self._taken -= length
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)
