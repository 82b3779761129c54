"""Where the reading of a slice stands, and the reading of one in a file of this machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from lightning_bytescheduler.data.chunks import Bytes, ChunkPlan
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.data.verified import VerifiedChunks, right_chunks

__all__ = ["Reading", "mapped_chunks"]


class Reading:
    """Where the reading of a slice stands.

    Args:
        slice_: What is read.
        plan: Its chunks.
        together: Hand over as many chunks as there are in one piece: for readers that take the whole slice anyway.
        epoch: In which chunks in the cache are verified once; None verifies them at every reading.

    Attributes:
        slice: What is read.
        plan: Its chunks.
        together: As given.
        epoch: As given.
        next: Number of the next chunk.
        waited: Seconds since the last chunk came.
        stalled: Seconds that were waited for chunks, in all.
    """

    def __init__(self, slice_: Slice, plan: ChunkPlan, *, together: bool = False, epoch: int | None = None) -> None:
        self.slice = slice_
        self.plan = plan
        self.together = together
        self.epoch = epoch
        self.next = 0
        self.waited = 0.0
        self.stalled = 0.0

    @property
    def is_over(self) -> bool:
        """Whether there is no next chunk."""
        return self.next >= self.plan.count

    def got(self, chunk: Bytes) -> Bytes:
        """Note that the next chunk is here, or several in one piece, and return it."""
        self.next += -(-len(chunk) // self.plan.chunk_bytes)
        self.waited = 0.0
        return chunk


def mapped_chunks(reading: Reading, path: str, verified: VerifiedChunks) -> Iterator[Bytes]:
    """Verified chunks of a slice in a file of this machine, without a copy; ends before what is missing or damaged.

    A chunk is verified once, and again when its file changes: it is the user's own file, and nothing is between it and
    the memory that it is mapped into.

    Args:
        reading: Where the reading stands.
        path: Of the file.
        verified: What was verified before, by whichever process of this rank.
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
    seals = verified.of(slice_.key, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
    for chunk in right_chunks(memoryview(mapped)[before:], reading.plan, seals=seals, together=reading.together):
        yield reading.got(chunk)
