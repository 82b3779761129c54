"""Sums and bounds over a round's workers, kept up to date worker by worker.

A report moves one worker. What the batch scheduler asks after each report (how many samples there are, who has taken
fewest steps, whether the end is near) is therefore kept, and one worker's part of it replaced, at a cost that hardly
grows with the number of workers. A key stands for a worker.

The projection itself costs a look at every worker. An *outlook* says when it need not be made, because the target is
surely not reached within the time that is asked about. It never says so where the projection would find an end, so that
decisions are the same with and without it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from lightning_bytescheduler.diloco.projection import Pace

__all__ = ["LastWorkerOutlook", "Outlook", "RunningMaximum", "RunningSum", "SampleOutlook", "Tally"]

_SLACK = 1e-6  # of a time span: more than finishes that count as one instant differ, and than rounding does
_ULPS = 64.0
_TRIES = 60


class RunningSum:
    """The sum of a whole number per key."""

    def __init__(self) -> None:
        self.total = 0
        self._values: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: int, value: int) -> None:
        """Replace what a key adds."""
        self.total += value - self._values.get(key, 0)
        self._values[key] = value

    def discard(self, key: int) -> None:
        """A key adds nothing any more."""
        self.total -= self._values.pop(key, 0)


class RunningMaximum:
    """The largest of a number per key. What was replaced stays in a heap until it comes up, or there is too much."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def set(self, key: int, value: float) -> None:
        """Replace the value of a key."""
        if self._values.get(key) != value:
            self._values[key] = value
            if len(self._heap) > 4 * len(self._values) + 64:
                self._heap = [(-value, key) for key, value in self._values.items()]
                heapq.heapify(self._heap)
            else:
                heapq.heappush(self._heap, (-value, key))

    def discard(self, key: int) -> None:
        """Leave a key out."""
        self._values.pop(key, None)

    @property
    def value(self) -> float | None:
        """The largest, or ``None`` if there is none."""
        heap, values = self._heap, self._values
        while heap and values.get(heap[0][1]) != -heap[0][0]:
            heapq.heappop(heap)
        return -heap[0][0] if heap else None


