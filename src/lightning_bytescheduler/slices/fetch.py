"""Fetches a slice from its source, chunk by chunk, again where need be; what it hands on has been verified.

What a source says when asking again does not help: that a reader lacks rights, or a certificate, or asks wrongly.
"""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from lightning_bytescheduler.checks import importing, is_whole
from lightning_bytescheduler.exceptions import OptionError, SliceCorruptError, SourceUnavailableError
from lightning_bytescheduler.slices.options import TIMEOUT
from lightning_bytescheduler.slices.slice import ChunkPlan, Slice
from lightning_bytescheduler.slices.urls import is_http, local_path

log = logging.getLogger(__name__)

_UNAUTHORIZED, _FORBIDDEN, _MISSING, _PROXY = 401, 403, 404, 407
_PASSING = (_MISSING, 408, 416, 425, 429)  # a missing file may be a folder that is not mounted yet
_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")  # botocore's
_HEADER = "storage_options={'headers': {'Authorization': 'Bearer TOKEN'}}"


def refusal_of(error: BaseException, url: str) -> tuple[str, str] | None:
    """What a source says that refuses to be read, and the way out; None if asking again may help.

    Args:
        error: What was raised when it was asked.
        url: Of the source.
    """
    for cause in _chain(error):
        status = _status(cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted here ({_short(cause)})",
                "For one that was made by yourself, set the environment variable SSL_CERT_FILE to the file of it; "
                "its subjectAltName must have the host of the URL.",
            )
        if isinstance(cause, ssl.SSLError):
            return _short(cause), "Check whether the URL should begin with http:// rather than https://."
        if status in (_UNAUTHORIZED, _FORBIDDEN, _PROXY):
            return f"{status} {_short(cause)}", _rights(url, listing=status == _FORBIDDEN)
        if isinstance(cause, PermissionError) or type(cause).__name__ in _WITHOUT_CREDENTIALS:
            return _short(cause), _rights(url, listing=False)
        if status is not None and 400 <= status < 500 and status not in _PASSING:
            return f"{status} {_short(cause)}", "Check the URL and storage_options."
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from: fsspec calls much of it a file that is not found."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _status(error: BaseException) -> int | None:
    """The status of HTTP that the libraries behind fsspec know: aiohttp, huggingface_hub, gcsfs, and botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(error, "status", None) or getattr(response, "status_code", None)
    found = found or getattr(error, "code", None)  # last, as it is deprecated in aiohttp
    return found if is_whole(found) else None


def _rights(url: str, *, listing: bool) -> str:
    if local_path(url) is not None:
        return "Change the rights of the file, or read it as another user."
    if not is_http(url):
        return (
            "Give its credentials in storage_options, such as {'key': ..., 'secret': ...} for s3 or "
            "{'token': ...} for gs and hf; or check that they may read it."
        )
    words = f"Send the header that it asks for, as {_HEADER}; if you do, the token is not the right one."
    if listing:
        words += " If only the listing of a folder is forbidden, give the URL of the index in it, .../slices.index."
    return words


def _short(error: BaseException) -> str:
    return str(getattr(error, "message", None) or error) or type(error).__name__


_REQUEST_BYTES = 16 * 1024 * 1024
_ATTEMPTS = 3  # at a chunk that is short or wrong
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0
_SAID_SECONDS = 2.0  # without an answer, until it is said that one is waited for

LASTING: tuple[type[Exception], ...] = (ImportError, NotImplementedError, OptionError, TypeError)
"""Errors of a source against which asking again does not help."""

LASTING_AT_FIRST = (*LASTING, FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError)
"""The same at the beginning: what is missing then was probably never there."""

_Answer = TypeVar("_Answer")


_of_its_own = random.SystemRandom()  # Python's other one is the user's, and seeded alike on all workers


def _chance() -> float:  # which can be pickled
    return _of_its_own.random()


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
    chance: Callable[[], float] = _chance


def ask(
    url: str,
    question: Callable[[], _Answer],
    *,
    timeout: float,
    waiting: Waiting,
    lasting: tuple[type[Exception], ...] = LASTING,
    on_retry: Callable[[], None] = lambda: None,
) -> _Answer:
    """Ask a source, and again as long as it does not answer.

    Args:
        url: Of the source; named if it stays away.
        question: What is asked.
        timeout: Seconds without an answer after which it is given up.
        waiting: Time and chance.
        lasting: Errors that are raised at once, as asking again does not help.
        on_retry: Called before each pause.

    Raises:
        SourceUnavailableError: If the source stays away, or refuses to be read, which is not tried again.
    """
    with importing("Reading slices", extra="data"):
        from tenacity import RetryCallState, Retrying, retry_if_exception

    began = waiting.clock()
    is_said = False

    def is_over(_: RetryCallState) -> bool:
        return waiting.clock() - began >= timeout

    def pause(state: RetryCallState) -> float:
        # The last attempt comes when the time is over, not a little before.
        return max(min(_delay(state.attempt_number, waiting), began + timeout - waiting.clock()), 0.0)

    def before_pause(state: RetryCallState) -> None:
        nonlocal is_said
        on_retry()
        if waiting.clock() - began >= _SAID_SECONDS and not is_said and state.outcome is not None:
            is_said = True
            words = _words(state.outcome.exception())
            log.warning("%s does not answer: %s. It is asked again, for %.0f s in all.", url, words, timeout)

    def give_up(state: RetryCallState) -> _Answer:
        error = state.outcome.exception() if state.outcome is not None else None
        raise SourceUnavailableError(url, waiting.clock() - began, _words(error)) from error

    def answer() -> _Answer:
        try:
            return question()
        except Exception as error:
            # Asked first of all: an untrusted certificate is a ValueError too.
            refused = refusal_of(error, url)
            if refused is None:
                raise
            raise _Refused(*refused) from error

    try:
        return Retrying(
            retry=retry_if_exception(
                lambda error: isinstance(error, Exception) and not isinstance(error, (*lasting, _Refused))
            ),
            stop=is_over,
            wait=pause,
            sleep=waiting.sleep,
            before_sleep=before_pause,
            retry_error_callback=give_up,
        )(answer)
    except _Refused as refused:
        raise SourceUnavailableError(url, waiting.clock() - began, *refused.args) from refused.__cause__


class _Refused(Exception):
    """A source refuses to be read: what it says, and the way out."""


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _delay(failures: int, waiting: Waiting) -> float:
    """Each pause is about twice as long; by chance, so that many who wait do not all come back at once."""
    doubled: float = _FIRST_DELAY * 2 ** min(failures - 1, 30)
    return min(doubled, _LONGEST_DELAY) * (0.5 + waiting.chance())


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceStatistics:
    """Sums since the start.

    Attributes:
        wait_seconds: How long the training waited for its batches, with all that it took to make them.
        stall_seconds: How long readers waited for bytes.
        cache_hits: Slices that were local when they were wanted.
        cache_misses: Slices that were not, or not wholly.
        uncached: Slices that found no room in the cache and went past it.
        bytes_fetched: From sources, those fetched again included; nothing for files of this machine.
        retries: Requests that were made again, after no answer or a wrong one.
        corrupt_chunks: Chunks that were not what the index says, from a source or from the cache.
        prefetched: Slices that were fetched before they were wanted.
    """

    wait_seconds: float = 0.0
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


def fetch_chunks(
    slice_: Slice,
    plan: ChunkPlan,
    read: Callable[[int, int], bytes],
    *,
    first: int = 0,
    timeout: float = TIMEOUT,
    waiting: Waiting | None = None,
    counters: SliceCounters | None = None,
) -> Iterator[bytearray]:
    """Fetch the chunks of a slice in order.

    Requests grow from one chunk to 16 MiB: the first sample is there soon, and a long way to the source is
    not paid for each chunk.

    Args:
        slice_: What is fetched.
        plan: Its chunks.
        read: Reads the bytes of the slice's file from the first number up to, but not including, the second.
        first: Number of the first chunk that is wanted.
        timeout: Seconds that the source may stay away.
        waiting: Time and chance.
        counters: Where bytes and retries are counted.

    Yields:
        Verified chunks, each in memory of its own.

    Raises:
        SliceCorruptError: If a chunk is short or wrong however often it is fetched.
        SourceUnavailableError: If the source stays away, or the file, which may be in a folder that is not mounted yet.
    """
    waiting = waiting or Waiting()
    counters = counters or SliceCounters()
    most = max(_REQUEST_BYTES // plan.chunk_bytes, 1)
    number, together = first, 1
    wrong = pauses = 0  # in a row: answers without a right chunk, and those that were not all right
    while number < plan.count:
        start = plan.bounds(number)[0]
        stop = plan.bounds(min(number + together, plan.count) - 1)[1]
        content = ask(
            slice_.url,
            partial(read, slice_.start + start, slice_.start + stop),
            timeout=timeout,
            waiting=waiting,
            on_retry=lambda: counters.add(retries=1),
        )
        counters.add(bytes_fetched=len(content))
        reason = ""
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
            together, wrong, pauses = min(2 * together, most), 0, 0
            continue
        # Short, or a wrong chunk: the rest is asked for again, from the first chunk that is missing.
        reason = reason or _what_is_wrong(plan, number, b"")
        wrong = 1 if number > before else wrong + 1
        pauses += 1
        together = 1
        counters.add(retries=1, corrupt_chunks=1)
        if wrong >= _ATTEMPTS:
            raise SliceCorruptError(slice_.key, slice_.url, f"{reason} It was fetched {wrong} times.")
        waiting.sleep(_delay(pauses, waiting))


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
