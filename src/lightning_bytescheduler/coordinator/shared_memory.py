"""Buffers that the shards of a coordinator work on in place: memory without a name, handed over as a file descriptor.

Nothing has a name, so nothing is left of processes that are killed, whichever and whenever.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.buffers import BufferPool

__all__ = ["SharedBuffer", "SharedBuffers"]

_KEPT = 8  # free ones: of updates, means, residuals and decoded means


class SharedBuffer(NamedTuple):
    """What another process needs to map a buffer.

    Attributes:
        number: Tells it from all others that there ever were.
        file: Its descriptor in this process.
        length: In bytes.
    """

    number: int
    file: int
    length: int


class SharedBuffers(BufferPool):
    """A pool whose large buffers can be shared with other processes. For any thread."""

    def __init__(self) -> None:
        super().__init__(_KEPT)
        self._numbers = itertools.count(1)
        self._shared: dict[int, SharedBuffer] = {}  # by address
        self.gone: list[deque[int]] = []
        """Each gets the numbers of buffers that are there no more."""

    def shared(self, tensor: Tensor) -> SharedBuffer:
        """The buffer that a tensor is the whole of.

        Raises:
            KeyError: If it is none of this pool's large ones.
        """
        return self._shared[tensor.data_ptr()]

    def of_file(self, file: IO[bytes], length: int) -> Tensor:
        """See ``BufferPool.of_file``."""
        return torch.from_numpy(self._array(os.dup(file.fileno()), length))

    def _make(self, length: int) -> Any:
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("bytescheduler")
        else:
            with tempfile.TemporaryFile(prefix="bytescheduler-") as unnamed:
                file = os.dup(unnamed.fileno())
        os.ftruncate(file, length)
        return self._array(file, length)

    def _array(self, file: int, length: int) -> Any:
        array = np.frombuffer(mmap.mmap(file, length), dtype=np.uint8)
        address = array.ctypes.data
        buffer = self._shared[address] = SharedBuffer(next(self._numbers), file, length)
        # Called before the memory is given back, so that the address is nobody else's yet.
        weakref.finalize(array, self._forget, address, buffer).atexit = False
        return array

    def _forget(self, address: int, buffer: SharedBuffer) -> None:
        if self._shared.get(address) == buffer:
            del self._shared[address]
        os.close(buffer.file)
        for numbers in self.gone:
            numbers.append(buffer.number)
