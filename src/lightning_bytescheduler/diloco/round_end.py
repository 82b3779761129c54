"""When a round ends: its target, the projection of when that is reached, and the time limits.

A target is a number of samples of all workers together, or of steps of the fastest worker, or of every worker. For
samples, the workers' steps are played forward until enough are processed. A worker's next finish counts from its last
report, not from the moment of the projection; steps that end at the same instant are counted together; limits are
relative to now, so that an old round can still be projected; and the step that a worker is in the middle of counts,
because it will be finished whatever is decided.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_bytescheduler.checks import require_positive, require_seconds, require_share, require_whole

__all__ = [
    "FastestSteps",
    "FixedSteps",
    "Pace",
    "Projection",
    "RoundOptions",
    "RoundPlan",
    "RoundTarget",
    "SampleTarget",
    "fastest_steps",
    "project",
]

_TIE = 1e-9  # of a step's time: finishes closer than this are one instant


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOptions:
    """When the batch scheduler decides on the end of a round, and how long it waits for whom; validated when made.

    Attributes:
        outer_steps: Rounds after which the training is over; ``None`` for no end.
        start_workers: Workers that the first round waits for. Whoever joins later counts from the next round.
        restart_workers: The same for the first round after a restart.
        step_cap: Steps that no worker exceeds in a round, or ``None``. A worker that has raced ahead waits there.
        lead_steps: The end of a round is decided when it is this many steps of the slowest worker away. Fewer make a
            better forecast; with one, a worker may be in the middle of a step that it should not have begun.
        quorum: Share of a round's workers whose pseudo-gradients an outer step needs; with fewer, the weights stay as
            they are.
        grace: Seconds that pseudo-gradients are waited for beyond the deadline, which is twice the forecast plus twice
            the longest transfer so far. It must cover a first transfer.
        silent_after: Seconds of silence, on top of three steps, after which a worker is no longer counted on.
        first_step_limit: The same for a worker that has not reported a step yet; compiling may take minutes.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    outer_steps: int | None = None
    start_workers: int = 1
    restart_workers: int = 1
    step_cap: int | None = None
    lead_steps: int = 3
    quorum: float = 0.5
    grace: float = 60.0
    silent_after: float = 10.0
    first_step_limit: float = 600.0

    def __post_init__(self) -> None:
        for option in ("outer_steps", "step_cap"):
            if getattr(self, option) is not None:
                require_whole(option, getattr(self, option), 1)
        for option in ("start_workers", "restart_workers", "lead_steps"):
            require_whole(option, getattr(self, option), 1)
        require_share("quorum", self.quorum)
        for option in ("grace", "silent_after", "first_step_limit"):
            require_seconds(option, getattr(self, option))


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
    # What workers are committed to is counted from the start, and not again when it ends.
    samples = sum(pace.sure * pace.batch_size for pace in paces)
    heap = [(pace.finish(1, now) - now, index) for index, pace in enumerate(paces) if pace.left != 0]
    heapq.heapify(heap)
    seconds = 0.0

    def stopped() -> Literal["target", "steps", "time", "idle"] | None:
        if samples >= to_go:
            return "target"
        if step_limit is not None and max(steps, default=0) >= step_limit:
            return "steps"
        if time_limit is not None and seconds >= time_limit:
            return "time"
        return None if heap else "idle"

    while (why := stopped()) is None:
        seconds = heap[0][0]
        while heap and heap[0][0] <= seconds + _TIE * paces[heap[0][1]].step_seconds:
            _, index = heapq.heappop(heap)
            pace = paces[index]
            steps[index] += 1
            if steps[index] > pace.sure:
                samples += pace.batch_size
            if pace.left is None or steps[index] < pace.left:
                heapq.heappush(heap, (pace.finish(steps[index] + 1, now) - now, index))
    taken = tuple(max(count, pace.sure) for count, pace in zip(steps, paces, strict=True))
    last = max((pace.finish(count, now) - now for count, pace in zip(taken, paces, strict=True)), default=0.0)
    return Projection(seconds=max(seconds, last), samples=samples, left=to_go - samples, steps=taken, stopped=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """How a round will end.

    Attributes:
        seconds: From now until the last worker is through.
        steps: Each worker's steps from now on.
    """

    seconds: float
    steps: tuple[int, ...]


class RoundTarget(Protocol):
    """What ends a round."""

    @property
    def step_cap(self) -> int | None:
        """Steps that no worker exceeds, or ``None``."""

    def left(self, *, samples: int, steps: Sequence[int]) -> int:
        """What is to go; 0 or less when the target is reached.

        Args:
            samples: That all workers together have processed in this round.
            steps: That each worker has taken in this round.
        """

    def plan(self, left: int, paces: Sequence[Pace], *, now: float, within: float) -> RoundPlan | None:
        """Say when the round ends, and each worker's steps until then.

        Args:
            left: What ``left`` said.
            paces: The workers that are training.
            now: In seconds.
            within: Seconds from now.

        Returns:
            ``None`` if the target is not reached ``within`` that time.
        """


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """A round is over when all workers together have processed ``samples`` samples.

    Raises:
        OptionError: If ``samples`` is not a positive whole number.
    """

    samples: int

    def __post_init__(self) -> None:
        require_whole("samples", self.samples, 1)

    @property
    def step_cap(self) -> int | None:
        """None: any worker may do all of the work."""
        return None

    def left(self, *, samples: int, steps: Sequence[int]) -> int:
        """Samples to go."""
        return self.samples - samples

    def plan(self, left: int, paces: Sequence[Pace], *, now: float, within: float) -> RoundPlan | None:
        """Every worker takes the steps that end before the last needed sample is there."""
        # After t seconds, a worker has taken t / step_seconds steps, and one more at most, beyond what is sure. That
        # rules most moments of a round out, without playing all of its steps.
        surplus = sum(pace.batch_size * (pace.sure + 1) for pace in paces)
        if left - surplus > within * sum(pace.batch_size / pace.step_seconds for pace in paces):
            return None
        projection = project(left, paces, now=now, time_limit=within)
        if projection.stopped == "time" or projection.seconds > within:
            return None
        return RoundPlan(seconds=projection.seconds, steps=projection.steps)


@dataclass(frozen=True, slots=True)
class FastestSteps:
    """A round is over when the fastest worker has taken ``steps`` steps; others take fewer (dynamic local updates).

    Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", section 5.

    Raises:
        OptionError: If ``steps`` is not a positive whole number.
    """

    steps: int

    def __post_init__(self) -> None:
        require_whole("steps", self.steps, 1)

    @property
    def step_cap(self) -> int | None:
        """Nobody takes more steps than the fastest."""
        return self.steps

    def left(self, *, samples: int, steps: Sequence[int]) -> int:
        """Steps that are missing to the one who has taken most."""
        return self.steps - max(steps, default=0)

    def plan(self, left: int, paces: Sequence[Pace], *, now: float, within: float) -> RoundPlan | None:
        """Each worker is given its share, less what it has taken."""
        shares = fastest_steps(self.steps, [pace.step_seconds for pace in paces])
        steps = [max(share - pace.steps, pace.sure) for share, pace in zip(shares, paces, strict=True)]
        return _plan(steps, paces, now, within)


@dataclass(frozen=True, slots=True)
class FixedSteps:
    """A round is over when every worker has taken ``steps`` steps, however long the slowest takes (published DiLoCo).

    Raises:
        OptionError: If ``steps`` is not a positive whole number.
    """

    steps: int

    def __post_init__(self) -> None:
        require_whole("steps", self.steps, 1)

    @property
    def step_cap(self) -> int | None:
        """The same for all."""
        return self.steps

    def left(self, *, samples: int, steps: Sequence[int]) -> int:
        """Steps that are missing to the one who has taken fewest."""
        return self.steps - min(steps, default=self.steps)

    def plan(self, left: int, paces: Sequence[Pace], *, now: float, within: float) -> RoundPlan | None:
        """Each worker takes what is missing."""
        return _plan([max(self.steps - pace.steps, 0) for pace in paces], paces, now, within)


def fastest_steps(steps: int, step_seconds: Sequence[float]) -> tuple[int, ...]:
    """Share out steps by speed: ``floor(v / v_max * steps)`` for a speed of v, and one at least.

    Args:
        steps: Those of the fastest worker.
        step_seconds: Each worker's time of a step.
    """
    fastest = min(step_seconds, default=1.0)
    # A share that is whole but for rounding is whole.
    return tuple(max(math.floor(fastest / seconds * steps * (1 + 1e-9)), 1) for seconds in step_seconds)


def _plan(steps: Sequence[int], paces: Sequence[Pace], now: float, within: float) -> RoundPlan | None:
    seconds = max((pace.finish(count, now) - now for count, pace in zip(steps, paces, strict=True)), default=0.0)
    return RoundPlan(seconds=seconds, steps=tuple(steps)) if seconds <= within else None
