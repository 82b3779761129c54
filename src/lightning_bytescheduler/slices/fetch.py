"""Fetches a slice from its source, chunk by chunk; what it hands on has been verified.

How long a source that does not answer is asked again: exponential back-off with jitter, up to a time limit.

What reading slices costs: counted by the threads that fetch and by whoever reads.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError, SourceUnavailableError
from lightning_bytescheduler.slices.slice import ChunkPlan, Slice

__all__ = ["FetchOptions", "Patience", "SliceCounters", "SliceStatistics", "Waiting", "fetch_chunks"]

_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Time and chance, so that tests need neither.

    Attributes:
        clock: Seconds from any start.
        sleep: Waits for so many seconds; may raise, to stop whoever waits.
        chance: A number from 0 up to, but not including, 1.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Any] = time.sleep
    chance: Callable[[], float] = random.random


class Patience:
    """Waits between attempts to read one URL.

    Args:
        url: Named when patience ends.
        timeout: Seconds without any answer after which it ends.
        waiting: Time and chance.
    """

    def __init__(self, url: str, timeout: float, waiting: Waiting) -> None:
        self._url = url
        self._timeout = timeout
        self._waiting = waiting
        self._asked_first: float | None = None
        self._delay = _FIRST_DELAY

    def ask(self) -> None:
        """An attempt begins."""
        if self._asked_first is None:
            self._asked_first = self._waiting.clock()

    def answered(self) -> None:
        """There was an answer."""
        self._asked_first = None
        self._delay = _FIRST_DELAY

    def failed(self, error: Exception) -> None:
        """The attempt failed: wait before the next one.

        Raises:
            SourceUnavailableError: If no attempt has been answered for too long.
        """
        now = self._waiting.clock()
        tried = now - (now if self._asked_first is None else self._asked_first)
        if tried >= self._timeout:
            raise SourceUnavailableError(self._url, tried, _in_words(error)) from error
        # The last attempt comes when the time is over, not a little before.
        self.pause(at_most=self._timeout - tried)

    def pause(self, at_most: float = _LONGEST_DELAY) -> None:
        """Wait, each time about twice as long; by chance, so that many who wait do not all come back at once."""
        self._waiting.sleep(min(self._delay * (0.5 + self._waiting.chance()), at_most))
        self._delay = min(2 * self._delay, _LONGEST_DELAY)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceStatistics:
    """Sums since the start.

    Attributes:
        stall_seconds: How long readers waited for bytes.
        cache_hits: Slices that were local when they were wanted.
        cache_misses: Slices that were not, or not wholly.
        uncached: Slices that found no room in the cache and went past it.
        bytes_fetched: From sources, those fetched again included; nothing for files of this machine.
        retries: Requests that were made again, after no answer or a wrong one.
        corrupt_chunks: Chunks that were not what the index says, from a source or from the cache.
        prefetched: Slices that were fetched before they were wanted.
    """

    stall_seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    uncached: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    corrupt_chunks: int = 0
    prefetched: int = 0


class SliceCounters:
    """Statistics that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = asdict(SliceStatistics())

    def add(self, **amounts: float) -> None:
        """Add to the sums named as the attributes of ``SliceStatistics``."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def sums(self) -> dict[str, float]:
        """The sums as they are now, by the names of ``SliceStatistics``."""
        with self._lock:
            return dict(self._sums)

    def snapshot(self) -> SliceStatistics:
        """The sums as they are now."""
        return SliceStatistics(**self.sums())  # type: ignore[arg-type]


_PERMANENT = (ImportError, NotImplementedError, TypeError)  # asking again helps against none of these


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchOptions:
    """How hard a fetch tries.

    Attributes:
        timeout: Seconds that a source may stay away.
        attempts: How often a chunk is fetched that is short or wrong.
        request_bytes: Largest range asked for at once; the first request for a slice is a single chunk.

    Raises:
        OptionError: If an option is out of its range.
    """

    timeout: float = 60.0
    attempts: int = 3
    request_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if not number or not math.isfinite(self.timeout) or self.timeout <= 0:
            raise OptionError("timeout", self.timeout, "a finite number of seconds, more than 0")
        for option in ("attempts", "request_bytes"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(option, value, "a positive whole number")


def fetch_chunks(
    slice_: Slice,
    plan: ChunkPlan,
    read: Callable[[int, int], bytes],
    *,
    first: int = 0,
    options: FetchOptions | None = None,
    waiting: Waiting | None = None,
    counters: SliceCounters | None = None,
) -> Iterator[bytearray]:
    """Fetch the chunks of a slice in order.

    Requests grow from one chunk to ``request_bytes``: the first sample is there soon, and a long way to the source is
    not paid for each chunk.

    Args:
        slice_: What is fetched.
        plan: Its chunks.
        read: Reads the bytes of the slice's file from the first number up to, but not including, the second.
        first: Number of the first chunk that is wanted.
        options: How hard to try.
        waiting: Time and chance.
        counters: Where bytes and retries are counted.

    Yields:
        Verified chunks, each in memory of its own.

    Raises:
        SliceCorruptError: If a chunk is short or wrong however often it is fetched, or its file stays missing.
        SourceUnavailableError: If the source stays away.
    """
    options = options or FetchOptions()
    waiting = waiting or Waiting()
    counters = counters or SliceCounters()
    patience = Patience(slice_.url, options.timeout, waiting)
    most = max(options.request_bytes // plan.chunk_bytes, 1)
    number, together, wrong = first, 1, 0
    while number < plan.count:
        start = plan.bounds(number)[0]
        stop = plan.bounds(min(number + together, plan.count) - 1)[1]
        patience.ask()
        reason = ""
        try:
            content = read(slice_.start + start, slice_.start + stop)
        except _PERMANENT:
            raise
        except Exception as error:  # each file system has its own
            counters.add(retries=1)
            try:
                patience.failed(error)
            except SourceUnavailableError as away:
                if not isinstance(error, FileNotFoundError):
                    raise
                # For a while a missing file may be a folder that is not mounted yet; then it is the slice's fault.
                missing = f"its file is missing, and has been for {away.seconds:.1f} s."
                raise SliceCorruptError(slice_.key, slice_.url, missing) from error
            continue
        counters.add(bytes_fetched=len(content))
        if len(content) > stop - start:
            content, reason = b"", "its source answers with more bytes than asked for, so it cannot serve ranges."
        before = number
        for chunk in _pieces(content, plan, number):
            if not plan.is_right(number, chunk):
                reason = reason or _what_is_wrong(plan, number, chunk)
                break
            yield chunk
            number += 1
        if start + len(content) >= stop and not reason:
            patience.answered()
            together, wrong = min(2 * together, most), 0
            continue
        # Short, or a wrong chunk: the rest is asked for again, from the first chunk that is missing.
        reason = reason or _what_is_wrong(plan, number, b"")
        wrong = 1 if number > before else wrong + 1
        together = 1
        counters.add(retries=1, corrupt_chunks=1)
        if wrong >= options.attempts:
            raise SliceCorruptError(slice_.key, slice_.url, f"{reason} It was fetched {wrong} times.")
        patience.pause()


def _pieces(content: bytes, plan: ChunkPlan, number: int) -> Iterator[bytearray]:
    view = memoryview(content)
    while view:
        start, stop = plan.bounds(number)
        yield bytearray(view[: stop - start])
        view = view[stop - start :]
        number += 1


def _what_is_wrong(plan: ChunkPlan, number: int, chunk: bytes | bytearray) -> str:
    start, stop = plan.bounds(number)
    place = f"of its bytes {start} to {stop - 1}"
    if len(chunk) < stop - start:
        return f"{place}, only {len(chunk)} are there."
    return f"{place[3:]} have another checksum than they should."
