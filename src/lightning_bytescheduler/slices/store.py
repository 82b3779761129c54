"""The store of slices: reads samples of a slice while it arrives, and fetches the next slices early.

``SliceStore.open`` gives a slice's samples, made of verified chunks: of a file on this machine, of the cache, or
of a fetch in progress, in this or another process of this machine. ``SliceStore.prefetch`` fetches the slices that come
next into the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError, SourceUnavailableError
from lightning_bytescheduler.slices.cache import CacheFull, DiskFailed, SliceCache, SliceFile, SliceWriter
from lightning_bytescheduler.slices.fetch import SliceCounters, Waiting, fetch_chunks
from lightning_bytescheduler.slices.formats import SliceSamples
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.slice import Bytes, Chunks, Slice
from lightning_bytescheduler.slices.source import SliceSource
from lightning_bytescheduler.slices.urls import local_path

_THREADS = 4  # for planned fetches
_POLL_SECONDS = 0.002
_CLOSE_SECONDS = 5.0
_RETRY_SECONDS = 0.05  # before another try at a slice that another process fetches, or that had no room
_FAILED_SECONDS = 5.0
_TRIES = 5  # of the cache, before a slice is read past it


class SliceStore:
    """Reads slices, and keeps the next ones local.

    Threads start with the first slice that is not on this machine, and end with ``close``. A copy, as in a process that
    the store is sent to, begins anew; a forked process takes one. Several threads may read slices at once.

    Attributes:
        depth: Slices to keep ahead of the one being read, a quarter of the cache; 0 without one.
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
        self.counters = SliceCounters()
        self.prefetcher: SlicePrefetcher | None = None
        self.depth = 0
        self._closed = self._warned = False
        folder, capacity = self.options.cache_dir, self.options.cache_bytes
        remote = [(slice_.size, slice_.key) for slice_ in source.slices if local_path(slice_.url) is None]
        if folder is None or not remote:
            return
        needed, key = max(remote)
        if capacity < needed:
            allowed = f"of at least {needed} bytes, as the largest slice, {key!r}, has. 'slices make' cuts files"
            raise OptionError("cache", {"bytes": capacity}, allowed)
        # Several processes keep slices in the cache, and those being read need room.
        self.depth = max(capacity // needed // 4, 1)
        self.prefetcher = SlicePrefetcher(self, SliceCache(folder, capacity))

    def open(self, slice_: Slice, *, whole: bool = False) -> SliceSamples:
        """Open a slice to read it in parts: only requested samples are made. Close it after use.

        Args:
            slice_: A slice of the source.
            whole: Keep the whole slice in memory, as its samples are picked in any order.

        Raises:
            ByteSchedulerError: If the store has been closed.
        """
        self._require_open()
        return self.source.open(slice_, partial(self._whole if whole else self._chunks, slice_))

    def fetch(self, slice_: Slice, *, first: int = 0, waiting: Waiting | None = None) -> Iterator[bytearray]:
        """Fetch chunks from number ``first`` on from the source; see ``fetch_chunks``."""
        return fetch_chunks(
            slice_,
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
        self._require_open()
        if self.prefetcher is not None:
            self.prefetcher.plan([slice_ for slice_ in slices if local_path(slice_.url) is None])

    def close(self) -> None:
        """Stop the threads, waiting up to 5 s for them; fetched slices stay in the cache."""
        self._closed = True
        if self.prefetcher is not None:
            self.prefetcher.close(_CLOSE_SECONDS)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "options": self.options, "waiting": self.waiting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["source"], state["options"], waiting=state["waiting"])  # type: ignore[misc]

    def _require_open(self) -> None:
        if self._closed:
            raise ByteSchedulerError("Slices cannot be read, as the store has been closed.")

    # ------------------------------------------------------------------ chunks

    def _whole(self, slice_: Slice) -> Iterator[Bytes]:
        """Yield a slice in one piece."""
        # NumPy's memory is in large pages where there are some, and not filled with zeros first.
        content = np.empty(slice_.size, np.uint8).data
        for number, chunk in enumerate(self._chunks(slice_, content)):
            if not isinstance(chunk, memoryview):  # which is in its place
                content[slice(*slice_.bounds(number))] = chunk
        yield content

    def _chunks(self, slice_: Slice, memory: memoryview | None = None) -> Generator[Bytes, None, None]:
        """Yield the chunks of a slice; those of a file on this machine are read into its ``memory``, if given."""
        path, number = local_path(slice_.url), 0
        if path is not None:
            with contextlib.suppress(OSError), SliceFile(path, "r", slice_) as file:
                number = yield from file.chunks(memory=memory)
        elif self.prefetcher is not None:
            number = yield from self._through_cache(self.prefetcher, slice_, memory)
        yield from self._from_source(slice_, number)  # missing and damaged chunks, too; errors are raised here

    def _from_source(self, slice_: Slice, number: int) -> Chunks:
        chunks = self.fetch(slice_, first=number)
        while True:
            started = time.monotonic()
            chunk = next(chunks, None)
            self.counters.add(stall_seconds=time.monotonic() - started)
            if chunk is None:
                return slice_.count
            yield chunk

    def _through_cache(self, prefetcher: SlicePrefetcher, slice_: Slice, memory: memoryview | None) -> Chunks:
        number = 0
        for attempt in range(_TRIES):  # more than two where the cache damages what it is given
            cached = prefetcher.cache.find(slice_)
            if not attempt:
                self.counters.add(**{"cache_misses" if cached is None else "cache_hits": 1})
                prefetcher.taken(slice_)
            if cached is None:
                number = yield from self._followed(prefetcher, slice_, number)
            else:
                with cached:
                    number = yield from cached.chunks(number, memory)
                    if number < slice_.count:
                        self.counters.add(corrupt_chunks=1)
                        prefetcher.cache.discard(slice_)
            if number >= slice_.count:
                break
        return number

    def _followed(self, prefetcher: SlicePrefetcher, slice_: Slice, number: int) -> Chunks:
        """Yield the chunks that a thread of this process, or another process, writes into the cache."""
        fetch, growing, waited = prefetcher.want(slice_), None, 0.0
        try:
            while number < slice_.count:
                is_over = fetch.over.is_set()  # asked first, so that all chunks of a finished fetch are visible
                growing = growing or prefetcher.cache.follow(slice_)
                chunk = None if growing is None else growing.chunk(number)
                if chunk is not None:
                    number, waited = number + 1, 0.0
                    yield chunk
                elif isinstance(fetch.error, CacheFull) or (fetch.waits and waited > self.options.timeout):
                    # The process that writes it may be stopped, so do not depend on it.
                    fetch.is_wanted = False
                    self._warn_of(fetch.error)
                    return (yield from self._from_source(slice_, number))
                elif is_over and fetch.error is not None:
                    raise fetch.error
                elif is_over:
                    break  # look again
                elif waited > 2 * self.options.timeout:  # retries end after one timeout; some requests never return
                    raise SourceUnavailableError(slice_.url, waited, "a request that has not returned")
                else:
                    self._require_open()
                    started = time.monotonic()
                    fetch.over.wait(_POLL_SECONDS)
                    self.counters.add(stall_seconds=time.monotonic() - started)
                    waited += time.monotonic() - started
        finally:
            if growing is not None:
                growing.close()
        return number

    def _warn_of(self, error: Exception | None) -> None:
        """Count a slice that is read past the cache, and warn once if the disk is full or broken."""
        self.counters.add(uncached=1)
        if isinstance(error, DiskFailed) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{error} Slices that find no room are read past the cache in {self.options.cache_dir}, which may be "
                "slower and loses nothing; free some space there, or choose another cache.",
                stacklevel=2,
            )


