"""So many frames or requests a second of one member, and some at once: nobody takes the event loop for itself."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RateLimit"]

_PER_SECOND, _BURST = 100.0, 200.0


class RateLimit:
    """A token bucket: full at first, and filled again at a steady rate. For one thread.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = _BURST
        self._at = clock()

    def take(self, *, longest: float | None = None) -> float | None:
        """Count one more.

        Args:
            longest: Seconds that it may be held back; ``None`` for any time.

        Returns:
            Seconds for which it is to be held back; ``None`` if that is longer, and it was not counted.
        """
        now = self._clock()
        self._left = min(self._left + (now - self._at) * _PER_SECOND, _BURST)
        self._at = now
        pause = max(1 - self._left, 0.0) / _PER_SECOND
        if longest is not None and pause > longest:
            return None
        self._left -= 1
        return pause
