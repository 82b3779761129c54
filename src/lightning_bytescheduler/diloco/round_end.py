"""When a round ends: its target, and each worker's steps until then.

A target is a number of samples of all workers together, or of steps of the fastest worker, or of every worker. For
samples, :func:`project` plays the workers' steps forward until enough are processed. A worker's next finish counts from
its last report, not from the moment of the projection; steps that end at the same instant are counted together; limits
are relative to now, so that an old round can still be projected; and the step that a worker is in the middle of counts,
because it will be finished whatever is decided. A projection's cost hardly depends on the number of steps.

Who is waited for, and how long: ``RoundOptions``. An update that comes after the end of its round does not count, as it
was not made with the weights that it would be merged into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_bytescheduler.checks import require_seconds, require_share, require_whole

INNER_STEPS = 100
"""Steps of a round, if neither steps nor samples are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOptions:
    """When the batch scheduler decides on the end of a round, and how long it waits for whom; validated when made.

    Attributes:
        outer_steps: Rounds after which the training is over; ``None`` for no end.
        closing_rounds: Rounds without a step that follow. Each synchronises one more fragment, with what the last steps
            have changed in it.
        start_workers: Workers that the first round waits for, but not the first after a restart. A worker that joins
            later trains in the current round if its end is not decided; where all take equally many steps, from the
            next round on.
        quorum: Share of a round's workers whose pseudo-gradients an outer step needs; with fewer, the weights stay as
            they are. With fragments, that holds for the round's fragment. A round's workers are those that were told of
            its end, without workers that join later or have left earlier.
            One pseudo-gradient is needed in any case.
        grace: Seconds that pseudo-gradients are waited for beyond twice the forecast plus twice the longest transfer of
            the workers; they must cover a first transfer.
        silent_after: Seconds of silence, on top of three steps, after which a worker is not counted on.
        first_step_limit: The same for a worker that has not reported a step yet; compiling may take minutes.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    outer_steps: int | None = None
    closing_rounds: int = 0
    start_workers: int = 1
    quorum: float = 0.5
    grace: float = 60.0
    silent_after: float = 10.0
    first_step_limit: float = 600.0

    def __post_init__(self) -> None:
        if self.outer_steps is not None:
            require_whole("outer_steps", self.outer_steps, 1)
        require_whole("start_workers", self.start_workers, 1)
        require_whole("closing_rounds", self.closing_rounds, 0)
        require_share("quorum", self.quorum)
        for option in ("grace", "silent_after", "first_step_limit"):
            require_seconds(option, getattr(self, option))


_TIE = 1e-9  # of a step's time: finishes closer than this are one instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How a worker gets on in this round.

    Attributes:
        batch_size: Samples of a step.
        step_seconds: Time of a step.
        began: When its present step began: the moment of its last report, in seconds of the clock of ``now``.
        steps: Steps that it has reported in this round.
        most: Steps that it may take in this round at most; any number by default.
        committed: Steps that it will take in any case: the one in progress, and those it takes before a decision
            reaches it.
    """

    batch_size: int
    step_seconds: float
    began: float = 0.0
    steps: int = 0
    most: int | None = None
    committed: int = 0

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
        stopped: ``"target"`` when enough samples are processed, ``"steps"`` or ``"time"`` when that limit was
            reached before, ``"idle"`` when no worker may take another step.
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
    """
    batch, seconds, sure = (
        np.array([getattr(pace, name) for pace in paces], dtype=np.float64)
        for name in ("batch_size", "step_seconds", "sure")
    )
    begins = np.array([pace.finish(1, now) for pace in paces], dtype=np.float64)
    first = begins - now
    left = np.array([math.inf if pace.left is None else pace.left for pace in paces], dtype=np.float64)

    def taken(moment: float) -> NDArray[np.float64]:
        """Each worker's steps that have ended by then."""
        steps: NDArray[np.float64] = np.clip(np.floor((moment - first) / seconds + _TIE) + 1, 0, left)
        return steps

    def last_end(steps: NDArray[np.float64]) -> float:
        return float(np.max(np.where(steps > 0, begins + (steps - 1) * seconds - now, 0.0), initial=0.0))

    def why_stop(steps: NDArray[np.float64]) -> Literal["target", "steps", "time", "idle"] | None:
        # What workers are committed to is counted from the start, and not again when it ends.
        if float(np.maximum(steps, sure) @ batch) >= to_go:
            return "target"
        if step_limit is not None and np.max(steps, initial=0) >= step_limit:
            return "steps"
        if time_limit is not None and last_end(steps) >= time_limit:
            return "time"
        return "idle" if bool(np.all(steps >= left)) else None

    # A reason to stop never ceases to hold, so bisection finds the first moment at which one does.
    steps = np.zeros(len(paces))
    if why_stop(steps) is None:
        low, high, ahead = 0.0, 0.0, float(np.min(seconds))
        while why_stop(taken(high)) is None:
            low, high = high, 2 * high + ahead
        while high - low > _TIE * ahead and low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if why_stop(taken(middle)) is None else (low, middle)
        steps = taken(high)
        steps = np.maximum(steps, taken(last_end(steps)))
    counts = tuple(max(int(count), pace.sure) for count, pace in zip(steps, paces, strict=True))
    samples = sum(count * pace.batch_size for count, pace in zip(counts, paces, strict=True))
    return Projection(
        seconds=seconds_of(counts, paces, now=now),
        samples=samples,
        left=to_go - samples,
        steps=counts,
        stopped=why_stop(steps) or "idle",
    )


