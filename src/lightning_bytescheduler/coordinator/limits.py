"""No member takes the event loop for itself: its frames have a rate, and transfers that stand still are cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Transfer:
    """Something that is to get on; one look now and then stands in place of a timeout for every piece.

    Args:
        cut: Ends it.
        now: In seconds.
    """

    def __init__(self, cut: Callable[[], object], now: float) -> None:
        self.cut = cut
        self.moved = True
        self.since = now


class Stalls:
    """Watches over transfers. For one event loop.

    Args:
        seconds: Without a move, after which a transfer is cut off.
        clock: Seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._transfers: set[Transfer] = set()

    @contextmanager
    def watch(self, cut: Callable[[], object]) -> Iterator[Transfer]:
        """Watch over a transfer, whose ``moved`` is to be set whenever it gets on.

        Args:
            cut: Ends it.
        """
        transfer = Transfer(cut, self._clock())
        self._transfers.add(transfer)
        try:
            yield transfer
        finally:
            self._transfers.discard(transfer)

    def look(self) -> None:
        """Cut off what has not moved for too long."""
        now = self._clock()
        for transfer in list(self._transfers):
            if transfer.moved:
                transfer.moved = False
                transfer.since = now
            elif now - transfer.since > self._seconds:
                self._transfers.discard(transfer)
                transfer.cut()


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