class Tally:
    """Samples and steps of some workers."""

    def __init__(self) -> None:
        self.samples = 0  # of all together
        self._done: dict[int, tuple[int, int]] = {}
        self._with: dict[int, int] = {}  # how many workers have taken so many steps
        self._bounds: tuple[int, ...] | None = ()  # of these; None if they may be others now

    def set(self, key: int, *, samples: int, steps: int) -> None:
        """Replace what a worker has done."""
        before = self._done.get(key)
        self._done[key] = (samples, steps)
        if before is None:
            self.samples += samples
        else:
            self.samples += samples - before[0]
            if before[1] == steps:
                return
            self._one_less_with(before[1])
        count = self._with.get(steps)
        if count is None:
            self._with[steps] = 1
            self._bounds = None
        else:
            self._with[steps] = count + 1

    def discard(self, key: int) -> None:
        """Leave a worker out."""
        before = self._done.pop(key, None)
        if before is not None:
            self.samples -= before[0]
            self._one_less_with(before[1])

    def _one_less_with(self, steps: int) -> None:
        count = self._with[steps] - 1
        if count:
            self._with[steps] = count
        else:
            del self._with[steps]
            if self._bounds and steps in self._bounds:
                self._bounds = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The fewest and the most; nothing of nobody."""
        if self._bounds is None:
            self._bounds = (min(self._with), max(self._with)) if self._with else ()
        return self._bounds


class Outlook(Protocol):
    """Whether the end of a round is surely far, at the cost of a report."""

    def set(self, key: int, pace: Pace) -> None:
        """Replace how a worker gets on."""

    def discard(self, key: int) -> None:
        """Leave a worker out."""

    def is_far(self, left: int, *, now: float, within: float) -> bool:
        """Whether the target is surely not reached.

        Args:
            left: What is to go.
            now: In seconds; never less than before.
            within: Seconds from now, as ``RoundTarget.plan`` takes them; at least two steps of each worker.
        """


class SampleOutlook:
    """For a number of samples: what all workers will at most have processed at one moment ahead, the horizon.

    A worker ends its steps at ``began + k * step_seconds``, or later when one is overdue; what it will have processed
    by the horizon is bounded by that, and changes only when it reports. As long as these bounds together are below what
    is to go, and somebody still has a step to take, no projection to a moment before the horizon finds an end. When
    they are not, or that moment is past the horizon, a new horizon is looked for, as far ahead as the bounds allow; it
    at least halves the distance to the end, so that there are few of them in a round.
    """

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}
        self._promised = RunningSum()
        self._busy: set[int] = set()  # who still has a step to take after the horizon
        self._horizon = -math.inf

    def set(self, key: int, pace: Pace) -> None:
        """See Outlook."""
        self._paces[key] = pace
        self._promise(key, pace, pace.began)

    def discard(self, key: int) -> None:
        """See Outlook."""
        self._paces.pop(key, None)
        self._promised.discard(key)
        self._busy.discard(key)

    def is_far(self, left: int, *, now: float, within: float) -> bool:
        """See Outlook."""
        needed = now + within * (1 + _SLACK) + _ULPS * math.ulp(now)
        if needed <= self._horizon and self._promised.total < left and self._busy:
            return True
        return self._look_ahead(left, now, needed)

    def _promise(self, key: int, pace: Pace, began: float) -> None:
        if self._horizon == -math.inf:
            return
        steps, most = _steps_by(self._horizon, pace, began), pace.left
        self._promised.set(key, steps * pace.batch_size)
        if most is None or steps < most:
            self._busy.add(key)
        else:
            self._busy.discard(key)

    def _look_ahead(self, left: int, now: float, needed: float) -> bool:
        # A step that is overdue ends now at the earliest, and no earlier when it is asked again.
        known = [(pace, max(pace.began, now - pace.step_seconds)) for pace in self._paces.values()]
        promised, busy = _all_by(needed, known)
        if promised >= left or not busy:
            return False
        speed = sum(pace.batch_size / pace.step_seconds for pace, _ in known)
        ahead, reached = max((left - promised) / speed, _SLACK * (needed - now)), 0.0
        for _ in range(_TRIES):
            promised, busy = _all_by(needed + ahead, known)
            if promised < left and busy:
                reached, ahead = ahead, 2 * ahead
            elif reached:
                break
            else:
                ahead /= 2
        self._horizon = needed + reached
        for (key, pace), (_, began) in zip(self._paces.items(), known, strict=True):
            self._promise(key, pace, began)
        return True


def _steps_by(moment: float, pace: Pace, began: float) -> int:
    """Steps that a worker has taken at a moment, at most, from its last report on."""
    steps = max(int((moment - began) / pace.step_seconds), pace.committed)
    return steps if pace.most is None else min(steps, max(pace.most - pace.steps, 0))


def _all_by(moment: float, known: Iterable[tuple[Pace, float]]) -> tuple[int, bool]:
    samples, busy = 0, False
    for pace, began in known:
        steps = _steps_by(moment, pace, began)
        samples += steps * pace.batch_size
        busy = busy or pace.left is None or steps < pace.left
    return samples, busy


class LastWorkerOutlook:
    """For a number of steps of each worker: one who will still be at it. As long as it is, it is the only one asked.

    Args:
        steps_of: A worker's steps from now on, of its pace and of the shortest time that anybody's step takes.
    """

    def __init__(self, steps_of: Callable[[Pace, float], int]) -> None:
        self._steps_of = steps_of
        self._paces: dict[int, Pace] = {}
        self._fastest = RunningMaximum()  # of the negative
        self._last: int | None = None

    def set(self, key: int, pace: Pace) -> None:
        """See Outlook."""
        self._paces[key] = pace
        self._fastest.set(key, -pace.step_seconds)

    def discard(self, key: int) -> None:
        """See Outlook."""
        self._paces.pop(key, None)
        self._fastest.discard(key)

    def is_far(self, left: int, *, now: float, within: float) -> bool:
        """See Outlook."""
        needed = now + within * (1 + _SLACK) + _ULPS * math.ulp(now)
        fastest = -(self._fastest.value or 0.0)

        def end(key: int | None) -> float:
            pace = None if key is None else self._paces.get(key)
            return -math.inf if pace is None else pace.began + self._steps_of(pace, fastest) * pace.step_seconds

        if end(self._last) > needed:
            return True
        self._last = max(self._paces, key=end, default=None)
        return end(self._last) > needed
