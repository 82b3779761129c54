"""Transfers that do not get on are cut off: one look now and then, in place of a timeout for every piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Stalls", "Transfer"]


class Transfer:
    """Something that is to get on.

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