def seconds_of(steps: Sequence[int], paces: Sequence[Pace], *, now: float) -> float:
    """How long it takes from now on until each worker has taken its steps."""
    return max((pace.finish(count, now) - now for count, pace in zip(steps, paces, strict=True)), default=0.0)


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """A round is over when all workers together have processed ``samples`` samples.

    The proposal for performance-aware scheduling gives a round as a number of steps (there: ``outer_steps``) with a
    theoretical ``batch_size``: ``samples`` is their product. No worker need have that batch size. Each
    worker's share is what it processes in the same time.
    """

    samples: int

    @property
    def step_cap(self) -> int | None:
        """Steps that no worker exceeds: none, as any worker may do all of the work."""
        return None

    def left(self, *, samples: int, steps: Sequence[int]) -> int:
        """What is to go; 0 or less when the target is reached.

        Args:
            samples: Samples that all workers together have processed in this round.
            steps: Steps of each worker in this round; the least and the greatest number are enough.
        """
        return self.samples - samples

    def plan(self, left: int, paces: Sequence[Pace], *, now: float, within: float) -> Sequence[int] | None:
        """Each worker's steps from now on: those that end before the last needed sample is there.

        Args:
            left: The result of ``left``.
            paces: The workers that are training.
            now: In seconds.
            within: Seconds from now.

        Returns:
            ``None`` if the target is not reached ``within`` that time; see also :func:`seconds_of`.
        """
        # After t seconds, a worker has taken at most t / step_seconds + 1 steps beyond those that are sure. So most
        # moments of a round are ruled out without playing all of its steps.
        surplus = sum(pace.batch_size * (pace.sure + 1) for pace in paces)
        if left - surplus > within * sum(pace.batch_size / pace.step_seconds for pace in paces):
            return None
        projection = project(left, paces, now=now, time_limit=within)
        return None if projection.stopped == "time" else projection.steps


@dataclass(frozen=True, slots=True)
class FastestSteps:
    """A round is over when the fastest worker has taken ``steps`` steps; others take fewer (dynamic local updates).

    Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", section 5.
    """

    steps: int

    @property
    def step_cap(self) -> int | None:
        """No worker takes more steps."""
        return self.steps

    def left(self, *, samples: int, steps: Sequence[int]) -> int:
        """Steps that the worker with the most steps still has to take."""
        return self.steps - max(steps, default=0)

    def plan(self, left: int, paces: Sequence[Pace], *, now: float, within: float) -> Sequence[int] | None:
        """Each worker is given its share, less what it has taken."""
        fastest = min((pace.step_seconds for pace in paces), default=1.0)
        shares = [_share(self.steps, pace.step_seconds, fastest) for pace in paces]
        return [max(share - pace.steps, pace.sure) for share, pace in zip(shares, paces, strict=True)]


@dataclass(frozen=True, slots=True)
class FixedSteps(FastestSteps):
    """A round is over when every worker has taken ``steps`` steps, as long as the slowest takes (published DiLoCo)."""

    def left(self, *, samples: int, steps: Sequence[int]) -> int:
        """Steps that the worker with the fewest steps still has to take."""
        return self.steps - min(steps, default=self.steps)

    def plan(self, left: int, paces: Sequence[Pace], *, now: float, within: float) -> Sequence[int] | None:
        """Each worker takes what is missing."""
        return [max(self.steps - pace.steps, 0) for pace in paces]


RoundTarget: TypeAlias = SampleTarget | FastestSteps
"""What ends a round."""


def _share(steps: int, seconds: float, fastest: float) -> int:
    """``floor(v / v_max * steps)`` for a speed of v, and one at least."""
    # The factor keeps rounding from lowering a share that is a whole number.
    return max(math.floor(fastest / seconds * steps * (1 + 1e-9)), 1)
