"""A user's batches, over and over, and how long they were waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["RepeatedData"]


class RepeatedData:
    """Begins again when the batches end, so that no epoch does; ends where there are none at all.

    Args:
        batches: Can be iterated more than once, unless it never ends.

    Attributes:
        waited: Seconds spent waiting for batches so far.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.waited = 0.0

    def __iter__(self) -> Iterator[Any]:
        found = True
        while found:
            found = False
            start = time.perf_counter()
            for batch in self._batches:
                self.waited += time.perf_counter() - start
                found = True
                yield batch
                start = time.perf_counter()
