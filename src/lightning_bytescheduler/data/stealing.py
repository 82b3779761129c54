"""Whose slice to take when an epoch ends and a worker has nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["Holder", "holder_to_relieve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A worker at an epoch's end.

    Attributes:
        left: Samples left in all slices it holds.
        last: Samples left in the last slice it holds and has not begun; 0 if there is none.
        speed: Samples per second, or None if it is not known.
    """

    left: int
    last: int
    speed: float | None


def holder_to_relieve(asking: Holder, others: Sequence[Holder]) -> int | None:
    """Index of the holder that would be done last, if the asking worker would be done with that slice sooner.

    An unknown speed is taken for the median of the known ones. As the time at which the slice is done gets strictly
    shorter, workers of constant speed never take a slice back and forth.
    """
    known = [holder.speed for holder in (asking, *others) if holder.speed is not None]
    usual = median(known) if known else 1.0

    def seconds(samples: int, holder: Holder) -> float:
        return samples / (usual if holder.speed is None else holder.speed)

    candidates = [index for index, holder in enumerate(others) if holder.last]
    if not candidates:
        return None
    slowest = max(candidates, key=lambda index: (seconds(others[index].left, others[index]), -index))
    victim = others[slowest]
    sooner = seconds(asking.left + victim.last, asking) < seconds(victim.left, victim)
    return slowest if sooner else None
