"""The fastest few, measured again in turns before one is chosen.

The fastest of many noisy measurements is fast in part by luck, and the machine may have drifted between the first
trial and the last. Turns back and forth (a, b, c, c, b, a, ...) cancel both. Plain DDP, which has fewer moving parts,
is left for what is faster beyond chance only: where nothing is to be gained, one of many points always looks faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_bytescheduler.tuning.measurement import StepTime
from lightning_bytescheduler.tuning.point import PLAIN_DDP, TuningPoint

__all__ = ["TURN_STEPS", "Confirmation", "is_worth_it"]

TURN_STEPS = 6
"""Measured steps of a turn."""

_ROUNDS = 4
_MOST_ROUNDS = 8  # while a point may be worth leaving plain DDP for, and may not
_WORTH_IT = 0.99  # of plain DDP's time
_CERTAIN = 2.0  # standard errors


class Confirmation:
    """Whose turn it is, and who wins.

    Args:
        points: Which to measure, the one to be preferred so far first.
    """

    def __init__(self, points: Sequence[TuningPoint]) -> None:
        self._points = tuple(points)
        self._turns_taken = 0
        self._samples: list[list[float]] = [[] for _ in self._points]

    @property
    def is_done(self) -> bool:
        """Whether all turns were taken; a lone point needs none."""
        rounds, turns = divmod(self._turns_taken, max(len(self._points), 1))
        if len(self._points) < 2 or rounds >= _MOST_ROUNDS:
            return True
        return rounds >= _ROUNDS and not turns and not self._is_undecided()

    def _is_undecided(self) -> bool:
        times = self.times()
        plain = times.get(PLAIN_DDP)
        if plain is None:
            return False
        return self.winner().is_plain_ddp and min(time.seconds for time in times.values()) < _WORTH_IT * plain.seconds

    @property
    def point(self) -> TuningPoint:
        """Whose turn it is."""
        return self._points[self._index]

    @property
    def _index(self) -> int:
        lap, position = divmod(self._turns_taken, len(self._points))
        return position if lap % 2 == 0 else len(self._points) - 1 - position

    def take(self, samples: Sequence[float]) -> None:
        """Take down the steps of this turn, and go on to the next."""
        self._samples[self._index] += samples
        self._turns_taken += 1

    def times(self) -> dict[TuningPoint, StepTime]:
        """What was measured here, so far."""
        return {
            point: StepTime.of(samples) for point, samples in zip(self._points, self._samples, strict=True) if samples
        }

    def winner(self) -> TuningPoint:
        """The fastest point, of those that were all measured as often; the one that was preferred before otherwise."""
        times = self.times()
        if len(times) < len(self._points):
            return self._points[0]
        plain = times.get(PLAIN_DDP)
        if plain is not None:
            times = {point: time for point, time in times.items() if is_worth_it(time, plain)} or {PLAIN_DDP: plain}
        return min(times, key=lambda point: times[point].seconds)

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "points": [[point.credit, point.partition_size] for point in self._points],
            "turns_taken": self._turns_taken,
            "samples": [list(samples) for samples in self._samples],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Confirmation:
        """Go on from ``state_dict()``."""
        made = cls([TuningPoint(credit=credit, partition_size=partition) for credit, partition in state["points"]])
        made._turns_taken = state["turns_taken"]
        made._samples = [list(samples) for samples in state["samples"]]
        return made


def is_worth_it(time: StepTime, plain: StepTime) -> bool:
    """Whether it is worth leaving plain DDP for this: it is faster by enough, and not by chance."""
    return time.seconds + _CERTAIN * math.hypot(time.error, plain.error) < _WORTH_IT * plain.seconds
