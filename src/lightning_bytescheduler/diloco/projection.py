"""When workers will have processed so many samples: their steps played forward, from where each one is now.

A worker's next finish counts from its last report, not from the moment of the projection; steps that end at the same
instant are counted together; limits are relative to now, so that an old round can still be projected; and the step that
a worker is in the middle of counts, because it will be finished whatever is decided.

What it costs hardly depends on how many steps that is: of many, most are counted instead of played, see ``_passed``.

Sums and bounds over a round's workers, kept up to date worker by worker.

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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_bytescheduler.checks import require_positive, require_seconds, require_whole

_TIE = 1e-9  # of a step's time: finishes closer than this are one instant
_PLAYED, _PLAYED_EACH = 256, 8  # steps that are played before the rest is counted: of all, and of each worker
_RETREATS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How a worker gets on in this round.

    Attributes:
        batch_size: Samples of a step.
        step_seconds: Time of a step.
        began: When the step began that it is taking, in seconds of the clock that ``now`` is read from: the moment of
            its last report.
        steps: Steps that it has reported in this round.
        most: Steps that it may take in this round at most; any number by default.
        committed: Steps that it will take in any case: the one in progress, and those it takes before a decision
            reaches it.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    batch_size: int
    step_seconds: float
    began: float = 0.0
    steps: int = 0
    most: int | None = None
    committed: int = 0

    def __post_init__(self) -> None:
        require_whole("batch_size", self.batch_size, 1)
        require_positive("step_seconds", self.step_seconds)
        require_whole("steps", self.steps, 0)
        require_whole("committed", self.committed, 0)
        if self.most is not None:
            require_whole("most", self.most, 0)

    @property
    def sure(self) -> int:
        """Steps from now on that it will take in any case."""
        return self.committed if self.left is None else min(self.committed, self.left)

    @property
    def left(self) -> int | None:
        """Steps from now on that it may take; ``None`` for any number."""
        return None if self.most is None else max(self.most - self.steps, 0)

    def finish(self, steps: int, now: float) -> float:
        """When it will have taken ``steps`` more steps. A step that is overdue ends now at the earliest."""
        return max(self.began + self.step_seconds, now) + (steps - 1) * self.step_seconds if steps else now

    def taken(self, seconds: float, now: float) -> int:
        """Steps that it will have taken ``seconds`` from now: those whose :meth:`finish` is no later."""

        def end(steps: int) -> float:
            return self.finish(steps, now) - now

        if self.left == 0 or end(1) > seconds:
            return 0
        about = int((seconds - end(1)) / self.step_seconds) + 1
        slack = 2 + (about >> 40)  # what rounding may be wrong by
        low, high = max(about - slack, 1), about + slack
        while low > 1 and end(low) > seconds:
            low, slack = max(low - slack, 1), 2 * slack
        while end(high) <= seconds:
            high, slack = high + slack, 2 * slack
        found = bisect_right(range(low, high), seconds, key=end) + low - 1
        return found if self.left is None else min(found, self.left)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """What will happen.

    Attributes:
        seconds: From now until the last step that was projected ends.
        samples: Processed from now on, with the steps that workers are committed to.
        left: Samples to go; 0 or less if the target is reached.
        steps: Each worker's steps from now on.
        stopped: ``"target"`` when enough samples are processed, ``"steps"`` or ``"time"`` when that limit was reached
            before, ``"idle"`` when nobody may take another step.
    """

    seconds: float
    samples: int
    left: int
    steps: tuple[int, ...]
    stopped: Literal["target", "steps", "time", "idle"]


def project(
    to_go: int,
    paces: Sequence[Pace],
    *,
    now: float = 0.0,
    step_limit: int | None = None,
    time_limit: float | None = None,
) -> Projection:
    """Play the workers' steps until enough samples are processed.

    Args:
        to_go: Samples to go.
        paces: The workers.
        now: In seconds, from the clock that ``Pace.began`` is read from.
        step_limit: Stop when a worker has taken this many steps from now on.
        time_limit: Stop with the first step that ends this many seconds from now or later.

    Raises:
        OptionError: Names the limit that is not allowed.
    """
    if step_limit is not None:
        require_whole("step_limit", step_limit, 0)
    if time_limit is not None:
        require_seconds("time_limit", time_limit)
    steps = [0] * len(paces)

    def samples_of(steps: Sequence[int]) -> int:
        # What workers are committed to is counted from the start, and not again when it ends.
        return sum(max(count, pace.sure) * pace.batch_size for count, pace in zip(steps, paces, strict=True))

    def next_ends(steps: Sequence[int]) -> list[tuple[float, int]]:
        ends = [
            (pace.finish(count + 1, now) - now, index)
            for index, (count, pace) in enumerate(zip(steps, paces, strict=True))
            if pace.left is None or count < pace.left
        ]
        heapq.heapify(ends)
        return ends

    def why_stop(
        steps: Sequence[int], samples: int, seconds: float, idle: bool
    ) -> Literal["target", "steps", "time", "idle"] | None:
        if samples >= to_go:
            return "target"
        if step_limit is not None and max(steps, default=0) >= step_limit:
            return "steps"
        if time_limit is not None and seconds >= time_limit:
            return "time"
        return "idle" if idle else None

    samples, heap, seconds = samples_of(steps), next_ends(steps), 0.0
    played, allowed = 0, _PLAYED + _PLAYED_EACH * len(paces)
    while (why := why_stop(steps, samples, seconds, not heap)) is None:
        if played >= allowed:
            played = 0
            steps = _passed(
                steps,
                paces,
                now,
                lambda steps, seconds: not why_stop(steps, samples_of(steps), seconds, not next_ends(steps)),
                few=allowed // 2,
            )
            samples, heap = samples_of(steps), next_ends(steps)
        seconds = heap[0][0]
        while heap and heap[0][0] <= seconds + _TIE * paces[heap[0][1]].step_seconds:
            _, index = heapq.heappop(heap)
            pace = paces[index]
            played += 1
            steps[index] += 1
            if steps[index] > pace.sure:
                samples += pace.batch_size
            if pace.left is None or steps[index] < pace.left:
                heapq.heappush(heap, (pace.finish(steps[index] + 1, now) - now, index))
    taken = tuple(max(count, pace.sure) for count, pace in zip(steps, paces, strict=True))
    last = max((pace.finish(count, now) - now for count, pace in zip(taken, paces, strict=True)), default=0.0)
    return Projection(seconds=max(seconds, last), samples=samples, left=to_go - samples, steps=taken, stopped=why)


def _passed(
    steps: Sequence[int],
    paces: Sequence[Pace],
    now: float,
    goes_on: Callable[[Sequence[int], float], bool],
    *,
    few: int,
) -> list[int]:
    """Each worker's steps at a later moment that playing would surely pass, a few steps before it would stop.

    Each reason to stop holds on once it holds. So where none holds at a moment, none did before, and the state of that
    moment is the one that playing comes to, if an instant ends there. One does if the next finish is not taken for the
    same instant as the last one.

    Args:
        steps: At a moment of which ``goes_on`` was true.
        paces: The workers.
        now: In seconds.
        goes_on: Whether there is no reason to stop, of steps and seconds from now.
        few: Steps of all workers.
    """

    def taken(seconds: float) -> list[int]:
        return [pace.taken(seconds, now) for pace in paces]

    def last_end(steps: Sequence[int]) -> float:
        return max(pace.finish(count, now) - now for count, pace in zip(steps, paces, strict=True))

    low = last_end(steps)
    found = taken(low)
    if not goes_on(found, low):
        return list(steps)
    ahead = min(pace.step_seconds for pace in paces)
    while goes_on(later := taken(low + ahead), low + ahead):
        low, found, ahead = low + ahead, later, 2 * ahead
    high = low + ahead
    while sum(later) - sum(found) > few and low < (middle := (low + high) / 2) < high:
        between = taken(middle)
        if goes_on(between, middle):
            low, found = middle, between
        else:
            high, later = middle, between
    for _ in range(_RETREATS):
        next_end, tie = min(
            (pace.finish(count + 1, now) - now, _TIE * pace.step_seconds)
            for count, pace in zip(found, paces, strict=True)
            if pace.left is None or count < pace.left
        )
        last = last_end(found)
        if next_end > last + tie:
            break
        found = taken(last - 2 * tie)
    return [max(before, count) for before, count in zip(steps, found, strict=True)]


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
