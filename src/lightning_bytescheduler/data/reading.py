"""Where the reading of a slice stands, and the reading of one in a file of this machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from lightning_bytescheduler.data.chunks import Bytes, ChunkPlan
from lightning_bytescheduler.data.slice import Slice

__all__ = ["Reading", "mapped_chunks"]


class Reading:
    """Where the reading of a slice stands.

    Args:
        slice_: What is read.
        plan: Its chunks.

    Attributes:
        slice: What is read.
        plan: Its chunks.
        next: Number of the next chunk.
        waited: Seconds since the last chunk came.
        stalled: Seconds that were waited for chunks, in all.
    """

    def __init__(self, slice_: Slice, plan: ChunkPlan) -> None:
        self.slice = slice_
        self.plan = plan
        self.next = 0
        self.waited = 0.0
        self.stalled = 0.0

    @property
    def is_over(self) -> bool:
        """Whether there is no next chunk."""
        return self.next >= self.plan.count

    def got(self, chunk: Bytes) -> Bytes:
        """Note that the next chunk is here, and return it."""
        self.next += 1
        self.waited = 0.0
        return chunk


def mapped_chunks(reading: Reading, path: str) -> Iterator[Bytes]:
    """Verified chunks of a slice in a file of this machine, without a copy; ends before what is missing or damaged."""
    slice_ = reading.slice
    try:
        with open(path, "rb") as file:
            if not slice_.size or os.fstat(file.fileno()).st_size < slice_.start + slice_.size:
                return
            before = slice_.start % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(
                file.fileno(), before + slice_.size, access=mmap.ACCESS_COPY, offset=slice_.start - before
            )
    except OSError:
        return
    content = memoryview(mapped)[before:]
    while not reading.is_over:
        start, stop = reading.plan.bounds(reading.next)
        chunk = content[start:stop]
        if not reading.plan.is_right(reading.next, chunk):
            return
        yield reading.got(chunk)
