"""Fetches a slice from its source chunk by chunk, with retries; all chunks are verified.

Refusals, for which retries do not help, are recognised: missing rights, an untrusted certificate, a wrong request.
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
from lightning_bytescheduler.slices import urls
from lightning_bytescheduler.slices.options import TIMEOUT
from lightning_bytescheduler.slices.slice import Slice

log = logging.getLogger(__name__)

_UNAUTHORIZED, _FORBIDDEN, _MISSING, _PROXY = 401, 403, 404, 407
_PASSING = (_MISSING, 408, 416, 425, 429)  # a missing file may be in a folder that is not mounted yet
_WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")  # botocore's
_HEADER = "storage_options={'headers': {'Authorization': 'Bearer TOKEN'}}"


def refusal_of(error: BaseException | None, url: str) -> tuple[str, str] | None:
    """Return a source's refusal and the way out; ``None`` if a retry may help."""
    while error is not None:
        status, words = _status(error), str(getattr(error, "message", None) or error) or type(error).__name__
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not trusted here ({words})",
                "For a certificate of your own, set the environment variable SSL_CERT_FILE to its file; "
                "its subjectAltName must have the host of the URL.",
            )
        if isinstance(error, ssl.SSLError):
            return words, "Check whether the URL should begin with http:// rather than https://."
        if status in (_UNAUTHORIZED, _FORBIDDEN, _PROXY):
            return f"{status} {words}", _rights(url, listing=status == _FORBIDDEN)
        if isinstance(error, PermissionError) or type(error).__name__ in _WITHOUT_CREDENTIALS:
            return words, _rights(url, listing=False)
        if status is not None and 400 <= status < 500 and status not in _PASSING:
            return f"{status} {words}", "Check the URL and storage_options."
        error = error.__cause__
    return None


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in errors of the libraries behind fsspec: aiohttp, huggingface_hub, gcsfs, botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(error, "status", None) or getattr(response, "status_code", None)
    found = found or getattr(error, "code", None)  # last, as it is deprecated in aiohttp
    return found if is_whole(found) else None


def _rights(url: str, *, listing: bool) -> str:
    if urls.local_path(url) is not None:
        return "Change the rights of the file, or read it as another user."
    if not urls.is_http(url):
        return (
            "Give its credentials in storage_options, such as {'key': ..., 'secret': ...} for s3 or "
            "{'token': ...} for gs and hf; or check that they may read it."
        )
    words = f"Send the header that it asks for, as {_HEADER}; if you do, the token is not the right one."
    if listing:
        words += " If only the listing of a folder is forbidden, give the URL of the index in it, .../slices.index."
    return words


_REQUEST_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024  # of a file that is read as a whole
_ATTEMPTS = 3  # to fetch a chunk that is short or wrong
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0
_SAID_SECONDS = 2.0  # without an answer, before a warning

LASTING: tuple[type[Exception], ...] = (ImportError, NotImplementedError, OptionError, TypeError)
"""Errors of a source that retries do not help."""

MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of a source that has no such file."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Time, which tests replace.

    Attributes:
        sleep: Waits for the given seconds; may raise to stop the waiting code.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Any] = time.sleep


def ask(
    url: str,
    question: Callable[[], _Answer],
    *,
    timeout: float,
    waiting: Waiting,
    lasting: tuple[type[Exception], ...] = LASTING,
) -> _Answer:
    """Ask a source, with retries while it does not answer.

    Args:
        url: URL of the source, for messages.
        question: The request.
        timeout: Seconds without an answer before giving up.
        waiting: Time.
        lasting: Errors that are raised at once, as retries do not help.

    Raises:
        SourceUnavailableError: If the source does not answer, or refuses, which is not retried.
    """
    with importing("Reading slices", extra="data"):
        from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception

    began, is_said = waiting.clock(), False

    def may_pass(error: BaseException) -> bool:
        refused = refusal_of(error, url)  # asked first, as an untrusted certificate is a ValueError too
        if refused is not None:
            raise SourceUnavailableError(url, waiting.clock() - began, *refused) from error
        return isinstance(error, Exception) and not isinstance(error, lasting)

    def pause(state: RetryCallState) -> float:
        # The last attempt comes when the time is over, not earlier.
        return max(min(_delay(state.attempt_number), began + timeout - waiting.clock()), 0.0)

    def before_pause(state: RetryCallState) -> None:
        nonlocal is_said
        if not is_said and waiting.clock() - began >= _SAID_SECONDS and state.outcome is not None:
            is_said = True
            words = _words(state.outcome.exception())
            log.warning("%s does not answer: %s. It is asked again, for %.0f s in all.", url, words, timeout)

    try:
        return Retrying(
            retry=retry_if_exception(may_pass),
            stop=lambda _: waiting.clock() - began >= timeout,
            wait=pause,
            sleep=waiting.sleep,
            before_sleep=before_pause,
        )(question)
    except RetryError as over:
        error = over.last_attempt.exception()
        raise SourceUnavailableError(url, waiting.clock() - began, _words(error)) from error


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _delay(failures: int) -> float:
    """Return the next pause: about twice the last, randomised so that many waiters do not retry at once."""
    doubled: float = _FIRST_DELAY * 2 ** min(failures - 1, 30)
    # Python's global generator is the user's, and seeded alike on all workers.
    return min(doubled, _LONGEST_DELAY) * (0.5 + random.SystemRandom().random())


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceStatistics:
    """Sums since the start.

    Attributes:
        wait_seconds: Seconds that the training waited for batches, including their preparation.
        stall_seconds: Seconds that readers waited for bytes.
        samples: Samples that batches were to have.
        skipped: Those of them that were left out, as they cannot be made.
        uncached: Slices that had no room in the cache and were read without it.
        bytes_fetched: Bytes from sources, repeated ones included; nothing for files on this machine.
        corrupt_chunks: Chunks that differ from the index, from a source or from the cache.
    """

    wait_seconds: float = 0.0
    stall_seconds: float = 0.0
    samples: int = 0
    skipped: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    uncached: int = 0
    bytes_fetched: int = 0
    corrupt_chunks: int = 0
    prefetched: int = 0


