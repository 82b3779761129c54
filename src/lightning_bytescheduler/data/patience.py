"""How long a source that does not answer is asked again: exponential back-off with jitter, up to a time limit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_bytescheduler.exceptions import SourceUnavailableError

__all__ = ["Patience", "Waiting"]

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
