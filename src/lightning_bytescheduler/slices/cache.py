"""The cache of slices: a folder on this machine, bounded in bytes, shared by its processes.

A slice is one file, complete or absent: it is written under another name, synced and renamed. A user of a file holds a
shared lock on it; files without a lock may be deleted.

Adding and deleting files needs the folder's lock, which is held for a listing, never for a transfer. All locks are the
kernel's and end with their process. So no process waits for a dead one, and an incomplete file without a lock is a
leftover. Lock order: the folder's, then a file's; a file's lock is never waited for.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.slices.slice import Bytes, Chunks, Slice

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

    def find(self, slice_: Slice) -> SliceFile | None:
        """Open a slice, which a shared lock keeps in the cache until it is closed; ``None`` if it is absent."""
        try:
            file = SliceFile(self.path_of(slice_), "r+", slice_)
        except FileNotFoundError:
            return None
        # A process locks a file before it deletes it. So either the file stays, or its deletion is seen here.
        if not lock_file(file, exclusive=False) or os.fstat(file.fileno()).st_nlink == 0:
            file.close()
            return None
        os.utime(file.fileno())  # notes the time of last use
        if os.fstat(file.fileno()).st_size == slice_.size:
            return file
        file.close()
        self.discard(slice_)
        return None

    def follow(self, slice_: Slice) -> SliceFile | None:
        """Open a slice that is being written; ``None`` if there is none."""
        try:
            return SliceFile(self.partial_of(slice_), "r", slice_)
        except FileNotFoundError:
            return None

    def begin(self, slice_: Slice) -> SliceWriter | None:
        """Begin to write a slice; ``None`` if it is present, or a living process is writing it.

        Raises:
            CacheFull: If there is no room without deleting slices in use.
            DiskFailed: If the folder cannot be used, or its disk is full of other files.
        """
        partial, needed = self.partial_of(slice_), slice_.size
        with _on_disk(), self.locked():
            if self.has(slice_) or (partial.exists() and not _delete_unused(partial)):
                return None
            used = sum(size for _, size, _ in self._files(_COMPLETE))
            # Slices being written count with their final size, here and on the disk, which others fill too.
            growing = [(int(path.stem.rpartition("-")[2]), size) for path, size, _ in self._files(_PARTIAL)]
            room = self.capacity_bytes - used - sum(final for final, _ in growing)
            free = shutil.disk_usage(self.folder).free - sum(final - size for final, size in growing)
            excess = needed - min(room, free)
            if excess > 0 and self._evict(excess) < excess:
                why = f"{self.folder} has no room for {needed} bytes beside what is in use"
                raise DiskFailed(f"The disk of {why}.") if free < room else CacheFull(f"The cache in {why}.")
            file = SliceFile(partial, "x+", slice_)
            lock_file(file, exclusive=True)
        return SliceWriter(self, file)

    def discard(self, slice_: Slice) -> None:
        """Delete a slice that turned out to be damaged; those who read it keep the file."""
        with self.locked():
            self.path_of(slice_).unlink(missing_ok=True)

    def make_room(self, size: int) -> bool:
        """Delete slices that are not in use, of ``size`` bytes in all; returns whether there were such."""
        with self.locked():
            return self._evict(size) >= size

    def _evict(self, excess: int) -> int:
        """Delete slices of ``excess`` bytes in all, longest unused first; none if slices in use prevent that."""
        unused, freed = [], 0
        with ExitStack() as held:
            for path, size, _ in sorted(self._files(_COMPLETE), key=lambda file: file[2]):
                if freed < excess and held.enter_context(_unused(path)):
                    unused.append(path)
                    freed += size
            for path in unused if freed >= excess else ():
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
        with tempfile.TemporaryFile(dir=self.folder) as probe:
            try:
                lock_file(probe, exclusive=True)
            except OSError as error:
                raise UnsupportedError(
                    f"The file system of {self.folder} has no file locks ({error}), which the cache of slices needs. "
                    "Choose a folder on a disk of this machine."
                ) from error


class SliceFile(FileIO):
    """A slice in a file, which may still grow. Its chunks are verified as they are read.

    They are read and not mapped: a process ends at once where a file that it has mapped becomes shorter.
    """

    def __init__(self, path: str | Path, mode: str, slice_: Slice) -> None:
        super().__init__(path, mode)
        self.slice = slice_

    def chunk(self, number: int, memory: memoryview | None = None) -> Bytes | None:
        """Return chunk ``number``, or ``None`` if it is missing or damaged, or cannot be read.

        If the memory of a whole slice is given, the chunk is read into its place there, and is a view of it.
        """
        start, stop = self.slice.bounds(number)
        content = bytearray(stop - start) if memory is None else memory[start:stop]
        try:
            self.seek(start)
            length = self.readinto(content)
        except OSError:
            return None
        return content if length == len(content) and self.slice.is_right(number, content) else None

    def chunks(self, number: int = 0, memory: memoryview | None = None) -> Chunks:
        """Yield chunks from a number on; ends before one that is missing or damaged. See :meth:`chunk`."""
        while number < self.slice.count and (chunk := self.chunk(number, memory)) is not None:
            number += 1
            yield chunk
        return number


class SliceWriter:
    """A slice that is being written. Readers may follow it; it is part of the cache once committed.

    Args:
        file: The new file, with an exclusive lock while the writer lives; owned from now on.
    """

    def __init__(self, cache: SliceCache, file: SliceFile) -> None:
        self._cache = cache
        self._file = file
        self._written = 0
        self._is_done = False

    def write(self, chunk: Bytes) -> None:
        """Write the next chunk, in place of slices that are not in use where the disk, or a user's quota, is full.

        Raises:
            DiskFailed: If the disk is full of what is in use, or broken.
        """
        view = memoryview(chunk)
        with _on_disk():
            while view:
                try:
                    length = os.pwrite(self._file.fileno(), view, self._written)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._cache.make_room(len(view)):
                        raise
                else:
                    self._written += length
                    view = view[length:]

    def commit(self) -> SliceFile:
        """Make the slice durable and visible. It stays open, and so stays in the cache.

        Raises:
            DiskFailed: If that fails.
        """
        with _on_disk():
            os.fsync(self._file.fileno())
            with self._cache.locked():  # during the renaming the file is briefly unlocked
                fcntl.flock(self._file, fcntl.LOCK_SH)
                self._cache.partial_of(self._file.slice).rename(self._cache.path_of(self._file.slice))
        self._is_done = True
        return self._file

    def abandon(self) -> None:
        """Delete what was written; does nothing after a commit."""
        if self._is_done:
            return
        self._is_done = True
        # If that fails, the closed file is a leftover, which the next process deletes.
        with suppress(OSError), self._cache.locked():
            self._cache.partial_of(self._file.slice).unlink(missing_ok=True)
        self._file.close()


@contextmanager
def _on_disk() -> Iterator[None]:
    """Raise errors of the disk as DiskFailed."""
    try:
        yield
    except OSError as error:
        raise DiskFailed(f"The cache cannot be used: {error}") from error


def lock_file(file: IO[bytes] | FileIO, *, exclusive: bool) -> bool:
    """Lock a file without waiting; returns whether it was locked."""
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Lock a file against use; yields whether it is unused."""
    with FileIO(path, "r+") as file:
        yield lock_file(file, exclusive=True)


def _delete_unused(path: Path) -> bool:
    with _unused(path) as is_unused:
        if is_unused:
            path.unlink()
    return is_unused
