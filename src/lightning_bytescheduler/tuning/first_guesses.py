"""Where to look first: what a prediction says, before anything was measured."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_bytescheduler.tuning.checks import require_positive, require_whole
from lightning_bytescheduler.tuning.point import TuningPoint
from lightning_bytescheduler.tuning.search_space import SearchSpace

__all__ = ["distance", "first_guesses"]

_APART = 1.5  # octaves: nearer, the second guess would tell little that the first did not


def first_guesses(
    space: SearchSpace,
    predicted_seconds: Callable[[TuningPoint], float],
    *,
    count: int = 2,
    octaves: float = 1.0,
) -> tuple[TuningPoint, ...]:
    """The points that are predicted to be fastest, the best first, and not all in one place.

    A prediction need not be right, only better than nothing: guesses are measured like all others.

    Args:
        space: Where to look.
        predicted_seconds: Time of a step at a point, such as a simulation's; called for each point of a grid.
        count: How many to return at most.
        octaves: Distance of neighbours in the grid, in doublings.

    Raises:
        OptionError: If ``count`` or ``octaves`` is not allowed, or a prediction is not a finite number above 0.
    """
    require_whole("count", count, 0)
    predicted = [
        (require_positive("predicted_seconds", predicted_seconds(point)), point)
        for point in space.points(octaves=octaves)
    ]
    chosen: list[TuningPoint] = []
    # Of equal predictions the one with least in flight: what is not in flight yet can still be overtaken.
    for _, point in sorted(predicted, key=lambda entry: (entry[0], entry[1].sizes)):
        if len(chosen) < count and all(distance(point, other) >= _APART for other in chosen):
            chosen.append(point)
    return tuple(chosen)


def distance(one: TuningPoint, other: TuningPoint) -> float:
    """How far apart two points are: doublings of the size that differs more.

    Raises:
        OptionError: If one of them is plain DDP.
    """
    return max(abs(math.log2(a / b)) for a, b in zip(one.sizes, other.sizes, strict=True))
