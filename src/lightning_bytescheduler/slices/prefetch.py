"""The threads that bring slices into the cache: what a reader waits for, and what is planned next.

As many slices are kept ahead as are consumed while one is fetched, and one more.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_bytescheduler.slices.cache import CachedSlice, CacheFull, DiskFailed, SliceCache, cache_name
from lightning_bytescheduler.slices.fetch import SliceCounters, Waiting, fetch_chunks
from lightning_bytescheduler.slices.options import FetchOptions
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.source import SliceSource

__all__ = ["FetchJob", "PrefetchDepth", "SlicePrefetcher"]

_WEIGHT = 0.3  # of the newest measurement
_CALM_SLICES = 16  # after so many without a stall, what a stall added is taken back by one
_FIRST_DEPTH = 2
_RETRY_SECONDS = 0.05  # until something that another process fetches, or that found no room, is looked at again
_FAILED_SECONDS = 5.0


class PrefetchDepth:
    """Follows the speeds of consumption and of fetching. Not thread-safe; time is measured by its owner.

    Args:
        most: Bound of the depth.
        fixed: The depth, if it is not to follow anything.
    """

    def __init__(self, *, most: int, fixed: int | None = None) -> None:
        self._most = most
        self._fixed = fixed
        self._fetch: float | None = None
        self._consume: float | None = None
        self._added = 0
        self._calm = 0

    @property
    def depth(self) -> int:
        """Slices to keep ahead of the one being read."""
        if self._fixed is not None:
            return self._fixed
        needed = _FIRST_DEPTH
        if self._fetch is not None and self._consume is not None:
            # Compared before the division: a consumer that takes no time asks for as much as there may be.
            needed = (
                self._most if self._fetch >= self._most * self._consume else 1 + math.ceil(self._fetch / self._consume)
            )
        return max(min(needed + self._added, self._most), 1)

    def fetched(self, seconds: float) -> None:
        """A slice took so long to fetch."""
        self._fetch = seconds if self._fetch is None else self._fetch + _WEIGHT * (seconds - self._fetch)

    def consumed(self, seconds: float, *, stalled: bool) -> None:
        """A slice took so long to consume, waiting for it not included; whether it had to be waited for."""
        self._consume = seconds if self._consume is None else self._consume + _WEIGHT * (seconds - self._consume)
        self._calm = 0 if stalled else self._calm + 1
        if stalled:
            self._added = min(self._added + 1, self._most)
        elif self._calm >= _CALM_SLICES and self._added:
            self._added -= 1
            self._calm = 0


@dataclass(eq=False, kw_only=True)
class FetchJob:
    """A slice on its way into the cache.

    Attributes:
        slice: The slice.
        planned: Whether it is fetched before it is wanted.
        done: Set at the end.
        busy: At the end: someone else is writing it, or has just written it.
        full: At the end: why the cache cannot take it.
        error: At the end: why it cannot be fetched.
    """

    slice: Slice
    planned: bool
    done: threading.Event = field(default_factory=threading.Event)
    busy: bool = False
    full: CacheFull | None = None
    error: Exception | None = None


class _Stopped(Exception):
    """The prefetcher is being closed."""


class SlicePrefetcher:
    """Fetches slices in threads of its own, which start with the first slice and end with ``close``.

    A planned slice that has arrived is kept open, and hence in the cache, until it is read or no longer planned. One
    thread is for what a reader waits for, so that it never stands behind plans. The lock of this object is held for
    bookkeeping only, never while the cache or the source is used.

    Args:
        source: Where slices come from.
        cache: Where they go to.
        depth: How many planned slices are kept ahead.
        threads: That fetch what is planned.
        options: How hard to try.
        waiting: Time and chance.
        counters: Where work is counted.
    """

    def __init__(
        self,
        source: SliceSource,
        cache: SliceCache,
        *,
        depth: PrefetchDepth,
        threads: int,
        options: FetchOptions,
        waiting: Waiting,
        counters: SliceCounters,
    ) -> None:
        self._source = source
        self._cache = cache
        self._depth = depth
        self._options = options
        self._waiting = replace(waiting, sleep=partial(self._sleep, waiting))
        self._counters = counters
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._wanted: deque[FetchJob] = deque()
        self._jobs: dict[str, FetchJob] = {}
        self._plan: dict[str, Slice] = {}
        self._kept: dict[str, CachedSlice] = {}
        self._not_before: dict[str, float] = {}
        # Daemons: a request that never returns must not keep the process from ending.
        self._threads = [
            threading.Thread(
                target=self._run, args=(number > 0,), name=f"bytescheduler-slice-fetch-{number}", daemon=True
            )
            for number in range(threads + 1)
        ]
        self._started = False

    def want(self, slice_: Slice) -> FetchJob:
        """Fetch a slice now; if it is already on its way, that job is returned."""
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
        """Fetch these next, in this order, as far ahead as the depth says. Replaces the plan there was."""
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
        """A reader holds the slice itself now."""
        name = self.name_of(slice_)
        with self._changed:
            self._plan.pop(name, None)
            cached = self._kept.pop(name, None)
            self._changed.notify_all()
        if cached is not None:
            cached.close()

    def consumed(self, seconds: float, *, stalled: bool) -> None:
        """A reader has finished a slice, see ``PrefetchDepth``."""
        with self._changed:
            self._depth.consumed(seconds, stalled=stalled)
            self._changed.notify_all()

    @property
    def depth(self) -> int:
        """How many slices ahead should be planned."""
        with self._changed:
            return self._depth.depth

    def name_of(self, slice_: Slice) -> str:
        """The slice's name in the cache."""
        return cache_name(slice_, self._source.version(slice_))

    def close(self, seconds: float) -> bool:
        """Stop, and wait for the threads up to ``seconds``; whether all ended.

        One whose request does not return is left behind, and ends with it or with the process.
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
        """In a process that was forked: let go of the parent's slices, which it keeps for itself."""
        for cached in list(self._kept.values()):  # the threads are the parent's, and the lock may be held for ever
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
                if self._stopped.is_set():  # asked under the lock: whoever stops notifies only those who wait already
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
        for name, slice_ in list(self._plan.items())[: self._depth.depth]:
            if name not in self._kept and name not in self._jobs and self._not_before.get(name, now) <= now:
                job = self._jobs[name] = FetchJob(slice=slice_, planned=True)
                return job
        return None

    def _work(self, job: FetchJob) -> None:
        name = self.name_of(job.slice)
        started = time.monotonic()
        cached = None
        pause = _RETRY_SECONDS
        try:
            plan = self._source.plan(job.slice)
            cached = self._cache.find(name, plan)
            if cached is None:
                cached = self._fetch(job, name)
                if cached is not None:
                    with self._changed:
                        self._depth.fetched(time.monotonic() - started)
                    self._counters.add(prefetched=job.planned)
        except _Stopped:
            job.busy = True
        except CacheFull as error:
            job.full = error
        except Exception as error:  # whatever it is, it belongs to whoever reads the slice
            job.error = error
            pause = _FAILED_SECONDS
        job.busy = job.busy or (cached is None and job.full is None and job.error is None)
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
        plan = self._source.plan(job.slice)
        try:
            writer = self._cache.begin(name, plan)
        except OSError as error:
            raise DiskFailed(f"The cache cannot be used: {error}") from error
        if writer is None:
            return None
        try:
            read = partial(self._source.read, job.slice)
            fetched = fetch_chunks(
                job.slice, plan, read, options=self._options, waiting=self._waiting, counters=self._counters
            )
            for chunk in fetched:
                writer.write(chunk)
                if self._stopped.is_set():
                    raise _Stopped
            return writer.commit()
        finally:
            writer.abandon()
