"""How long a worker's step takes, and how many samples it has, from what the worker reported."""

from __future__ import annotations

from collections import deque
from typing import TypedDict

from lightning_bytescheduler.diloco.robust_mean import RobustMean

__all__ = ["StepTime", "StepTimeState"]

_FIRST_STEPS = 4


class StepTimeState(TypedDict):
    """What to keep of a ``StepTime`` over a restart."""

    seconds: list[float]
    first: list[float]
    batch_sizes: list[float]


class StepTime:
    """Robust time and batch size of one worker's steps.

    The first step after a synchronisation is slower than others (caches, queues, allocations) and its time does not
    count, unless there is nothing else: a worker of one step a round has only first steps.
    """

    def __init__(self) -> None:
        self._seconds = RobustMean()
        self._first: deque[float] = deque(maxlen=_FIRST_STEPS)
        self._batch_sizes = RobustMean()

    @property
    def seconds(self) -> float | None:
        """Of a step, or ``None`` before the first."""
        if (mean := self._seconds.mean) is not None:
            return mean
        return min(self._first, default=None)  # what makes first steps slow only ever adds

    @property
    def batch_size(self) -> int | None:
        """Samples of a step, or ``None`` before the first. A short last batch of an epoch does not change it."""
        mean = self._batch_sizes.mean
        return None if mean is None else max(round(mean), 1)

    @property
    def settled(self) -> bool:
        """Whether the time rests on more than the first step ever, which may have taken any time."""
        return self._seconds.mean is not None or len(self._first) > 1

    def observe(self, seconds: float, batch_size: int, *, first: bool = False) -> None:
        """Take note of a step.

        Args:
            seconds: What it took. A step of no time is a clock's fault and does not count.
            batch_size: Its samples.
            first: Whether it was the first one after a synchronisation.
        """
        if seconds <= 0:
            return
        self._batch_sizes.observe(batch_size)
        if first:
            self._first.append(seconds)
        else:
            self._seconds.observe(seconds)

    def state_dict(self) -> StepTimeState:
        """What to keep over a restart."""
        return {
            "seconds": self._seconds.values,
            "first": list(self._first),
            "batch_sizes": self._batch_sizes.values,
        }

    def load_state_dict(self, state: StepTimeState) -> None:
        """Take over what was kept."""
        self._seconds = RobustMean(state["seconds"])
        self._first = deque(state["first"], maxlen=_FIRST_STEPS)
        self._batch_sizes = RobustMean(state["batch_sizes"])
