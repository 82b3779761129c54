"""Where the reading of a slice stands, and the reading of one in a file of this machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from lightning_bytescheduler.data.chunks import Bytes, ChunkPlan
from lightning_bytescheduler.data.slice import Slice

__all__ = ["FileStamp", "Reading", "mapped_chunks"]

FileStamp = tuple[int, int, int, int]
"""Device, inode, size and time of the last change: what differs when a file is not the same."""


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


def mapped_chunks(reading: Reading, path: str, verified: dict[str, FileStamp]) -> Iterator[Bytes]:
    """Verified chunks of a slice in a file of this machine, without a copy; ends before what is missing or damaged.

    A slice is verified once, and again when its file changes: it is the user's own file, and nothing is between it and
    the memory that it is mapped into.

    Args:
        reading: Where the reading stands.
        path: Of the file.
        verified: Files as they were when a slice was verified, by the slice's key; kept up to date.
    """
    slice_ = reading.slice
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            if not slice_.size or about.st_size < slice_.start + slice_.size:
                return
            before = slice_.start % mmap.ALLOCATIONGRANULARITY
            length = before + slice_.size
            # Private: a reader may write into what it gets, and neither the file nor others notice.
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=slice_.start - before)
    except OSError:
        return
    content = memoryview(mapped)[before:]
    stamp = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
    is_verified = verified.get(slice_.key) == stamp
    while not reading.is_over:
        start, stop = reading.plan.bounds(reading.next)
        chunk = content[start:stop]
        if not is_verified and not reading.plan.is_right(reading.next, chunk):
            return
        yield reading.got(chunk)
    verified[slice_.key] = stamp
