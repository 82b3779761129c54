"""Writes one slice into the cache."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from lightning_bytescheduler.data.cache_file import CachedSlice, footer
from lightning_bytescheduler.data.chunks import Bytes, ChunkPlan, digests_of

__all__ = ["CacheFull", "DiskFailed", "SliceWriter"]


class CacheFull(Exception):
    """A slice finds no room in the cache beside what is in use; it can still be read past the cache."""


class DiskFailed(CacheFull):
    """The cache cannot be written: its disk is full of other things, or broken."""


class SliceWriter:
    """A slice that is being written; others may follow it, and it counts only once it is committed.

    Args:
        descriptor: Of the new file, locked exclusively, which says that the writer lives; owned from now on.
        partial: Where the file is.
        complete: Where it will be.
        plan: The slice's chunks.
        locked: The lock of the cache's folder.
        make_room: Deletes something from a full disk; returns whether there was anything.
    """

    def __init__(
        self,
        descriptor: int,
        partial: Path,
        complete: Path,
        plan: ChunkPlan,
        *,
        locked: Callable[[], AbstractContextManager[None]],
        make_room: Callable[[int], bool],
    ) -> None:
        self._descriptor = descriptor
        self._partial = partial
        self._complete = complete
        self._plan = plan
        self._locked = locked
        self._make_room = make_room
        self._written = 0
        self._digests: list[bytes] = []

    def write(self, chunk: Bytes) -> None:
        """Write the next chunk.

        Raises:
            DiskFailed: If the disk is full of what is in use, or broken.
        """
        self._append(chunk)
        self._digests.append(digests_of(chunk, max(len(chunk), 1)))

    def commit(self) -> CachedSlice:
        """Make the slice durable and visible; it stays open, and hence in the cache.

        Raises:
            DiskFailed: If that is not possible.
        """
        self._append(footer(self._plan, b"".join(self._digests)))
        try:
            os.fsync(self._descriptor)
            with self._locked():  # between its two names the file is for a moment not locked
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)
                self._partial.rename(self._complete)
            folder = os.open(self._complete.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise DiskFailed(f"The cache cannot be written: {error}") from error
        descriptor, self._descriptor = self._descriptor, -1
        return CachedSlice(descriptor, self._plan)

    def abandon(self) -> None:
        """Delete what was written; nothing happens after a commit."""
        if self._descriptor < 0:
            return
        try:
            with self._locked():
                self._partial.unlink(missing_ok=True)
        except OSError:
            pass  # unlocked below, it is a leftover that the next process deletes
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, content: Bytes) -> None:
        view = memoryview(content)
        while view:
            try:
                length = os.pwrite(self._descriptor, view, self._written)
            except OSError as error:
                if _is_full(error) and self._make_room(len(view)):
                    continue
                raise DiskFailed(f"The cache cannot be written: {error}") from error
            self._written += length
            view = view[length:]


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
