"""Which point is tried next, what that may cost, and when there is nothing left to try.

*Time lost* (:meth:`Exploration.left_seconds`) is what steps took beyond the best that is known. It may add up to a
share of the steps taken since the search began, and from the start to that share of the first few hundred: with 2% of
500 steps, to ten steps' time. That is little. A point that doubles the step time costs one of the ten at each step, and
four steps pass before it is left for good reason: the one in which it comes into force, two that are measured, and the
one in which the change back comes into force. So points that are expected to be far off are not tried before it is
affordable, and when there is nothing affordable to try, training goes on with the best that is known until there is.
What no account can prevent is that a point turns out far slower than expected when little is left: the steps until this
is noticed are lost.

*Confirmation* (:class:`Confirmation`): the fastest of many noisy measurements is fast in part by luck, and the machine
may have drifted between the first trial and the last. So the fastest few are measured again, in turns back and forth
(a, b, c, c, b, a, ...), which cancel both. Plain DDP, which has fewer moving parts, is left for what is faster beyond
chance only: where nothing is to be gained, one of many points always looks faster.

*Drift* (:class:`DriftDetector`): has the step time changed for good, or was that a blip? Steps are gathered in windows.
When several windows in a row are off in the same direction, by their medians, the change has lasted. Anything shorter
than a window or two is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bytescheduler.tuning.record import StepTimeEstimate, TrialEntry
from lightning_bytescheduler.tuning.search import TuningOptions, propose
from lightning_bytescheduler.tuning.search_space import PLAIN_DDP, SearchSpace, TuningPoint

__all__ = ["TURN_STEPS", "Confirmation", "DriftDetector", "Exploration"]

TURN_STEPS = 6
"""Measured steps of a turn."""

_ROUNDS = 4
_MOST_ROUNDS = 8  # while a point may be worth leaving plain DDP for, and may not
_WORTH_IT = 0.99  # of plain DDP's time
_CERTAIN = 2.0  # standard errors

_WINDOW = 20  # steps
_WINDOWS = 3
_LEAST = 0.1  # of the reference: less is not worth another search
_CERTAIN_DRIFT = 4.0  # standard errors of a window's median

_UNKNOWN_LOSS = 0.25  # of the step time: what a point of which nothing is known may cost each step
_OF_WHAT_IS_LEFT = 0.5  # one trial is not meant to use up all that may be lost
_RESERVE = 0.2  # of what may be lost from the start: kept for measuring the best again
_LEAST_POINTS = 5  # with fewer, the search cannot know that there is nothing to gain
_ASK_AGAIN = 50  # steps of waiting until more may be lost
_CONTENDERS = 3
_CONTENDS = 0.02  # of the best step time, beside errors
_PLAIN_CONTENDS = 0.06


class DriftDetector:
    """Compares steps with a reference.

    Args:
        reference: The step time that was measured.
    """

    def __init__(self, reference: StepTimeEstimate) -> None:
        self._reference = reference
        self._window: list[float] = []
        self._off = 0  # windows in a row, negative where faster

    def step_took(self, seconds: float) -> bool:
        """Take down a step; returns whether the change has lasted. It stays true until a window is as it was."""
        self._window.append(seconds)
        if len(self._window) == _WINDOW:
            self._judge(StepTimeEstimate.of(self._window))
            self._window = []
        return abs(self._off) >= _WINDOWS

    def _judge(self, window: StepTimeEstimate) -> None:
        change = window.seconds - self._reference.seconds
        margin = max(_LEAST * self._reference.seconds, _CERTAIN_DRIFT * (window.error + self._reference.error))
        if abs(change) <= margin:
            self._off = 0
        elif change > 0:
            self._off = max(self._off, 0) + 1
        else:
            self._off = min(self._off, 0) - 1


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

    def times(self) -> dict[TuningPoint, StepTimeEstimate]:
        """What was measured here, so far."""
        return {
            point: StepTimeEstimate.of(samples)
            for point, samples in zip(self._points, self._samples, strict=True)
            if samples
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


def is_worth_it(time: StepTimeEstimate, plain: StepTimeEstimate) -> bool:
    """Whether it is worth leaving plain DDP for this: it is faster by enough, and not by chance."""
    return time.seconds + _CERTAIN * math.hypot(time.error, plain.error) < _WORTH_IT * plain.seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next.

    Attributes:
        point: Where the next trial is; ``None`` to stay with the best that is known.
        kind: Of the trial.
        done: Whether there is nothing left to try.
        note: Why, where the search could not go on.
    """

    point: TuningPoint | None = None
    kind: str = ""
    done: bool = False
    note: str = ""