class Fetch:
    """A fetch of a slice into the cache, in a thread of its own.

    Attributes:
        is_wanted: Whether a reader waits for it.
        waits: Whether another process writes the slice, or there is no room.
        over: Set at the end.
        error: Why the slice is not in the cache.
    """

    def __init__(self, slice_: Slice, run: Callable[[Fetch], None]) -> None:
        self.slice = slice_
        self.is_wanted = self.waits = False
        self.over = threading.Event()
        self.error: Exception | None = None
        # A daemon: a request that never returns must not block the end of the process.
        name = f"bytescheduler-slice-fetch-{slice_.name[:8]}"
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)


class SlicePrefetcher:
    """Fetches slices into the cache, each in a thread that ends with it, or with ``close``.

    A fetched planned slice is kept open, and so in the cache, until it is read or removed from the plan. Readers never
    wait for plans. The lock is held for bookkeeping only, never while the cache or the source is used.
    """

    def __init__(self, store: SliceStore, cache: SliceCache) -> None:
        self._store = store
        self.cache = cache
        self._waiting = replace(store.waiting, sleep=self._sleep)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._fetches: dict[str, Fetch] = {}
        self._plan: dict[str, Slice] = {}
        self._kept: dict[str, SliceFile] = {}

    def want(self, slice_: Slice) -> Fetch:
        """Fetch a slice now; returns the fetch in progress if there is one that has not failed."""
        with self._lock:
            fetch = self._fetches.get(slice_.name)
            if fetch is None or fetch.error is not None:
                fetch = self._start(slice_)
            fetch.is_wanted = True
            return fetch

    def plan(self, slices: Sequence[Slice]) -> None:
        """Fetch these next, in this order, as far ahead as the depth; replaces the earlier plan."""
        with self._lock:
            self._plan = {slice_.name: slice_ for slice_ in slices}
            dropped = [self._kept.pop(name) for name in list(self._kept) if name not in self._plan]
            self._start_planned()
        for cached in dropped:
            cached.close()

    def taken(self, slice_: Slice) -> None:
        """Release a slice that a reader now holds itself."""
        with self._lock:
            self._plan.pop(slice_.name, None)
            cached = self._kept.pop(slice_.name, None)
            self._start_planned()
        if cached is not None:
            cached.close()

    def close(self, seconds: float) -> None:
        """Stop, and wait for the threads up to ``seconds``.

        A thread whose request does not return ends with the request or the process.
        """
        self._stopped.set()
        self.plan([])
        with self._lock:
            fetches = list(self._fetches.values())
        end = time.monotonic() + seconds
        for fetch in fetches:
            fetch.thread.join(max(end - time.monotonic(), 0.0))

    def _start(self, slice_: Slice) -> Fetch:
        fetch = Fetch(slice_, self._run)
        fetch.thread.start()  # first, so that no reader waits for a fetch without a thread
        self._fetches[slice_.name] = fetch
        return fetch

    def _start_planned(self) -> None:
        if self._stopped.is_set():
            return
        for name, slice_ in itertools.islice(self._plan.items(), self._store.depth):
            if sum(not (fetch.is_wanted or fetch.waits) for fetch in self._fetches.values()) >= _THREADS:
                return
            if name not in self._kept and name not in self._fetches:
                self._start(slice_)

    def _run(self, fetch: Fetch) -> None:
        name, cached = fetch.slice.name, None
        try:
            cached = self._fetched(fetch)
        except Exception as error:  # any error goes to the reader of the slice
            fetch.error = error
            fetch.over.set()
            if not fetch.is_wanted:
                self._stopped.wait(_FAILED_SECONDS)  # before it is planned again
        try:
            with self._lock:
                if self._fetches.get(name) is fetch:
                    del self._fetches[name]
                if cached is not None and name in self._plan and not self._stopped.is_set():
                    self._kept[name], cached = cached, None
                self._start_planned()
        finally:
            if cached is not None:
                cached.close()
            fetch.over.set()

    def _fetched(self, fetch: Fetch) -> SliceFile | None:
        """Return the slice when it is in the cache; ``None`` if the fetch has to wait and is not planned any more."""
        while (cached := self.cache.find(fetch.slice)) is None:
            self._require_running()
            try:
                writer = self.cache.begin(fetch.slice)
            except CacheFull as error:
                if fetch.is_wanted or isinstance(error, DiskFailed):
                    raise
                writer = None  # there may be room when others have been read
            if writer is not None:
                fetch.waits = False
                return self._written(fetch, writer)
            with self._lock:
                fetch.waits = True
                if not fetch.is_wanted and fetch.slice.name not in self._plan:
                    return None
                self._start_planned()
            self._stopped.wait(_RETRY_SECONDS)
        return cached

    def _written(self, fetch: Fetch, writer: SliceWriter) -> SliceFile:
        try:
            for chunk in self._store.fetch(fetch.slice, waiting=self._waiting):
                self._require_running()  # not after the last chunk: its reader may have ended the training
                writer.write(chunk)
            cached = writer.commit()
        finally:
            writer.abandon()
        self._store.counters.add(prefetched=not fetch.is_wanted)
        return cached

    def _sleep(self, seconds: float) -> None:
        if self._store.waiting.sleep is time.sleep:
            self._stopped.wait(seconds)
        else:
            self._store.waiting.sleep(seconds)
        self._require_running()

    def _require_running(self) -> None:
        if self._stopped.is_set():
            raise ByteSchedulerError("The fetch has been stopped, as the store of slices is being closed.")
