"""A simulated training: step times from a function, with noise, outliers and whatever a test does to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_bytescheduler.tuning.record import StepTimeEstimate, TrialEntry, TuningIdentity
from lightning_bytescheduler.tuning.search import CreditTuning, TuningOptions, prepare
from lightning_bytescheduler.tuning.sizes import SearchSpace, TuningPoint

prepare()

PARAMETERS = 6_250_000
IDENTITY = TuningIdentity(parameters=PARAMETERS, bytes_per_parameter=4, workers=4, backend="gloo")
START = TuningPoint(credit=389_120, partition_size=97_280)
SPACE = SearchSpace.for_model(PARAMETERS, START)
CREDITS = SearchSpace.for_model(PARAMETERS, START, tunes_partitions=False)
OPTIONS = TuningOptions()
StepTimes = Callable[[TuningPoint], float]


def tuning(space: SearchSpace = SPACE, start: TuningPoint = START, **given) -> CreditTuning:
    return CreditTuning(space, **{"start": start, "identity": IDENTITY, "options": OPTIONS, **given})


def trial(point: TuningPoint, seconds: float, error: float = 0.001, outcome: str = "measured") -> TrialEntry:
    return TrialEntry(
        search=0,
        kind="ddp" if point.is_plain_ddp else "search",
        step=0,
        point=point,
        time=StepTimeEstimate(seconds, error, 0.01 * seconds, 20),
        outcome=outcome,
    )


def inside(point: TuningPoint, space: SearchSpace) -> bool:
    bounds = zip(point, (space.credits, space.partitions), strict=True)
    return all(low <= size <= high for size, (low, high) in bounds)


@dataclass
class Training:
    """Takes steps; decisions come into force at the step that they name."""

    tuning: CreditTuning
    step_times: StepTimes
    seed: int = 0
    noise: float = 0.03
    outliers: float = 0.02
    step: int = 0
    seconds: list[float] = field(default_factory=list)
    decisions: list[TuningPoint] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.point = self.tuning.current

    def run(self, steps: int, *, until_settled: bool = False) -> Training:
        for _ in range(steps):
            if self.step >= self.tuning.in_force_from:
                self.point = self.tuning.current
            seconds = self.step_times(self.point)
            self.seconds.append(seconds)
            seen = seconds * max(1 + self.noise * self._random.gauss(0, 1), 0.5)
            if self._random.random() < self.outliers:
                seen *= 5
            before = self.tuning.current
            self.tuning.step_took(self.step, seen)
            if self.tuning.current != before:
                assert self.tuning.in_force_from > self.step
                self.decisions.append(self.tuning.current)
            self.step += 1
            if until_settled and self.tuning.is_settled:
                break
        return self

    @property
    def trials(self) -> int:
        return sum(entry.is_trial for entry in self.tuning.entries)
