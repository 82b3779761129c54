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
from lightning_bytescheduler.diloco.projection import Pace, Projection, project
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
    "fastest_steps",
    "project",
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