class Exploration:
    """The trials of one search.

    Args:
        space: Where to look.
        first: Points to measure before the search has a say, the one in force first.
        trials: That were made already.
        options: Limits.

    Attributes:
        lost: Seconds lost so far.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        first: Sequence[TuningPoint],
        trials: Sequence[TrialEntry] = (),
        options: TuningOptions,
    ) -> None:
        self._space = space
        self._options = options
        self._queue = [
            (point, "start" if not trials and index == 0 else _kind(point)) for index, point in enumerate(first)
        ]
        self._ask_at = 0
        self.trials = list(trials)
        self.lost = 0.0

    def take(self, trial: TrialEntry) -> None:
        """Take down a trial."""
        self.trials.append(trial)

    @property
    def best(self) -> TrialEntry | None:
        """The fastest point that was measured to the end."""
        measured = (trial for trial in self.trials if trial.outcome == "measured")
        return min(measured, key=lambda trial: trial.step_seconds, default=None)

    @property
    def usual_noise(self) -> float:
        """Of steps of this training, as a share; the median of the trials."""
        noises = sorted(trial.noise for trial in self.trials if trial.outcome == "measured")
        return noises[len(noises) // 2] if noises else 0.0

    def lose(self, seconds: float) -> None:
        """Take down a loss; gains are not set against it."""
        self.lost += max(seconds, 0.0)

    def left_seconds(self, steps: int, *, reserve: float = _RESERVE) -> float:
        """What may still be lost, ``steps`` after the search began.

        Args:
            steps: How many were taken.
            reserve: Of what may be lost from the start, this share is kept; by default, for measuring the best again.
        """
        best, options = self.best, self._options
        if best is None:
            return float("inf")  # nothing is known to be better than the point in force
        kept = reserve * options.cost_share * options.cost_steps * best.step_seconds
        return options.cost_share * max(options.cost_steps, steps) * best.step_seconds - self.lost - kept

    def plan(self, steps: int) -> Plan:
        """Say what to do, ``steps`` after the search began; asked again at each step of waiting."""
        best = self.best
        if best is None:
            return Plan(*self._queue.pop(0)) if self._queue else Plan(done=True)
        if len(self.trials) >= self._options.trials:
            return Plan(done=True)
        if steps < self._ask_at:
            return Plan()
        affordable = self.left_seconds(steps) * _OF_WHAT_IS_LEFT / (self._options.least_steps * best.step_seconds)
        # A prediction may be wrong, so this also holds for what the search proposes.
        if affordable < _UNKNOWN_LOSS:
            self._ask_at = steps + _ASK_AGAIN
            return Plan()
        if self._queue:
            return Plan(*self._queue.pop(0))
        if self._ddp_deserves_another_trial(best, affordable):
            return Plan(PLAIN_DDP, "ddp")
        return self._proposed(steps, affordable)

    def _ddp_deserves_another_trial(self, best: TrialEntry, affordable: float) -> bool:
        """Whether plain DDP was given up, once, and another trial can be afforded even if it is as slow again.

        A few disturbed steps in a row do that to the fastest of points. Others have neighbours that tell; DDP has none.
        """
        trials = [trial for trial in self.trials if trial.point.is_plain_ddp]
        if len(trials) != 1 or trials[0].outcome != "abandoned":
            return False
        return trials[0].step_seconds / best.step_seconds - 1 < affordable

    def _proposed(self, steps: int, affordable: float) -> Plan:
        try:
            proposal = propose(self._space, self.trials, affordable=affordable)
        except Exception as error:
            # A matrix that is not positive definite: whatever it is, no reason to stop a training. It goes into the
            # record.
            return Plan(done=True, note=f"{type(error).__name__}: {error}")
        points = {trial.point for trial in self.trials} - {PLAIN_DDP}
        least = self._options.least_gain if len(points) >= _LEAST_POINTS else 0.0
        if proposal.gain_anywhere <= 0 or proposal.gain_anywhere < least:
            return Plan(done=True)
        if proposal.point is None or proposal.gain < least:
            self._ask_at = steps + _ASK_AGAIN
            return Plan()
        return Plan(proposal.point, "search")

    def contenders(self) -> list[TrialEntry]:
        """The fastest point and those that may be as fast, the one to be preferred so far first.

        Plain DDP is one of them wherever it may be as fast, however many points are faster by a hair, and also where it
        was given up: it wins a tie, so it has to be there for one.
        """
        best = self.best
        if best is None:
            return []
        reach = best.step_seconds * (1 + _CONTENDS)
        plain_reach = best.step_seconds * (1 + _PLAIN_CONTENDS)  # the fastest of many trials is fast by luck, too
        may_be_as_fast = sorted(
            (
                trial
                for trial in self.trials
                if trial.step_seconds - 2 * trial.error_seconds <= (plain_reach if trial.point.is_plain_ddp else reach)
            ),
            key=lambda trial: trial.step_seconds,
        )
        plain = [trial for trial in may_be_as_fast if trial.point.is_plain_ddp][:1]
        others = [trial for trial in may_be_as_fast if not trial.point.is_plain_ddp and trial.outcome == "measured"]
        others = others[: _CONTENDERS - len(plain)]
        leaves_it = any(is_worth_it(trial.step_time, ddp.step_time) for trial in others for ddp in plain)
        return [*others, *plain] if leaves_it else [*plain, *others]


def _kind(point: TuningPoint) -> str:
    return "ddp" if point == PLAIN_DDP else "guess"
