"""Finds out on the host how far a GPU has got, while neither of them waits for the other.

One thread, ``bytescheduler-device``, looks at two lines in turn: data that is to exist, and operations that are to end.
What is in a line happens in its order, so only the first of each is looked at. An event can be asked (``query``), or
waited for without a limit; so this thread asks, about five thousand times a second while there is something to ask
for, and sleeps without a limit while there is not. An answer is thus up to 0.2 ms late, which is covered by what else
credit keeps in flight.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns

__all__ = ["DeviceWatch", "Look"]

_LOOK_AGAIN_S = 2e-4

Look = Callable[[], bool]
"""Returns whether it has happened, after telling whom it concerns; must not raise or block."""


class DeviceWatch:
    """The thread; see the module.

    Args:
        surroundings: Entered once, on the thread: what is told is told in there.
    """

    def __init__(self, surroundings: Callable[[], AbstractContextManager[object]]) -> None:
        self._surroundings = surroundings
        self._data: deque[Look] = deque()
        self._results: deque[Look] = deque()
        self._new: queue.SimpleQueue[tuple[deque[Look], Look] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bytescheduler-device", daemon=True)
        self._thread.start()

    def await_data(self, look: Look) -> None:
        """Look until data exists; for any thread."""
        self._new.put((self._data, look))

    def await_result(self, look: Look) -> None:
        """Look until an operation has ended; for any thread."""
        self._new.put((self._results, look))

    def stop(self, timeout: float) -> bool:
        """End the thread; what it still watched is left alone. Returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._new.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        prefer_short_turns()
        with self._surroundings():
            happened = False
            while not self._stopping.is_set():
                self._take_in(patiently=not happened)
                happened = self._happened(self._data) | self._happened(self._results)

    def _take_in(self, *, patiently: bool) -> None:
        """Put what is new into its line; while nothing happens, give it a moment to come."""
        try:
            if not self._data and not self._results:
                new = self._new.get()  # woken by stop(), which puts None
            else:
                new = self._new.get(timeout=_LOOK_AGAIN_S) if patiently else self._new.get_nowait()
            while new is not None:
                line, look = new
                line.append(look)
                new = self._new.get_nowait()
        except queue.Empty:
            pass

    def _happened(self, line: deque[Look]) -> bool:
        happened = False
        while line and not self._stopping.is_set() and line[0]():
            line.popleft()
            happened = True
        return happened
