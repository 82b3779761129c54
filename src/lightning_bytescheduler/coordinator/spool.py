"""Room for bodies of requests while they come in: in memory as long as there is some, else in files; bounded together.

What is taken is given back when the :class:`Spooled` is closed. Files have no name from the moment that they are
opened, so that nothing is left of a process that is killed.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import sys
import tempfile
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError

_SMALL = 1 << 16  # always in memory: many small ones are no load, and each file costs more than that
_LARGE = 1 << 22  # bytes from which on buffers are used again
_FREE = 3  # of other lengths, as of another fragment, that are kept


def _references(arrays: list[Any]) -> list[int]:
    """How many there are to each; with those of the list, the loop and the call, whose number is Python's affair."""
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([object()])[0]


def view_of(payload: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy."""
    array: Any = payload.numpy()  # numpy's types do not say that it is a buffer
    return memoryview(array)


class BufferPool:
    """Large buffers that are used again: the first touch of fresh memory costs as much as all that is done in it.

    One is free again when the last tensor and view of it is gone. For any thread. NumPy makes them, as it asks the
    system for large pages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: list[Any] = []

    def take(self, length: int) -> Tensor:
        """A buffer of so many bytes, which hold anything."""
        if length < _LARGE:
            return torch.empty(length, dtype=torch.uint8)
        with self._lock:
            free = []
            for array, references in zip(self._arrays, _references(self._arrays), strict=True):
                if references == _UNUSED:
                    if array.nbytes == length:
                        return torch.from_numpy(array)
                    free.append(id(array))
            dropped = set(free[:-_FREE])
            self._arrays = [array for array in self._arrays if id(array) not in dropped]
            made = np.empty(length, dtype=np.uint8)
            self._arrays.append(made)
            return torch.from_numpy(made)


class Spooled:
    """A body of known length, filled from the front.

    Args:
        spool: Whose room it takes.
        length: In bytes.
        in_memory: Whether of the memory's share.
    """

    def __init__(self, spool: Spool, length: int, *, in_memory: bool) -> None:
        self._spool = spool
        self._in_memory = in_memory
        self._length = length
        self._closed = False
        if in_memory:
            self.payload = spool.buffers.take(length)
        else:
            with tempfile.TemporaryFile(prefix="bytescheduler-") as file:
                _reserve(file.fileno(), length)
                self.payload = torch.frombuffer(mmap.mmap(file.fileno(), length), dtype=torch.uint8)
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
        self._spool.give_back(self._length, in_memory=self._in_memory)


def _reserve(file: int, length: int) -> None:
    """Make a file that long, on blocks that are its own: in a file with holes, a disk that is full later is a SIGBUS.

    Raises:
        OSError: If there is no room on the disk.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, length)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    os.ftruncate(file, length)


class Spool:
    """Bounded room. For one event loop.

    Args:
        limit: Bytes of all together; a larger body is taken alone.
        memory: Of these, in memory.
    """

    def __init__(self, *, limit: int, memory: int) -> None:
        self._limit = limit
        self._memory_limit = min(memory, limit)
        self._taken = 0
        self._in_memory = 0
        self.buffers = BufferPool()
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
            OSError: If a file cannot be made.
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
                    "that are not merged yet."
                ) from None
        in_memory = length <= _SMALL or self._in_memory + length <= self._memory_limit
        self._taken += length
        self._in_memory += length * in_memory
        try:
            return Spooled(self, length, in_memory=in_memory)
        except BaseException:
            self.give_back(length, in_memory=in_memory)
            raise

    def give_back(self, length: int, *, in_memory: bool) -> None:
        """Room is free again."""
        self._taken -= length
        self._in_memory -= length * in_memory
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)
