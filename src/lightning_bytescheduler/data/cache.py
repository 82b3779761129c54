"""The cache of slices: a folder of this machine, bounded in bytes, shared by its processes.

All that adds or deletes files is done under one lock of the folder, which is held for a listing, never for a transfer.
It and the locks on the files are the kernel's: they end with their process, so that nothing waits for a dead one, and a
file that is unlocked and not complete is a leftover. Order of locks: the folder's, then a file's; the latter are never
waited for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from lightning_bytescheduler.data.cache_file import CachedSlice, GrowingSlice, file_bytes, lock_file
from lightning_bytescheduler.data.cache_writer import CacheFull, SliceWriter
from lightning_bytescheduler.data.chunks import ChunkPlan
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = ["SliceCache"]

_COMPLETE = ".slice"
_PARTIAL = ".partial"
_LOCK_NAME = "cache.lock"
_LOCK_SECONDS = 60.0  # of listing and deleting, by however many processes
_POLL_SECONDS = 0.002


class SliceCache:
    """Slices on this machine's disk.

    Args:
        folder: Made if it is missing. What processes left there that died in mid-write is deleted.
        capacity_bytes: Bound of all slices together, those being written included.

    Raises:
        OptionError: If the capacity is not positive.
        OSError: If the folder cannot be made or written.
        UnsupportedError: If its file system has no file locks.
    """

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int) -> None:
        if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < 1:
            raise OptionError("cache_bytes", capacity_bytes, "a positive whole number of bytes")
        self.folder = Path(folder).absolute()
        self.capacity_bytes = capacity_bytes
        self._threads = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._require_locks()
        with self._locked():
            for path, _, _ in self._files(_PARTIAL):
                self._delete_unused(path)

    def names(self) -> frozenset[str]:
        """The slices that are there, wholly; any of them may be gone the next moment."""
        return frozenset(name[: -len(_COMPLETE)] for name in os.listdir(self.folder) if name.endswith(_COMPLETE))

    def has(self, name: str) -> bool:
        """Whether a slice is there now."""
        return self._complete(name).exists()

    def find(self, name: str, plan: ChunkPlan) -> CachedSlice | None:
        """Open a slice that is there, which keeps it there; or None."""
        try:
            descriptor = os.open(self._complete(name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        # Whoever deletes it has locked it first, so either it stays or it is seen to be gone.
        if not lock_file(descriptor, exclusive=False) or os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return None
        os.utime(descriptor)  # the time of its last use
        inode = os.fstat(descriptor).st_ino
        try:
            return CachedSlice(descriptor, plan)
        except ValueError:
            self._discard(name, inode)
            return None

    def follow(self, name: str, plan: ChunkPlan) -> GrowingSlice | None:
        """Open a slice that is being written; or None."""
        try:
            return GrowingSlice(os.open(self._partial(name, plan), os.O_RDONLY | os.O_CLOEXEC), plan)
        except FileNotFoundError:
            return None

    def begin(self, name: str, plan: ChunkPlan) -> SliceWriter | None:
        """Begin to write a slice; None if it is there, or being written by someone who lives.

        Raises:
            CacheFull: If there is no room that could be made without deleting what is in use.
            OSError: If the folder cannot be used.
        """
        partial = self._partial(name, plan)
        with self._locked():
            if self._complete(name).exists() or (partial.exists() and not self._delete_unused(partial)):
                return None
            needed = file_bytes(plan)
            used = sum(size for _, size, _ in self._files(_COMPLETE)) + self._reserved()
            excess = used + needed - self.capacity_bytes
            if excess > 0 and self._evict(excess) < excess:
                raise CacheFull(f"The cache in {self.folder} has no room for {needed} bytes beside what is in use.")
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            lock_file(descriptor, exclusive=True)
        return SliceWriter(
            descriptor, partial, self._complete(name), plan, locked=self._locked, make_room=self._make_room
        )

    def discard(self, name: str, cached: CachedSlice) -> None:
        """Delete a slice that turned out to be damaged."""
        self._discard(name, cached.inode)

    def _discard(self, name: str, inode: int) -> None:
        path = self._complete(name)
        with self._locked():
            try:
                if path.stat().st_ino == inode:  # else someone has fetched it again in the meantime
                    path.unlink()
            except FileNotFoundError:
                pass

    def _make_room(self, size: int) -> bool:
        """The disk is full, although the bound is not reached: delete what nobody uses; whether something was."""
        with self._locked():
            return self._evict(size, partly=True) > 0

    def _evict(self, excess: int, *, partly: bool = False) -> int:
        """Delete slices, longest unused first, for ``excess`` bytes; nothing if the others in use are too many."""
        unused: list[tuple[Path, int]] = []
        freed = 0
        try:
            for path, size, _ in sorted(self._files(_COMPLETE), key=lambda file: file[2]):
                if freed >= excess:
                    break
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                unused.append((path, descriptor))
                if lock_file(descriptor, exclusive=True):
                    freed += size
                else:
                    os.close(unused.pop()[1])
            if freed < excess and not partly:
                return 0
            for path, _ in unused:
                path.unlink()
            return freed
        finally:
            for _, descriptor in unused:
                os.close(descriptor)

    def _reserved(self) -> int:
        """Bytes of the slices being written, as large as they will be."""
        return sum(int(path.stem.rpartition("-")[2]) for path, _, _ in self._files(_PARTIAL))

    def _files(self, suffix: str) -> list[tuple[Path, int, float]]:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(suffix):
                    about = entry.stat()
                    found.append((Path(entry.path), about.st_size, about.st_mtime))
        return found

    def _delete_unused(self, path: Path) -> bool:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not lock_file(descriptor, exclusive=True):
                return False
            path.unlink()
            return True
        finally:
            os.close(descriptor)

    def _complete(self, name: str) -> Path:
        return self.folder / f"{name}{_COMPLETE}"

    def _partial(self, name: str, plan: ChunkPlan) -> Path:
        return self.folder / f"{name}-{file_bytes(plan)}{_PARTIAL}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A lock object of its own each time: none is inherited in a locked state by a process that is forked.
        lock = FileLock(self.folder / _LOCK_NAME, thread_local=False)
        with self._threads, lock.acquire(timeout=_LOCK_SECONDS, poll_interval=_POLL_SECONDS):
            yield

    def _require_locks(self) -> None:
        path = self.folder / f".probe-{os.getpid()}-{threading.get_ident()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock_file(descriptor, exclusive=True)
        except OSError as error:
            raise UnsupportedError(
                f"The file system of {self.folder} has no file locks ({error}), which the cache of slices is shared "
                "by: choose a folder on a disk of this machine."
            ) from error
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
