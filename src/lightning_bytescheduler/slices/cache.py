"""The cache of slices: a folder on this machine, bounded in bytes, shared by its processes.

A slice is one file, complete or absent: it is written under another name, synced and renamed. A user of a file holds a
shared lock on it; files without a lock may be deleted.

Adding and deleting files needs the folder's lock, which is held for a listing, never for a transfer. All locks are the
kernel's and end with their process. So no process waits for a dead one, and an incomplete file without a lock is a
leftover. Lock order: the folder's, then a file's; a file's lock is never waited for.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.slices.slice import Bytes, Slice

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


_COMPLETE = ".slice"
_PARTIAL = ".partial"
_LOCK_NAME = "cache.lock"
_LOCK_SECONDS = 60.0  # for listing and deleting, by any number of processes
_POLL_SECONDS = 0.002


class CacheFull(Exception):
    """The cache has no room for a slice now, as slices in use fill it. The slice can be read without the cache."""


class DiskFailed(CacheFull):
    """The cache cannot be written: its disk is full or broken."""


class SliceCache:
    """Slices on this machine's disk.

    Args:
        folder: Created if missing. Leftovers of processes that died while writing are deleted.

    Raises:
        OptionError: If the capacity is not positive, or the folder cannot be created or written.
        UnsupportedError: If its file system, or this system, has no file locks.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int) -> None:
        self.folder = Path(folder).absolute()
        self.capacity_bytes = require_whole("cache", capacity_bytes, 1)
        if fcntl is None:
            raise UnsupportedError(
                "A cache of slices needs file locks as Linux and macOS have them: copy the slices to this machine, or "
                "train in WSL."
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._require_locks()
        except OSError as error:
            reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
            allowed = f"a folder of this machine that can be made and written, but {reason}"
            raise OptionError("cache", os.fspath(folder), allowed) from error
        with self.locked():
            for path, _, _ in self._files(_PARTIAL):
                _delete_unused(path)

    def has(self, slice_: Slice) -> bool:
        """Whether a slice is in the cache."""
        return self.path_of(slice_).exists()

    def find(self, slice_: Slice) -> CachedSlice | None:
        """Open a slice, which keeps it in the cache; ``None`` if it is absent."""
        try:
            descriptor = os.open(self.path_of(slice_), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        # A process locks a file before it deletes it. So either the file stays, or its deletion is seen here.
        if not lock_file(descriptor, exclusive=False) or os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return None
        os.utime(descriptor)  # notes the time of last use
        cached = CachedSlice(descriptor, slice_)
        if os.fstat(descriptor).st_size == slice_.size:
            return cached
        self.discard(cached)
        cached.close()
        return None

    def follow(self, slice_: Slice) -> GrowingSlice | None:
        """Open a slice that is being written; ``None`` if there is none."""
        try:
            return GrowingSlice(os.open(self.partial_of(slice_), os.O_RDONLY | os.O_CLOEXEC), slice_)
        except FileNotFoundError:
            return None

    def begin(self, slice_: Slice) -> SliceWriter | None:
        """Begin to write a slice; ``None`` if it is present, or a living process is writing it.

        Raises:
            CacheFull: If there is no room without deleting slices in use.
            DiskFailed: If the folder cannot be used.
        """
        try:
            return self._begin(slice_)
        except OSError as error:
            raise DiskFailed(f"The cache cannot be used: {error}") from error

    def _begin(self, slice_: Slice) -> SliceWriter | None:
        partial = self.partial_of(slice_)
        with self.locked():
            if self.has(slice_) or (partial.exists() and not _delete_unused(partial)):
                return None
            needed = slice_.size
            used = sum(size for _, size, _ in self._files(_COMPLETE))
            # Slices being written count with their final size.
            used += sum(int(path.stem.rpartition("-")[2]) for path, _, _ in self._files(_PARTIAL))
            excess = used + needed - self.capacity_bytes
            if excess > 0 and self._evict(excess) < excess:
                raise CacheFull(f"The cache in {self.folder} has no room for {needed} bytes beside what is in use.")
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            lock_file(descriptor, exclusive=True)
        return SliceWriter(self, descriptor, slice_)

    def discard(self, damaged: CachedSlice) -> None:
        """Delete a slice that turned out to be damaged."""
        path = self.path_of(damaged.slice)
        with self.locked(), suppress(FileNotFoundError):
            if path.stat().st_ino == damaged.inode:  # otherwise another process has fetched it again
                path.unlink()

    def make_room(self, size: int) -> bool:
        """Delete unused slices, as the disk is full before the cache's limit; returns whether any was deleted."""
        with self.locked():
            return self._evict(size, partly=True) > 0

    def _evict(self, excess: int, *, partly: bool = False) -> int:
        """Delete slices of ``excess`` bytes in all, longest unused first; none if slices in use prevent that."""
        unused, freed = [], 0
        with ExitStack() as held:
            for path, size, _ in sorted(self._files(_COMPLETE), key=lambda file: file[2]):
                if freed < excess and held.enter_context(_unused(path)):
                    unused.append(path)
                    freed += size
            if freed < excess and not partly:
                return 0
            for path in unused:
                path.unlink()
        return freed

    def _files(self, suffix: str) -> list[tuple[Path, int, float]]:
        with os.scandir(self.folder) as entries:
            found = [(Path(entry.path), entry.stat()) for entry in entries if entry.name.endswith(suffix)]
        return [(path, about.st_size, about.st_mtime) for path, about in found]

    def path_of(self, slice_: Slice) -> Path:
        """Path of a complete slice."""
        return self.folder / f"{slice_.name}{_COMPLETE}"

    def partial_of(self, slice_: Slice) -> Path:
        """Path of a slice while it is written; its name has the final size."""
        return self.folder / f"{slice_.name}-{slice_.size}{_PARTIAL}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock."""
        from filelock import FileLock  # comes with torch

        # A new lock object each time, so that a forked process cannot inherit a locked one.
        lock = FileLock(self.folder / _LOCK_NAME, thread_local=False)
        with lock.acquire(timeout=_LOCK_SECONDS, poll_interval=_POLL_SECONDS):
            yield

    def _require_locks(self) -> None:
        path = self.folder / f".probe-{os.getpid()}-{threading.get_ident()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock_file(descriptor, exclusive=True)
        except OSError as error:
            raise UnsupportedError(
                f"The file system of {self.folder} has no file locks ({error}), which the cache of slices needs. "
                "Choose a folder on a disk of this machine."
            ) from error
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)


class GrowingSlice:
    """A slice that a process is writing into the cache.

    Args:
        descriptor: Descriptor of the file; owned from now on.
    """

    def __init__(self, descriptor: int, slice_: Slice) -> None:
        self._descriptor = descriptor
        self.slice = slice_

    def chunk(self, number: int) -> bytearray | None:
        """Return chunk ``number`` if it has been written, or ``None``."""
        start, stop = self.slice.bounds(number)
        if os.fstat(self._descriptor).st_size < stop:
            return None
        content = bytearray(stop - start)
        length = os.preadv(self._descriptor, [content], start)
        return content if length == len(content) and self.slice.is_right(number, content) else None

    @property
    def inode(self) -> int:
        """Distinguishes the file from another one of the same name."""
        return os.fstat(self._descriptor).st_ino

    def close(self) -> None:
        """Close the file, so that the slice may be deleted; chunks in use stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class CachedSlice(GrowingSlice):
    """A complete slice that stays in the cache while this is open, by a shared lock on its file."""

    def chunks(self, first: int, *, together: bool = False) -> Generator[memoryview, None, int]:
        """Yield verified chunks from number ``first`` on, in mapped memory; see ``Slice.right_chunks``."""
        if not self.slice.size:
            return 0
        # A private mapping: a reader that writes to its chunks changes neither the file nor other readers' chunks.
        content = memoryview(mmap.mmap(self._descriptor, self.slice.size, access=mmap.ACCESS_COPY))
        return (yield from self.slice.right_chunks(content, first, together=together))


class SliceWriter(GrowingSlice):
    """A slice that is being written. Readers may follow it; it is part of the cache once committed.

    Args:
        descriptor: Descriptor of the new file, with an exclusive lock while the writer lives; owned from now on.
    """

    def __init__(self, cache: SliceCache, descriptor: int, slice_: Slice) -> None:
        super().__init__(descriptor, slice_)
        self._cache = cache
        self._written = 0

    def write(self, chunk: Bytes) -> None:
        """Write the next chunk.

        Raises:
            DiskFailed: If the disk is full of slices in use, or broken.
        """
        view = memoryview(chunk)
        while view:
            try:
                length = os.pwrite(self._descriptor, view, self._written)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT) and self._cache.make_room(len(view)):
                    continue
                raise DiskFailed(f"The cache cannot be written: {error}") from error
            self._written += length
            view = view[length:]

    def commit(self) -> CachedSlice:
        """Make the slice durable and visible. It stays open, and so stays in the cache.

        Raises:
            DiskFailed: If that fails.
        """
        try:
            os.fsync(self._descriptor)
            with self._cache.locked():  # during the renaming the file is briefly unlocked
                fcntl.flock(self._descriptor, fcntl.LOCK_SH)
                self._cache.partial_of(self.slice).rename(self._cache.path_of(self.slice))
            folder = os.open(self._cache.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise DiskFailed(f"The cache cannot be written: {error}") from error
        descriptor, self._descriptor = self._descriptor, -1
        return CachedSlice(descriptor, self.slice)

    def abandon(self) -> None:
        """Delete what was written; does nothing after a commit."""
        if self._descriptor < 0:
            return
        # If that fails, the closed file is a leftover, which the next process deletes.
        with suppress(OSError), self._cache.locked():
            self._cache.partial_of(self.slice).unlink(missing_ok=True)
        self.close()


def lock_file(descriptor: int, *, exclusive: bool) -> bool:
    """Lock a file without waiting; returns whether it was locked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Lock a file against use; yields whether it is unused."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield lock_file(descriptor, exclusive=True)
    finally:
        os.close(descriptor)


def _delete_unused(path: Path) -> bool:
    with _unused(path) as is_unused:
        if is_unused:
            path.unlink()
    return is_unused
