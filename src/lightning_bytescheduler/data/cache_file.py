"""A slice in the cache: one file, the slice's bytes and behind them a footer with the digests of its chunks.

The footer lets bytes be verified that a source without an index gave, and the file is complete or absent: it is
written under another name, made durable and renamed. Whoever uses a file holds a shared lock on it, which ends with
the process however it dies; what is not locked may be deleted.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator

from lightning_bytescheduler.data.chunks import ChunkPlan
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.data.verified import ChunkSeals, right_chunks

__all__ = ["CachedSlice", "GrowingSlice", "cache_name", "file_bytes", "footer", "lock_file"]

_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"LBSslic1"


def cache_name(slice_: Slice, version: str) -> str:
    """The name of a slice's file in the cache, without its suffix; other contents have another name."""
    identity = repr((slice_.url, slice_.start, slice_.size, slice_.checksum, "" if slice_.checksum else version))
    return hashlib.sha256(identity.encode()).hexdigest()[:40]


def file_bytes(plan: ChunkPlan) -> int:
    """Bytes that a slice takes in the cache."""
    return plan.size + 8 * plan.count + _TRAILER.size


def footer(plan: ChunkPlan, digests: bytes) -> bytes:
    """What follows the slice's bytes."""
    return digests + _TRAILER.pack(_MAGIC, plan.size, plan.chunk_bytes)


def lock_file(descriptor: int, *, exclusive: bool) -> bool:
    """Lock a file if that is possible at once; whether it was."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class CachedSlice:
    """A complete slice that stays in the cache as long as this is open.

    Args:
        descriptor: Of the file, with a shared lock; owned from now on.
        plan: The slice's chunks.

    Raises:
        ValueError: If the file is damaged.
    """

    def __init__(self, descriptor: int, plan: ChunkPlan) -> None:
        self._descriptor = descriptor
        size = os.fstat(descriptor).st_size
        tail = b""
        if size == file_bytes(plan):
            tail = os.pread(descriptor, size - plan.size, plan.size)
        digests = tail[: -_TRAILER.size]
        if len(tail) != size - plan.size or tail != footer(plan, digests):
            self.close()
            raise ValueError("The file is not what was written.")
        # The index's digests count; the footer's are all there is without one.
        self.plan = (
            plan
            if plan.digests is not None
            else ChunkPlan(size=plan.size, chunk_bytes=plan.chunk_bytes, digests=digests)
        )

    def chunks(self, first: int, *, seals: ChunkSeals | None = None, together: bool = False) -> Iterator[memoryview]:
        """Verified chunks from number ``first`` on, in mapped memory; ends before a chunk that is damaged.

        Args:
            first: The first chunk.
            seals: Chunks that need not be verified again.
            together: Yield them in one piece.
        """
        if not self.plan.size:
            return
        # Private: a reader may write into what it gets, and neither the file nor others notice.
        content = memoryview(mmap.mmap(self._descriptor, self.plan.size, access=mmap.ACCESS_COPY))
        yield from right_chunks(content, self.plan, first, seals=seals, together=together)

    @property
    def inode(self) -> int:
        """Tells the file from another one of the same name."""
        return os.fstat(self._descriptor).st_ino

    def close(self) -> None:
        """Allow that the slice is deleted; its chunks that are still in use stay as they are."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class GrowingSlice:
    """A slice that someone is writing into the cache, perhaps another process.

    Args:
        descriptor: Of the file; owned from now on.
        plan: The slice's chunks.
    """

    def __init__(self, descriptor: int, plan: ChunkPlan) -> None:
        self._descriptor = descriptor
        self._plan = plan

    def chunk(self, number: int) -> bytearray | None:
        """Chunk ``number`` if it has been written, or None."""
        start, stop = self._plan.bounds(number)
        if os.fstat(self._descriptor).st_size < stop:
            return None
        content = bytearray(stop - start)
        length = os.preadv(self._descriptor, [content], start)
        return content if length == len(content) and self._plan.is_right(number, content) else None

    @property
    def is_gone(self) -> bool:
        """Whether the file has been deleted, so that nothing more will be written that others can see."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
