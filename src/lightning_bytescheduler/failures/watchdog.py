"""Ends a process whose training thread does not notice that training is over.

After a rank has failed, a survivor's training thread comes back by itself wherever it waits for this package, and soon
after the failing process has ended wherever it waits for torch. Nothing brings it back from a loop that never ends, nor
from a collective whose other side is alive but will not come. NCCL's watchdog and Lightning's launcher end such a
process too; this one says first why, and where the thread was.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["Watchdog", "frame_of"]

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_LAST_WORDS_S = 1.0

_collecting = threading.Lock()  # held while collection of garbage is put off


def frame_of(thread: int) -> FrameType | None:
    """Where a thread is, or ``None`` if there is none such.

    Until Python 3.12 the interpreter holds a lock of its own while it answers, and may collect garbage meanwhile. What
    a destructor does then, such as joining a thread that wants that lock, never ends: all threads stood still for good.
    So there is no collection meanwhile. Source: CPython's issue 106883.

    Args:
        thread: Its identifier, as of :func:`threading.get_ident`.
    """
    if sys.version_info >= (3, 12):
        return sys._current_frames().get(thread)
    with _collecting:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if enabled:
                gc.enable()


class Watchdog:
    """Watches over the thread that made it.

    Args:
        patience: Seconds the thread has to come back after :meth:`arm`.
        end: Ends the process with an exit code, at once.
    """

    def __init__(self, patience: float = _PATIENCE_S, end: Callable[[int], object] = os._exit) -> None:
        self._patience = patience
        self._end = end
        self._thread = threading.get_ident()
        self._why: str | None = None
        self._since = 0.0
        self._suspended = False
        self._disarmed = False

    def arm(self, why: str) -> None:
        """Training is over, because of ``why``; the thread should come back from wherever it is."""
        if self._why is None:
            self._since = time.monotonic()
            self._why = why

    def disarm(self) -> None:
        """The thread is back, and will not be ended any more."""
        self._disarmed = True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Do not end the process meanwhile; the patience counts anew afterwards. For the thread itself."""
        self._suspended = True
        try:
            yield
        finally:
            self._since = time.monotonic()
            self._suspended = False

    def check(self) -> None:
        """End the process if the time has come; called every now and then by another thread."""
        if self._why is None or self._disarmed or self._suspended or time.monotonic() < self._since + self._patience:
            return
        self._disarmed = True
        # On a thread of its own: the stuck thread may hold the lock of a stream whose other end does not read.
        reporter = threading.Thread(target=self._report, name="bytescheduler-last-words", daemon=True)
        reporter.start()
        reporter.join(_LAST_WORDS_S)
        self._end(1)

    def _report(self) -> None:
        frame = frame_of(self._thread)
        place = "" if frame is None else "".join(traceback.format_stack(frame))
        why = (self._why or "").rstrip(".")
        log.critical(
            "%s. The training thread did not come back within %g s, so its process is ended. It was at:\n%s",
            why, self._patience, place,
        )  # fmt: skip
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # closed, or replaced by something that cannot
                stream.flush()
