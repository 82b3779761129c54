"""The store of slices: reads samples of a slice while it arrives, and fetches the next slices early.

``SliceStore.samples`` yields a slice's samples from verified chunks: of a mapped file on this machine, of the cache, or
of a fetch in progress, in this or another process of this machine. ``SliceStore.prefetch`` fetches the slices that come
next into the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError, SourceUnavailableError
from lightning_bytescheduler.slices.cache import (
    CachedSlice,
    CacheFull,
    DiskFailed,
    GrowingSlice,
    SliceCache,
    cache_name,
    file_bytes,
)
from lightning_bytescheduler.slices.fetch import SliceCounters, SliceStatistics, Waiting, fetch_chunks
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.samples import LeaveOut
from lightning_bytescheduler.slices.slice import Bytes, Slice, right_chunks
from lightning_bytescheduler.slices.source import SliceSource
from lightning_bytescheduler.slices.urls import local_path

_THREADS = 4  # for planned fetches
_POLL_SECONDS = 0.002
_CLOSE_SECONDS = 5.0
_RETRY_SECONDS = 0.05  # before a slice is tried again that another process fetches, or that had no room
_FAILED_SECONDS = 5.0


class SliceStore:
    """Reads slices, and keeps the next ones local.

    Threads start with the first slice that is not on this machine, and end with ``close``. In a forked process, or one
    that the store is sent to, it begins anew. Several threads may read slices at once.

    Attributes:
        keeps: Number of slices of the largest size that the cache holds; 0 without one.
        prefetcher: Fetches into the cache, if there is one.

    Raises:
        OptionError: If the cache is smaller than the largest slice, or its folder cannot be used.
        UnsupportedError: If its file system has no file locks.
    """

    def __init__(
        self, source: SliceSource, options: StoreOptions | None = None, *, waiting: Waiting | None = None
    ) -> None:
        self.source = source
        self.options = options or StoreOptions()
        self.waiting = waiting or Waiting()
        self._begin()
        if self.prefetcher is not None and self.options.cache_bytes < self._largest[0]:
            needed, key = self._largest
            allowed = f"of at least {needed} bytes, which the largest slice, {key!r}, takes in it"
            raise OptionError("cache", {"bytes": self.options.cache_bytes}, allowed)

    def samples(
        self, slice_: Slice, first: int = 0, stop: int | None = None, leave_out: LeaveOut | None = None
    ) -> Iterator[Any]:
        """Read a slice, or its samples from ``first`` up to, but not including, ``stop``.

        Args:
            slice_: A slice of the source.
            first: The first sample.
            stop: One after the last; ``None`` for all.
            leave_out: Called with a sample that cannot be decoded, which is then left out; ``None`` to raise.

        Yields:
            The samples from there on, made of verified bytes.

        Raises:
            SliceCorruptError: If the slice stays wrong when fetched again. Samples yielded before are correct.
            SourceUnavailableError: If the source is unavailable.
            ByteSchedulerError: If the store has been closed.
            ImportError: If a library is missing that the URL or the format needs.
        """
        with contextlib.closing(self.open(slice_)) as opened:
            stop = slice_.samples if stop is None else min(stop, slice_.samples)
            yield from itertools.chain.from_iterable(opened.samples.take(first, stop, leave_out))

    def open(self, slice_: Slice, *, whole: bool = False) -> OpenSlice:
        """Open a slice to read it in parts: only requested samples are made.

        Args:
            slice_: A slice of the source.
            whole: Keep the whole slice, as its samples are picked in any order.

        Raises:
            ByteSchedulerError: If the store has been closed.
        """
        self._begin_in_this_process()
        return OpenSlice(self, slice_, whole=whole)

    def fetch(self, slice_: Slice, *, first: int = 0, waiting: Waiting | None = None) -> Iterator[bytearray]:
        """Fetch chunks from number ``first`` on from the source; see ``fetch_chunks``."""
        return fetch_chunks(
            slice_,
            self.source.plan(slice_),
            partial(self.source.read, slice_),
            first=first,
            timeout=self.options.timeout,
            waiting=waiting or self.waiting,
            counters=self.counters,
        )

    def prefetch(self, slices: Sequence[Slice]) -> None:
        """Fetch slices into the cache in this order, as far ahead as ``depth``; replaces the earlier plan.

        Raises:
            ByteSchedulerError: If the store has been closed.
        """
        self._begin_in_this_process()
        if self.prefetcher is not None:
            self.prefetcher.plan([slice_ for slice_ in slices if local_path(slice_.url) is None])

    @property
    def is_local(self) -> bool:
        """Whether all slices are files on this machine, which need neither a cache nor a network."""
        return all(local_path(slice_.url) is not None for slice_ in self.source.slices)

    @property
    def statistics(self) -> SliceStatistics:
        """Cost of reading in this process so far."""
        return self.counters.snapshot()

    def close(self) -> None:
        """Stop the threads, waiting up to 5 s for them; fetched slices stay in the cache."""
        if self._pid == os.getpid() and self.prefetcher is not None:
            self.prefetcher.close(_CLOSE_SECONDS)
        self._closed = True

    def __enter__(self) -> SliceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "options": self.options, "waiting": self.waiting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["source"], state["options"], waiting=state["waiting"])  # type: ignore[misc]

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._warned = threading.Event()
        self.counters = SliceCounters()
        self.prefetcher: SlicePrefetcher | None = None
        self.depth = self.keeps = 0
        options = self.options
        if options.cache_dir is None or self.is_local:
            return
        # Several processes keep slices in the cache, and those being read need room.
        self.keeps = options.cache_bytes // self._largest[0]
        self.depth = min(options.prefetch, max(self.keeps // 4, 1))
        self.prefetcher = SlicePrefetcher(self, SliceCache(options.cache_dir, options.cache_bytes))

    def require_open(self) -> None:
        """Require that the store is not closed.

        Raises:
            ByteSchedulerError: If it is.
        """
        if self._closed:
            raise ByteSchedulerError("Slices cannot be read, as the store has been closed.")

    def _begin_in_this_process(self) -> None:
        self.require_open()
        if self._pid != os.getpid():
            if self.prefetcher is not None:
                self.prefetcher.forget()
            self._begin()

    @cached_property
    def _largest(self) -> tuple[int, str]:
        """The bytes that the largest slice takes in the cache, and its key."""
        remote = (slice_ for slice_ in self.source.slices if local_path(slice_.url) is None)
        return max((file_bytes(self.source.plan(slice_)), slice_.key) for slice_ in remote)

    def is_here(self, slice_: Slice) -> bool:
        """Whether all bytes of a slice are on this machine, so that reading them again is cheap."""
        if local_path(slice_.url) is not None:
            return True
        prefetcher = self.prefetcher
        return prefetcher is not None and prefetcher.cache.has(prefetcher.name_of(slice_))

    def warn_of(self, full: CacheFull) -> None:
        """Warn once that the disk is full or broken."""
        if isinstance(full, DiskFailed) and not self._warned.is_set():
            self._warned.set()
            warnings.warn(
                f"{full} Slices that find no room are read past the cache in {self.options.cache_dir}, which may be "
                "slower and loses nothing; free some space there, or choose another cache.",
                stacklevel=2,
            )


class OpenSlice:
    """A slice that is read in parts; close it after use.

    Args:
        whole: Yield available chunks in one piece, as the slice is kept whole.
    """

    def __init__(self, store: SliceStore, slice_: Slice, *, whole: bool) -> None:
        self._store = store
        self._slice = slice_
        self._plan = store.source.plan(slice_)
        self._together = whole
        self._next = 0  # number of the next chunk
        self._waited = self._stalled = 0.0  # seconds: since the last chunk, and in all
        self._chunks: Generator[Bytes, None, None] | None = None
        self.samples = store.source.open(slice_, self._begin, is_here=partial(store.is_here, slice_))

    def close(self) -> None:
        """Release the slice."""
        if self._chunks is not None:
            self._chunks.close()
        self._store.counters.add(stall_seconds=self._stalled)

    def _begin(self) -> Iterator[Bytes]:
        """Return its bytes from the beginning; an earlier iterator ends."""
        before = self._chunks
        if before is not None:
            before.close()
        self._next, self._chunks = 0, self._read(again=before is not None)
        return self._chunks

    @property
    def _is_over(self) -> bool:
        return self._next >= self._plan.count

    def _got(self, chunk: Bytes) -> Bytes:
        """Record the next chunk, or several in one piece, and return it."""
        self._next += -(-len(chunk) // self._plan.chunk_bytes)
        self._waited = 0.0
        return chunk

    def _read(self, again: bool) -> Generator[Bytes, None, None]:
        path, prefetcher = local_path(self._slice.url), self._store.prefetcher
        if path is not None:
            yield from self._mapped(path)
        elif prefetcher is not None:
            try:
                yield from self._through_cache(prefetcher, again)
            except _PastTheCache:
                self._store.counters.add(uncached=1)
        # Fetch the rest, also missing or damaged parts of a local file, where this raises the error.
        yield from self._fetched()

    def _mapped(self, path: str) -> Iterator[Bytes]:
        """Yield verified chunks of a file on this machine without a copy; ends before a missing or damaged one."""
        slice_ = self._slice
        try:
            with open(path, "rb") as file:
                if not slice_.size or os.fstat(file.fileno()).st_size < slice_.start + slice_.size:
                    return
                before = slice_.start % mmap.ALLOCATIONGRANULARITY
                length = before + slice_.size
                # Private: a reader may write to its chunks without effect on the file or other readers.
                mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=slice_.start - before)
        except OSError:
            return
        for chunk in right_chunks(memoryview(mapped)[before:], self._plan, together=self._together):
            yield self._got(chunk)

    def _through_cache(self, prefetcher: SlicePrefetcher, again: bool) -> Iterator[Bytes]:
        cache = prefetcher.cache
        name = prefetcher.name_of(self._slice)
        cached = cache.find(name, self._plan)
        if not again:
            self._store.counters.add(**{"cache_misses" if cached is None else "cache_hits": 1})
        prefetcher.taken(self._slice)
        while True:
            if cached is not None:
                try:
                    for chunk in cached.chunks(self._next, together=self._together):
                        yield self._got(chunk)
                    if not self._is_over:
                        self._store.counters.add(corrupt_chunks=1)
                        cache.discard(name, cached.inode)
                finally:
                    cached.close()
            if self._is_over:
                return
            yield from self._followed(prefetcher, name)
            cached = cache.find(name, self._plan)

    def _followed(self, prefetcher: SlicePrefetcher, name: str) -> Iterator[Bytes]:
        job = prefetcher.want(self._slice)
        growing: GrowingSlice | None = None
        try:
            while not self._is_over:
                is_done = job.done.is_set()  # asked first, so that all chunks of a finished job are visible
                growing = growing or prefetcher.cache.follow(name, self._plan)
                chunk = None if growing is None else growing.chunk(self._next)
                if chunk is not None:
                    yield self._got(chunk)
                    continue
                if is_done and isinstance(job.error, CacheFull):
                    self._store.warn_of(job.error)
                    raise _PastTheCache
                if is_done and job.error is not None:
                    raise job.error
                if is_done and not job.busy:
                    return
                self._wait(job)
                if is_done:
                    return  # another process writes it, or has done so: look again
        finally:
            if growing is not None:
                growing.close()

    def _wait(self, job: FetchJob) -> None:
        self._store.require_open()
        started = time.monotonic()
        if job.done.is_set():
            time.sleep(_POLL_SECONDS)
        else:
            job.done.wait(_POLL_SECONDS)
        waited = time.monotonic() - started
        self._stalled += waited
        self._waited += waited
        timeout = self._store.options.timeout
        if job.busy and self._waited > timeout:
            raise _PastTheCache  # the writing process may be stopped, so do not depend on it
        if self._waited > 2 * timeout:  # retries end after one timeout; a request that does not return never ends
            raise SourceUnavailableError(self._slice.url, self._waited, "a request that has not returned")

    def _fetched(self) -> Iterator[Bytes]:
        chunks = self._store.fetch(self._slice, first=self._next)
        while True:
            started = time.monotonic()
            chunk = next(chunks, None)
            self._stalled += time.monotonic() - started
            if chunk is None:
                return
            yield self._got(chunk)


class _PastTheCache(Exception):
    """The cache cannot take the slice, or its writer makes no progress."""


@dataclass(eq=False, kw_only=True)
class FetchJob:
    """A fetch of a slice into the cache.

    Attributes:
        busy: At the end: whether another process is writing it, or has just written it.
    """

    slice: Slice
    planned: bool
    done: threading.Event = field(default_factory=threading.Event)
    busy: bool = False
    error: Exception | None = None


class _Stopped(Exception):
    """The prefetcher is being closed."""


class SlicePrefetcher:
    """Fetches slices in its own threads, which start with the first slice and end with ``close``.

    A fetched planned slice is kept open, and so in the cache, until it is read or removed from the plan. One thread
    serves only waiting readers, so that they never wait for plans. The lock is held for bookkeeping only, never while
    the cache or the source is used.
    """

    def __init__(self, store: SliceStore, cache: SliceCache) -> None:
        self._store = store
        self.cache = cache
        self._waiting = replace(store.waiting, sleep=partial(self._sleep, store.waiting))
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._wanted: deque[FetchJob] = deque()
        self._jobs: dict[str, FetchJob] = {}
        self._plan: dict[str, Slice] = {}
        self._kept: dict[str, CachedSlice] = {}
        self._not_before: dict[str, float] = {}
        # Daemons: a request that never returns must not block the end of the process.
        self._threads = [
            threading.Thread(
                target=self._run, args=(number > 0,), name=f"bytescheduler-slice-fetch-{number}", daemon=True
            )
            for number in range(_THREADS + 1)
        ]
        self._started = False

    def want(self, slice_: Slice) -> FetchJob:
        """Fetch a slice now; returns the job in progress if there is one."""
        name = self.name_of(slice_)
        with self._changed:
            job = self._jobs.get(name)
            if self._stopped.is_set():
                job = FetchJob(slice=slice_, planned=False, busy=True)
                job.done.set()
            elif job is None:
                job = self._jobs[name] = FetchJob(slice=slice_, planned=False)
                self._wanted.append(job)
                self._start()
                self._changed.notify_all()
            return job

    def plan(self, slices: Sequence[Slice]) -> None:
        """Fetch these next, in this order, as far ahead as the depth; replaces the earlier plan."""
        plan = {self.name_of(slice_): slice_ for slice_ in slices}
        with self._changed:
            self._plan = plan
            self._not_before = {name: when for name, when in self._not_before.items() if name in plan}
            dropped = [self._kept.pop(name) for name in list(self._kept) if name not in plan]
            if plan:
                self._start()
            self._changed.notify_all()
        for cached in dropped:
            cached.close()

    def taken(self, slice_: Slice) -> None:
        """Release a slice that a reader now holds itself."""
        name = self.name_of(slice_)
        with self._changed:
            self._plan.pop(name, None)
            cached = self._kept.pop(name, None)
            self._changed.notify_all()
        if cached is not None:
            cached.close()

    def name_of(self, slice_: Slice) -> str:
        """Return the slice's name in the cache."""
        return cache_name(slice_, self._store.source.version(slice_))

    def close(self, seconds: float) -> bool:
        """Stop, and wait for the threads up to ``seconds``; returns whether all ended.

        A thread whose request does not return ends with the request or the process.
        """
        self._stopped.set()
        with self._changed:
            self._plan = {}
            kept = list(self._kept.values())
            self._kept = {}
            for job in self._wanted:
                job.busy = True
                job.done.set()
            self._wanted.clear()
            started = self._started
            self._changed.notify_all()
        for cached in kept:
            cached.close()
        end = time.monotonic() + seconds
        for thread in self._threads if started else ():
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def forget(self) -> None:
        """Release the parent's slices in a forked process; the parent keeps them."""
        for cached in list(self._kept.values()):  # the threads are the parent's, and the lock may be held forever
            cached.close()

    def _start(self) -> None:
        if self._stopped.is_set() or self._started:
            return
        self._started = True
        for thread in self._threads:
            thread.start()

    def _sleep(self, waiting: Waiting, seconds: float) -> None:
        if waiting.sleep is time.sleep:
            self._stopped.wait(seconds)
        else:
            waiting.sleep(seconds)
        if self._stopped.is_set():
            raise _Stopped

    def _run(self, planned: bool) -> None:
        while True:
            with self._changed:
                if self._stopped.is_set():  # checked under the lock, as close() notifies only threads that already wait
                    return
                job = self._next(planned)
                if job is None:
                    self._changed.wait(_RETRY_SECONDS if self._plan and planned else None)
                    continue
            self._work(job)

    def _next(self, planned: bool) -> FetchJob | None:
        if self._wanted:
            return self._wanted.popleft()
        if not planned:
            return None
        now = time.monotonic()
        for name, slice_ in list(self._plan.items())[: self._store.depth]:
            if name not in self._kept and name not in self._jobs and self._not_before.get(name, now) <= now:
                job = self._jobs[name] = FetchJob(slice=slice_, planned=True)
                return job
        return None

    def _work(self, job: FetchJob) -> None:
        name = self.name_of(job.slice)
        cached = None
        pause = _RETRY_SECONDS
        try:
            plan = self._store.source.plan(job.slice)
            cached = self.cache.find(name, plan)
            if cached is None:
                cached = self._fetch(job, name)
                if cached is not None:
                    self._store.counters.add(prefetched=job.planned)
        except _Stopped:
            job.busy = True
        except Exception as error:  # any error goes to the reader of the slice
            job.error = error
            pause = _RETRY_SECONDS if isinstance(error, CacheFull) else _FAILED_SECONDS
        job.busy = job.busy or (cached is None and job.error is None)
        with self._changed:
            del self._jobs[name]
            if cached is None:
                self._not_before[name] = time.monotonic() + pause
            elif name in self._plan and name not in self._kept and not self._stopped.is_set():
                self._kept[name], cached = cached, None
            self._changed.notify_all()
        if cached is not None:
            cached.close()
        job.done.set()

    def _fetch(self, job: FetchJob, name: str) -> CachedSlice | None:
        plan = self._store.source.plan(job.slice)
        try:
            writer = self.cache.begin(name, plan)
        except OSError as error:
            raise DiskFailed(f"The cache cannot be used: {error}") from error
        if writer is None:
            return None
        try:
            for chunk in self._store.fetch(job.slice, waiting=self._waiting):
                if self._stopped.is_set():  # not after the last chunk: its reader may have ended the training
                    raise _Stopped
                writer.write(chunk)
            return writer.commit()
        finally:
            writer.abandon()
