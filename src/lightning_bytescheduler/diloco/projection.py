"""When workers will have processed so many samples: their steps played forward, from where each one is now.

A worker's next finish counts from its last report, not from the moment of the projection; steps that end at the same
instant are counted together; limits are relative to now, so that an old round can still be projected; and the step that
a worker is in the middle of counts, because it will be finished whatever is decided.

What it costs hardly depends on how many steps that is: of many, most are counted instead of played, see ``_passed``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
