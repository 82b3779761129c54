"""When a round ends: its target, and each worker's steps until then.

A target is a number of samples of all workers together, or of steps of the fastest worker, or of every worker. For
samples, the workers' steps are played forward until enough are processed, see ``projection.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.diloco.projection import (
    LastWorkerOutlook,
    Outlook,
    Pace,
    Projection,
    SampleOutlook,
    project,
)
from lightning_bytescheduler.diloco.round_options import RoundOptions

__all__ = [
    "FastestSteps",
    "FixedSteps",
    "Pace",
    "Projection",
    "RoundOptions",
    "RoundPlan",
    "RoundTarget",
    "SampleTarget",
    "project",
    "worthwhile_wait",
]


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
            steps: That each worker has taken in this round; the fewest and the most are enough.
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

    def outlook(self) -> Outlook:
        """What says, for one round, that ``plan`` would be ``None``, without a look at every worker."""


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """A round is over when all workers together have processed ``samples`` samples.

    The proposal for performance-aware scheduling gives a round as a number of steps (there: ``outer_steps``) with a
    theoretical ``batch_size``: ``samples`` is their product. No worker need have that batch size. The samples are
    shared out by what each one gets through in the same time.

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

    def outlook(self) -> Outlook:
        """A bound on what all will have processed at one moment ahead."""
        return SampleOutlook()


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
        fastest = min((pace.step_seconds for pace in paces), default=1.0)
        return _plan([self._steps_of(pace, fastest) for pace in paces], paces, now, within)

    def outlook(self) -> Outlook:
        """Somebody who will still be at it."""
        return LastWorkerOutlook(self._steps_of)

    def _steps_of(self, pace: Pace, fastest: float) -> int:
        return max(_share(self.steps, pace.step_seconds, fastest) - pace.steps, pace.sure)


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
        return _plan([self._steps_of(pace) for pace in paces], paces, now, within)

    def outlook(self) -> Outlook:
        """Somebody who will still be at it."""
        return LastWorkerOutlook(self._steps_of)

    def _steps_of(self, pace: Pace, fastest: float = 0.0) -> int:
        return max(self.steps - pace.steps, 0)


def _share(steps: int, seconds: float, fastest: float) -> int:
    """``floor(v / v_max * steps)`` for a speed of v, and one at least."""
    # A share that is whole but for rounding is whole.
    return max(math.floor(fastest / seconds * steps * (1 + 1e-9)), 1)


def worthwhile_wait(*, decided: float, deadline: float, longest: float, missing: float, idle: float) -> float:
    """Until when it pays to wait for pseudo-gradients that are missing: the rule of ``grace="auto"``.

    Waiting a second costs the ``idle`` samples that the workers which are through would process meanwhile. What it
    brings is what is missing, times the chance that it comes in that second. Nothing is known of that chance but that
    it falls with time: whatever has not come after some time has an even chance to come within as much time again (the
    density 1/t of a time of unknown scale), so that the chance of the next second is 1/t, t seconds after the decision.
    Waiting pays while ``missing / t > idle``, that is until ``t = missing / idle``: until those who are through have
    lost as much as they wait for. Whatever the chances really are, that costs twice at most what the best choice in
    hindsight would have (to wait for all, or not at all), as for renting skis or buying them.

    With n equal workers, of which one is missing, that is a round's length over n - 1: two wait for each other for
    long, and a thousand hardly.

    Args:
        decided: When the end of the round was decided, in seconds.
        deadline: Which is waited for in any case.
        longest: Seconds beyond the deadline that are not exceeded, also if nobody is through and idle.
        missing: Samples that would become part of the weights, and count nothing if they come late.
        idle: Samples a second that those who are through would process.

    Returns:
        A time from ``deadline`` to ``deadline + longest``.
    """
    worthwhile = decided + missing / idle if idle > 0 else math.inf
    return min(max(worthwhile, deadline), deadline + longest)


def _plan(steps: Sequence[int], paces: Sequence[Pace], now: float, within: float) -> RoundPlan | None:
    seconds = max((pace.finish(count, now) - now for count, pace in zip(steps, paces, strict=True)), default=0.0)
    return RoundPlan(seconds=seconds, steps=tuple(steps)) if seconds <= within else None
