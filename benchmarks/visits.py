"""Points visited in turn within one fit, instead of a search: all of them see the same machine, however it drifts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from lightning_bytescheduler import CreditTuner
from lightning_bytescheduler.tuning.sizes import SearchSpace, TuningPoint

__all__ = ["Visits", "grid"]

_SETTLE = 2  # steps after a change that do not count


def grid(space: SearchSpace, *, sides: int = 4) -> list[TuningPoint]:
    """A grid over the space, on a logarithmic scale; points with a partition above the credit are moved onto it."""

    def along(low: int, high: int) -> list[int]:
        return [round(low * (high / low) ** (index / (sides - 1))) for index in range(sides)]

    points = (
        TuningPoint(credit=credit, partition_size=min(partition, credit))
        for credit in along(*space.credits)
        for partition in along(*space.partitions)
    )
    return list(dict.fromkeys(points))


class Visits(CreditTuner):
    """Goes from point to point, there and back.

    Args:
        points: Makes them, from the space and the start that a search would have had.
        turn: Counted steps of a visit.
    """

    def __init__(self, points: Callable[[SearchSpace, TuningPoint], Sequence[TuningPoint]], *, turn: int) -> None:
        super().__init__()
        self._make = points
        self._turn = turn
        self._points: list[TuningPoint] = []
        self._visit = 0
        self._steps = 0  # of this visit
        self._warm_up = 5
        self.seconds: dict[TuningPoint, list[float]] = {}

    def begin(self, *, space: SearchSpace, start: TuningPoint, **others: object) -> TuningPoint:
        """See `CreditTuner`."""
        self._points = list(self._make(space, start))
        return self.current

    @property
    def current(self) -> TuningPoint:
        """Whose turn it is."""
        lap, position = divmod(self._visit, len(self._points))
        return self._points[position if lap % 2 == 0 else -1 - position]

    def step_took(self, step: int, seconds: float, *, as_decided: bool, hideable: float | None = None) -> None:
        """See `CreditTuner`."""
        if self._warm_up:
            self._warm_up -= 1
            return
        if not as_decided:
            self._steps = 0
            return
        self._steps += 1
        if self._steps <= _SETTLE:
            return
        self.seconds.setdefault(self.current, []).append(seconds)
        if self._steps == _SETTLE + self._turn:
            self._visit += 1
            self._steps = 0

    def stop(self) -> None:
        """Nothing runs."""

    def medians(self) -> dict[TuningPoint, float]:
        """Typical step at each point, in seconds."""
        return {point: statistics.median(seconds) for point, seconds in self.seconds.items()}
