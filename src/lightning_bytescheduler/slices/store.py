"""The store of slices: samples of a slice while it is still on its way, and the next slices before they are wanted.

This is what a data set needs of storage. Given a slice, ``SliceStore.samples`` yields its samples from verified chunks:
of a file of this machine that is mapped into memory, of the cache, or of a fetch that is under way, in this process or
in another one of this machine. Given the slices that come next, ``SliceStore.prefetch`` brings them into the cache.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import ByteSchedulerError, OptionError, SourceUnavailableError
from lightning_bytescheduler.slices.cache import CacheFull, DiskFailed, GrowingSlice, SliceCache, file_bytes
from lightning_bytescheduler.slices.checksums import CHUNK_BYTES, VerifiedChunks
from lightning_bytescheduler.slices.fetch import ReadAhead, SliceCounters, SliceStatistics, Waiting, fetch_chunks
from lightning_bytescheduler.slices.open_slice import (
    BlockSamples,
    OpenSlice,
    ReaderSamples,
    ReaderSpeed,
    Reading,
    mapped_chunks,
)
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.prefetch import FetchJob, PrefetchDepth, SlicePrefetcher
from lightning_bytescheduler.slices.slice import Bytes, Slice
from lightning_bytescheduler.slices.source import SliceSource
from lightning_bytescheduler.slices.urls import local_path

__all__ = ["SliceStore"]

_POLL_SECONDS = 0.002
_CLOSE_SECONDS = 5.0


class SliceStore:
    """Reads slices, and keeps the next ones local.

    Threads begin with the first slice that is not on this machine, and end with ``close``. A process that is forked, or
    that a store is sent to, begins anew. Slices may be read from several threads at once.

    Args:
        source: The slices.
        options: How they are stored and fetched.
        waiting: Time and chance.

    Raises:
        OptionError: If the cache is smaller than the largest slice, or its folder cannot be used.
        UnsupportedError: If its file system has no file locks.
    """

    def __init__(
        self, source: SliceSource, options: StoreOptions | None = None, *, waiting: Waiting | None = None
    ) -> None:
        self.source = source
        self.options = options or StoreOptions()
        self._waiting = waiting or Waiting()
        self._verified = VerifiedChunks(sum(slice_.size // CHUNK_BYTES + 1 for slice_ in source.slices))
        self._begin()
        self._require_room()

    def samples(self, slice_: Slice, first: int = 0) -> Iterator[Any]:
        """Read a slice.

        Args:
            slice_: One of the source's.
            first: Number of the first sample that is wanted.

        Yields:
            The samples from there on, made of verified bytes.

        Raises:
            SliceCorruptError: If the slice is not what it should be, however often it is fetched. What was yielded
                before is right.
            SourceUnavailableError: If the source stays away.
            ByteSchedulerError: If the store has been closed.
            ImportError: If a library is missing that the URL or the format needs.
        """
        self._require_sample(slice_, first)
        self._begin_in_this_process()
        reading = Reading(slice_, self.source.plan(slice_))
        chunks = self._chunks(reading)
        started = time.monotonic()
        try:
            yield from self.source.samples(slice_, chunks, first)
        finally:
            chunks.close()
            self._counters.add(stall_seconds=reading.stalled)
        if self._prefetcher is not None and not first:
            busy = time.monotonic() - started - reading.stalled
            self._prefetcher.consumed(max(busy, 0.0), stalled=reading.stalled > 0)

    def open(self, slice_: Slice, *, whole: bool = False, epoch: int | None = None) -> OpenSlice:
        """Read a slice in parts: only what is asked for is made.

        Args:
            slice_: One of the source's.
            whole: The slice is kept whole, as its samples are picked in any order.
            epoch: Chunks in the cache are verified once in it, by whichever process of this rank; None verifies always.

        Raises:
            ByteSchedulerError: If the store has been closed.
        """
        self._begin_in_this_process()
        opened = OpenSlice(partial(self._closed_slice, time.monotonic()))

        def chunks(*, again: bool = False) -> Iterator[Bytes]:
            reading = Reading(slice_, self.source.plan(slice_), together=whole, epoch=epoch)
            return opened.reads(reading, self._chunks(reading, again=again))

        if self.source.has_blocks(slice_):
            opened.samples = BlockSamples(slice_, self.source.blocks(slice_, chunks()))
        else:
            opened.samples = ReaderSamples(
                slice_,
                lambda first: self.source.samples(slice_, chunks(again=opened.is_read), first),
                may_begin_anew=partial(self._is_here, slice_),
                speed=self._speed,
            )
        return opened

    def prefetch(self, slices: Sequence[Slice]) -> None:
        """Bring these into the cache, in this order and as far ahead as ``depth``; replaces what was planned before.

        Raises:
            ByteSchedulerError: If the store has been closed.
        """
        self._begin_in_this_process()
        if self._prefetcher is not None:
            self._prefetcher.plan([slice_ for slice_ in slices if local_path(slice_.url) is None])

    def cached(self, slices: Iterable[Slice]) -> list[str]:
        """Keys of those slices that are in the cache now, whichever process has brought them there."""
        self._begin_in_this_process()
        if self._cache is None or self._prefetcher is None:
            return []
        names = self._cache.names()
        name_of = self._prefetcher.name_of
        return [slice_.key for slice_ in slices if name_of(slice_) in names] if names else []

    @property
    def is_local(self) -> bool:
        """Whether all slices are files of this machine, which need neither a cache nor a network."""
        return all(local_path(slice_.url) is not None for slice_ in self.source.slices)

    @property
    def depth(self) -> int:
        """How many slices it is worth to name to ``prefetch``, as consumption and fetching go at present."""
        self._begin_in_this_process()
        return 0 if self._prefetcher is None else self._prefetcher.depth

    @property
    def statistics(self) -> SliceStatistics:
        """What reading has cost this process so far."""
        return self._counters.snapshot()

    @property
    def sums(self) -> dict[str, float]:
        """``statistics`` by name, for whoever asks often."""
        return self._counters.sums()

    def close(self) -> None:
        """Stop the threads, waiting up to 5 s for them; what was fetched stays in the cache."""
        if self._pid == os.getpid() and self._prefetcher is not None:
            self._prefetcher.close(_CLOSE_SECONDS)
        self._closed = True

    def __enter__(self) -> SliceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "options": self.options, "waiting": self._waiting, "verified": self._verified}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["source"], state["options"], waiting=state["waiting"])  # type: ignore[misc]
        self._verified = state["verified"]

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._warned = threading.Event()
        self._counters = SliceCounters()
        self._speed = ReaderSpeed()
        self._cache: SliceCache | None = None
        self._prefetcher: SlicePrefetcher | None = None
        options = self.options
        if options.cache_dir is None or self.is_local:
            return
        self._cache = SliceCache(options.cache_dir, options.cache_bytes)
        self._prefetcher = SlicePrefetcher(
            self.source,
            self._cache,
            depth=PrefetchDepth(most=options.most_prefetch, fixed=options.prefetch),
            threads=options.fetch_threads,
            options=options.fetch_options(),
            waiting=self._waiting,
            counters=self._counters,
        )

    def _begin_in_this_process(self) -> None:
        if self._closed:
            raise ByteSchedulerError("Slices cannot be read, as the store has been closed.")
        if self._pid != os.getpid():
            if self._prefetcher is not None:
                self._prefetcher.forget()
            self._begin()

    def _require_room(self) -> None:
        if self._cache is None:
            return
        remote = (slice_ for slice_ in self.source.slices if local_path(slice_.url) is None)
        largest = max(remote, key=lambda slice_: slice_.size)
        needed = file_bytes(self.source.plan(largest))
        if self.options.cache_bytes < needed:
            allowed = f"at least {needed}, the bytes that the largest slice, {largest.key!r}, takes in the cache"
            raise OptionError("cache_bytes", self.options.cache_bytes, allowed)

    def _require_sample(self, slice_: Slice, first: int) -> None:
        if not is_whole(first) or first > slice_.samples:
            raise OptionError("first", first, f"a whole number from 0 to {slice_.samples}")

    def _closed_slice(self, started: float, stalled: float, consumed: bool) -> None:
        self._counters.add(stall_seconds=stalled)
        if consumed and self._prefetcher is not None:
            busy = time.monotonic() - started - stalled
            self._prefetcher.consumed(max(busy, 0.0), stalled=stalled > 0)

    def _is_here(self, slice_: Slice) -> bool:
        """Whether all bytes of a slice are on this machine, so that reading them again costs little."""
        if local_path(slice_.url) is not None:
            return True
        cache, prefetcher = self._cache, self._prefetcher
        return cache is not None and prefetcher is not None and cache.has(prefetcher.name_of(slice_))

    def _chunks(self, reading: Reading, *, again: bool = False) -> Generator[Bytes, None, None]:
        path = local_path(reading.slice.url)
        if path is not None:
            yield from mapped_chunks(reading, path, self._verified)
            # Only what is missing or damaged is left: read again as from any source, which says what is wrong.
            yield from self._fetched(reading)
            return
        if self._cache is not None and self._prefetcher is not None:
            try:
                yield from self._through_cache(reading, self._cache, self._prefetcher, again)
            except _PastTheCache:
                self._counters.add(uncached=1)
        yield from self._read_ahead(reading)

    def _through_cache(
        self, reading: Reading, cache: SliceCache, prefetcher: SlicePrefetcher, again: bool
    ) -> Iterator[Bytes]:
        name = prefetcher.name_of(reading.slice)
        cached = cache.find(name, reading.plan)
        if not again:
            self._counters.add(**{"cache_misses" if cached is None else "cache_hits": 1})
        prefetcher.taken(reading.slice)
        while True:
            if cached is not None:
                try:
                    seals = None if reading.epoch is None else self._verified.of(name, cached.inode, reading.epoch)
                    for chunk in cached.chunks(reading.next, seals=seals, together=reading.together):
                        yield reading.got(chunk)
                    if not reading.is_over:
                        self._counters.add(corrupt_chunks=1)
                        cache.discard(name, cached)
                finally:
                    cached.close()
            if reading.is_over:
                return
            yield from self._followed(reading, cache, prefetcher, name)
            cached = cache.find(name, reading.plan)

    def _followed(self, reading: Reading, cache: SliceCache, prefetcher: SlicePrefetcher, name: str) -> Iterator[Bytes]:
        """Chunks as they are written; ends when there is nothing to follow, or no more of it."""
        job = prefetcher.want(reading.slice)
        growing: GrowingSlice | None = None
        try:
            while not reading.is_over:
                is_done = job.done.is_set()  # asked first: what a job that is done has written is there
                growing = growing or cache.follow(name, reading.plan)
                chunk = None if growing is None else growing.chunk(reading.next)
                if chunk is not None:
                    yield reading.got(chunk)
                    continue
                if is_done and job.error is not None:
                    raise job.error
                if is_done and job.full is not None:
                    self._warn_of(job.full)
                    raise _PastTheCache
                if is_done and not job.busy:
                    return
                self._wait(reading, job)
                if is_done:
                    return  # someone else is writing it, or has done so: look again
        finally:
            if growing is not None:
                growing.close()

    def _wait(self, reading: Reading, job: FetchJob) -> None:
        if self._closed:
            raise ByteSchedulerError("Slices cannot be read, as the store has been closed.")
        started = time.monotonic()
        if job.done.is_set():
            time.sleep(_POLL_SECONDS)
        else:
            job.done.wait(_POLL_SECONDS)
        waited = time.monotonic() - started
        reading.stalled += waited
        reading.waited += waited
        timeout = self.options.timeout
        if job.busy and reading.waited > timeout:
            raise _PastTheCache  # whoever writes it may be stopped: nobody depends on that
        if reading.waited > 2 * timeout:  # retries end after one; a request that does not return after none
            raise SourceUnavailableError(reading.slice.url, reading.waited, "a request that has not returned")

    def _read_ahead(self, reading: Reading) -> Iterator[Bytes]:
        if reading.is_over:
            return
        options = self.options
        ahead = max(options.request_bytes // reading.plan.chunk_bytes, 1)
        fetched = ReadAhead(self._fetch(reading), ahead=ahead, url=reading.slice.url, timeout=2 * options.timeout)
        try:
            chunks = fetched.chunks()
            while True:
                started = time.monotonic()
                chunk = next(chunks, None)
                reading.stalled += time.monotonic() - started
                if chunk is None:
                    return
                yield reading.got(chunk)
        finally:
            fetched.close()

    def _fetched(self, reading: Reading) -> Iterator[Bytes]:
        for chunk in self._fetch(reading):
            yield reading.got(chunk)

    def _fetch(self, reading: Reading) -> Iterator[bytearray]:
        return fetch_chunks(
            reading.slice,
            reading.plan,
            partial(self.source.read, reading.slice),
            first=reading.next,
            options=self.options.fetch_options(),
            waiting=self._waiting,
            counters=self._counters,
        )

    def _warn_of(self, full: CacheFull) -> None:
        if isinstance(full, DiskFailed) and not self._warned.is_set():
            self._warned.set()
            warnings.warn(
                f"{full} Slices that find no room are read past the cache in {self.options.cache_dir}, which may be "
                "slower and loses nothing; free some space there, or choose another cache_dir.",
                stacklevel=2,
            )


class _PastTheCache(Exception):
    """The cache cannot take the slice, or whoever writes it there makes no progress."""
