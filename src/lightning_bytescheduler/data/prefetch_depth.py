"""How many slices are kept ahead: as many as are consumed while one is fetched, and one more."""

from __future__ import annotations

import math

__all__ = ["PrefetchDepth"]

_WEIGHT = 0.3  # of the newest measurement
_CALM_SLICES = 16  # after so many without a stall, what a stall added is taken back by one
_FIRST_DEPTH = 2


class PrefetchDepth:
    """Follows the speeds of consumption and of fetching. Not thread-safe; time is measured by its owner.

    Args:
        most: Bound of the depth.
        fixed: The depth, if it is not to follow anything.
    """

    def __init__(self, *, most: int, fixed: int | None = None) -> None:
        self._most = most
        self._fixed = fixed
        self._fetch: float | None = None
        self._consume: float | None = None
        self._added = 0
        self._calm = 0

    @property
    def depth(self) -> int:
        """Slices to keep ahead of the one being read."""
        if self._fixed is not None:
            return self._fixed
        needed = _FIRST_DEPTH
        if self._fetch is not None and self._consume is not None:
            # Compared before the division: a consumer that takes no time asks for as much as there may be.
            needed = (
                self._most if self._fetch >= self._most * self._consume else 1 + math.ceil(self._fetch / self._consume)
            )
        return max(min(needed + self._added, self._most), 1)

    def fetched(self, seconds: float) -> None:
        """A slice took so long to fetch."""
        self._fetch = seconds if self._fetch is None else self._fetch + _WEIGHT * (seconds - self._fetch)

    def consumed(self, seconds: float, *, stalled: bool) -> None:
        """A slice took so long to consume, waiting for it not included; whether it had to be waited for."""
        self._consume = seconds if self._consume is None else self._consume + _WEIGHT * (seconds - self._consume)
        self._calm = 0 if stalled else self._calm + 1
        if stalled:
            self._added = min(self._added + 1, self._most)
        elif self._calm >= _CALM_SLICES and self._added:
            self._added -= 1
            self._calm = 0
