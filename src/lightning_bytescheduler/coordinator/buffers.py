"""Large buffers that are used again: the first touch of fresh memory costs as much as all that is done in it."""

from __future__ import annotations

import mmap
import sys
import threading
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["LARGE", "BufferPool"]

LARGE = 1 << 22
"""Bytes from which on buffers are used again."""
_REFERENCES = 3  # to an array that nobody uses: the pool's, the loop's, and the call's that counts them


class BufferPool:
    """Buffers of bytes. One is free again when the last tensor and view of it is gone. For any thread.

    NumPy makes them, as it asks the system for large pages.

    Args:
        most: That are kept when they are free.
    """

    def __init__(self, most: int = 3) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._arrays: list[Any] = []

    def reuses(self, length: int) -> bool:
        """Whether buffers of so many bytes are used again."""
        return length >= LARGE

    def take(self, length: int) -> Tensor:
        """A buffer of so many bytes, which hold anything."""
        if not self.reuses(length):
            return torch.empty(length, dtype=torch.uint8)
        with self._lock:
            free = []
            for array in self._arrays:
                if sys.getrefcount(array) == _REFERENCES:
                    if array.nbytes == length:
                        return torch.from_numpy(array)
                    free.append(id(array))
            # Of other lengths, as of another fragment, the last ones are kept.
            dropped = set(free[: -self._most]) if len(free) > self._most else set()
            self._arrays = [array for array in self._arrays if id(array) not in dropped]
            made = self._make(length)
            self._arrays.append(made)
            return torch.from_numpy(made)

    def _make(self, length: int) -> Any:
        """Memory of so many bytes, as an array."""
        return np.empty(length, dtype=np.uint8)

    def of_file(self, file: IO[bytes], length: int) -> Tensor:
        """The first bytes of a file, which this is the only use of, as a buffer; the file may be closed."""
        return torch.frombuffer(mmap.mmap(file.fileno(), length), dtype=torch.uint8)
