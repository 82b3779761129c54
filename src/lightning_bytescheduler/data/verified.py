"""Which chunks were found to be right: once for all processes that read for a rank, not once in each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from lightning_bytescheduler.data.chunks import ChunkPlan

__all__ = ["ChunkSeals", "VerifiedChunks", "right_chunks"]

_LEAST, _MOST = 2**6, 2**20  # marks, of 8 bytes
_MARK = 2**63 - 1
_STEP = 0x9E3779B97F4A7C15  # odd: neighbours have marks that have nothing in common


class VerifiedChunks:
    """Marks of chunks in shared memory, which processes inherit that are forked or sent this object.

    A mark depends on the chunk and on the file that it was seen in, so that a file that changes has none. Where two
    chunks have the same place, the later one takes it, and the earlier is verified again; nobody waits for anybody.

    Args:
        chunks: How many there are, about.
    """

    def __init__(self, chunks: int) -> None:
        places = min(max(1 << (2 * chunks - 1).bit_length(), _LEAST), _MOST) if chunks > 0 else _LEAST
        self._marks = torch.zeros(places, dtype=torch.int64)
        with contextlib.suppress(RuntimeError, OSError):  # without shared memory each process verifies for itself
            self._marks.share_memory_()

    def of(self, *identity: Any) -> ChunkSeals:
        """The marks of a slice's chunks.

        Args:
            identity: Of the slice and of the file that it is in, of texts and numbers.
        """
        return ChunkSeals(self._marks.numpy(), repr(identity).encode())


class ChunkSeals:
    """The marks of the chunks of one slice in one file."""

    def __init__(self, marks: npt.NDArray[np.int64], identity: bytes) -> None:
        self._marks = marks
        number = xxhash.xxh3_128_intdigest(identity)
        self._place, self._mark = number >> 64, number

    def is_set(self, chunk: int) -> bool:
        """Whether some process has found a chunk to be right."""
        return bool(self._marks[self._place_of(chunk)] == self._mark_of(chunk))

    def set(self, chunk: int) -> None:
        """A chunk is right."""
        self._marks[self._place_of(chunk)] = self._mark_of(chunk)

    def _place_of(self, chunk: int) -> int:
        return (self._place + chunk) & (len(self._marks) - 1)

    def _mark_of(self, chunk: int) -> int:
        return (self._mark + chunk * _STEP) & _MARK | 1


def right_chunks(
    content: memoryview, plan: ChunkPlan, first: int = 0, *, seals: ChunkSeals | None = None, together: bool = False
) -> Iterator[memoryview]:
    """The chunks of a slice whose bytes are all here, without a copy; ends before one that is damaged.

    Args:
        content: The slice's bytes.
        plan: Its chunks.
        first: Number of the first chunk that is wanted.
        seals: Chunks that need not be verified again; kept up to date.
        together: Yield them in one piece.
    """
    begin = plan.bounds(first)[0]
    for number in range(first, plan.count):
        start, stop = plan.bounds(number)
        if seals is None or not seals.is_set(number):
            if not plan.is_right(number, content[start:stop]):
                if together and begin < start:
                    yield content[begin:start]
                return
            if seals is not None:
                seals.set(number)
        if not together:
            yield content[start:stop]
    if together and begin < plan.size:
        yield content[begin : plan.size]
