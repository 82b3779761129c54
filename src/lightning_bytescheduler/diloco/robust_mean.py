"""A mean that is steady under blips and quick to follow a lasting change.

The mean of the middle half of the last values. When several in a row lie well above it, or well below, things have
changed for good, and what was before is forgotten. Limits: a lasting change of less than half takes up to the whole
window to be seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["RobustMean"]

_WINDOW = 16
_CHANGED_AFTER = 5  # values in a row: a blip is shorter
_CHANGED_BY = 1.5


class RobustMean:
    """Middle half mean of the last sixteen values, each 0 or more.

    Args:
        values: Observed already.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque(values, maxlen=_WINDOW)
        self._mean = _middle_mean(self.values) if self._values else None

    @property
    def values(self) -> list[float]:
        """What it rests on."""
        return list(self._values)

    @property
    def mean(self) -> float | None:
        """The estimate, or ``None`` before the first value."""
        return self._mean

    def observe(self, value: float) -> None:
        """Take note of a value."""
        self._values.append(value)
        before, recent = self.values[:-_CHANGED_AFTER], self.values[-_CHANGED_AFTER:]
        if before:
            mean = _middle_mean(before)
            if min(recent) > mean * _CHANGED_BY or max(recent) < mean / _CHANGED_BY:
                self._values = deque(recent, maxlen=_WINDOW)
        self._mean = _middle_mean(self.values)


def _middle_mean(values: list[float]) -> float:
    ordered = sorted(values)
    cut = max(len(ordered) // 4, 1) if len(ordered) > 2 else 0
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)
