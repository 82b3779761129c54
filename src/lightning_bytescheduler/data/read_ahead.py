"""Reads a bounded number of chunks ahead in a thread of its own, for slices that go past the cache."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from lightning_bytescheduler.data.chunks import Bytes
from lightning_bytescheduler.exceptions import SourceUnavailableError

__all__ = ["ReadAhead"]

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 1.0


class ReadAhead:
    """An iterator that is run by a thread.

    Args:
        chunks: Run in the thread.
        ahead: How many chunks may wait to be taken.
        url: What is read; named if it does not answer.
        timeout: Seconds to wait for a chunk.
    """

    def __init__(self, chunks: Iterator[Bytes], *, ahead: int, url: str, timeout: float) -> None:
        self._queue: queue.Queue[Bytes | Exception | None] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._url = url
        self._timeout = timeout
        # A daemon: a request that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(chunks,), name="slice-read-ahead", daemon=True)
        self._thread.start()

    def chunks(self) -> Iterator[Bytes]:
        """The chunks, or the exception that ended them.

        Raises:
            SourceUnavailableError: If none came in time.
        """
        while True:
            try:
                item = self._queue.get(timeout=self._timeout)
            except queue.Empty:
                raise SourceUnavailableError(self._url, self._timeout, "a request that has not returned") from None
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    def close(self) -> None:
        """Stop the thread; one whose request does not return is left behind, and ends with it or the process."""
        self._stopped.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self, chunks: Iterator[Bytes]) -> None:
        try:
            for chunk in chunks:
                if not self._put(chunk):
                    return
            self._put(None)
        except Exception as error:  # whatever it is, it belongs to whoever reads
            self._put(error)

    def _put(self, item: Bytes | Exception | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False