class SliceCounters:
    """Statistics that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = asdict(SliceStatistics())

    def add(self, **amounts: float) -> None:
        """Add to the sums, named as the attributes of ``SliceStatistics``."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def take(self) -> dict[str, float]:
        """Return the sums that are not 0, by the names of ``SliceStatistics``, and begin anew."""
        with self._lock:
            sums, self._sums = self._sums, asdict(SliceStatistics())
        return {name: amount for name, amount in sums.items() if amount}

    def snapshot(self) -> SliceStatistics:
        """Return the present sums."""
        with self._lock:
            return SliceStatistics(**self._sums)  # type: ignore[arg-type]


def fetch_chunks(
    slice_: Slice,
    read: Callable[[int, int], bytes],
    *,
    first: int = 0,
    timeout: float = TIMEOUT,
    waiting: Waiting | None = None,
    lasting: tuple[type[Exception], ...] = LASTING,
    counters: SliceCounters | None = None,
) -> Iterator[bytearray]:
    """Fetch the chunks of a slice in order.

    Requests grow from one chunk to 16 MiB, so that the first sample comes soon, and latency is not paid for each chunk.

    Args:
        slice_: The slice.
        read: Reads the bytes of the slice's file from the first number up to, but not including, the second.
        first: Number of the first chunk.
        timeout: Seconds that the source may be unavailable.
        waiting: Time.
        lasting: Errors that are raised at once, as retries do not help.
        counters: Counts bytes and corrupt chunks.

    Yields:
        Verified chunks, each in its own memory.

    Raises:
        SliceCorruptError: If a chunk stays short or wrong when fetched again.
        SourceUnavailableError: If the source or the file is unavailable; its folder may not be mounted yet.
    """
    waiting, counters = waiting or Waiting(), counters or SliceCounters()
    number, together = first, 1
    wrong = 0  # answers in a row without a correct chunk
    while number < slice_.count:
        before = number
        start = slice_.bounds(number)[0]
        stop = slice_.bounds(min(number + together, slice_.count) - 1)[1]
        request = partial(read, start, stop)
        content = memoryview(ask(slice_.url, request, timeout=timeout, waiting=waiting, lasting=lasting))
        counters.add(bytes_fetched=len(content))
        reason = ""
        if len(content) > stop - start:
            reason = "its source answers with more bytes than asked for, so it cannot serve ranges."
        while not reason and start < stop:
            begin, end = slice_.bounds(number)
            chunk = bytearray(content[: end - begin])
            if slice_.is_right(number, chunk):
                yield chunk
                content, start, number = content[end - begin :], end, number + 1
            elif len(chunk) < end - begin:
                reason = f"of its bytes {begin} to {end - 1}, only {len(chunk)} are there."
            else:
                reason = f"its bytes {begin} to {end - 1} have another checksum than they should."
        if not reason:
            together, wrong = min(2 * together, max(_REQUEST_BYTES // slice_.chunk_bytes, 1)), 0
            continue
        # Short, or a wrong chunk: ask again from the first missing chunk.
        wrong = 1 if number > before else wrong + 1
        together = 1
        counters.add(corrupt_chunks=1)
        if wrong >= _ATTEMPTS:
            raise SliceCorruptError(slice_.key, slice_.url, f"{reason} It was fetched {wrong} times.")
        waiting.sleep(_delay(wrong))


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files behind URLs at the first look. A missing file is an error at once, as it probably never existed.

    Attributes:
        options: For fsspec's file systems.
        timeout: Seconds that a source may be unavailable.
    """

    options: Mapping[str, Any]
    timeout: float = TIMEOUT

    def ask(self, question: Callable[..., _Answer], url: str, *arguments: Any) -> _Answer:
        """Return the answer of a function of ``urls`` about a URL.

        Raises:
            SourceUnavailableError: If the source is unavailable.
        """
        asked = partial(question, url, *arguments, options=self.options)
        lasting = (*LASTING, *MISSING, ValueError)
        return ask(url, asked, timeout=self.timeout, waiting=Waiting(), lasting=lasting)

    def pieces_of(self, url: str, size: int) -> Iterator[bytearray]:
        """Yield a whole file, in pieces of whole chunks."""
        slice_ = Slice(key=url, url=url, size=size, samples=1, chunk_bytes=_PIECE_BYTES)
        read = partial(urls.read_range, url, options=self.options)
        return fetch_chunks(slice_, read, timeout=self.timeout)
