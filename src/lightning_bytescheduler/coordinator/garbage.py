"""When the coordinator's process looks for garbage: not amid the reports of a round.

With a thousand workers, a full collection of Python's looks at half a million objects and stops all answers for 0.2 s;
what waits then takes seconds to catch up. Cycles are few: they are of connections that have ended. So the automatic
collection is left to young objects, and all are looked at where nobody waits for an answer, at the end of a round, if
there may be something to find.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Garbage"]

_YOUNG = 20_000  # objects made before young ones are looked at; of 700, Python's own, seventy reports make as many
_NEVER = 1_000_000  # collections of the middle generation before a full one
_MOST_ENDED = 1000  # connections, after which it is not put off any longer


class Garbage:
    """Decides when to collect. For one event loop.

    Does nothing in a process that has not entered :meth:`collected_rarely`.
    """

    _rarely = False  # of the process, as the collector is

    def __init__(self) -> None:
        self._ended = 0

    @classmethod
    @contextmanager
    def collected_rarely(cls) -> Iterator[None]:
        """Leave full collections of this process to its coordinator meanwhile: it is to do nothing else."""
        gc.collect()
        gc.freeze()  # torch's modules stay
        young, middle, old = gc.get_threshold()
        gc.set_threshold(max(young, _YOUNG), middle, _NEVER)
        cls._rarely = True
        try:
            yield
        finally:
            cls._rarely = False
            gc.set_threshold(young, middle, old)
            gc.unfreeze()

    def ended(self) -> None:
        """A connection has ended, and may leave something."""
        self._ended += 1
        if self._ended >= _MOST_ENDED:
            self.collect()

    def collect(self) -> None:
        """Nobody waits for an answer now: look, if there may be something."""
        if self._ended and self._rarely:
            gc.collect()
        self._ended = 0
