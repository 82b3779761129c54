"""The search for credit and partition size while a training runs: which point to take next, and from which step on.

One rank tunes, by its own clock. It says which point is in force from which step on (``current``, ``in_force_from``).
Plain DDP is one of the points. Every rank must put a point in force before the *same* step, because partition size and
plain DDP determine the messages of a step. Suppose that one rank cut a bucket of step 100 into four partitions and
another rank into two. Then the first partition of one would be added to twice as much of the other, or both would wait
for messages that never come. So a decision names a step that is two steps after the one in which it is made: the other
ranks get it during the first of them.

A search has five stages.

1. *As DDP*, if it begins so. Steps are plain DDP's, at no cost, until they show how much overlap could hide: the time
   in which all ranks wait for gradients with idle processors. If that is a large part of a step, overlapped steps are
   tried at once. If it is a smaller part, they are tried when a trial's few steps are negligible among the steps so
   far. If the first overlapped trial does not pay, steps are plain DDP's again, and the next trial is delayed.
2. *Exploration*. The point in force is measured, then plain DDP, and points that the search proposes, until the trials
   are used up or no point promises enough. A trial ends when its step time is known precisely enough, when it is
   clearly slower than the best, or when it costs too much. While no trial is affordable, training goes on with the best
   point.
3. *Confirmation*. The best point and plain DDP are measured again in turns, unless one is clearly faster.
4. *Settled*. The winner stays in force, and step times are watched.
5. *Drift*. When the step time has changed for good, the next search starts from the point in force. It waits until the
   last search began 500 steps ago, so that both together stay within the budget.

*Time lost* (:meth:`Exploration.left_seconds`) is the time that steps took beyond the best known step time. Its budget
is a share of the steps since the search began, and from the start that share of 500 steps: with 2%, the time of ten
steps. That is little. A point that doubles the step time costs one of the ten with each step, and takes at least four
steps: the one in which it comes into force, two that are measured, and the one in which the change back comes into
force. So a trial begins only where the budget has room for such a point. Until then, training goes on with the best
known one. A trial that would cost more is abandoned. One loss cannot be prevented: a point may be far slower than
expected, and the steps until this is noticed are lost.

*Confirmation*: the fastest of many noisy measurements is partly lucky, and the machine may have drifted between the
first trial and the last. So it is measured again beside plain DDP, in turns back and forth (a, b, b, a, ...), which
cancels both. Plain DDP has fewer moving parts, so it is left only for a point that is faster beyond chance: even
without any gain, one of many points always looks faster.

*Drift* (:class:`DriftDetector`) tells a lasting change of the step time from a short disturbance. Steps are gathered in
windows. The change has lasted when the medians of several windows in a row are off in the same direction. Anything
shorter is forgotten.

*The next point* (:func:`propose`) comes from Bayesian optimization, with scikit-learn's Gaussian process and the
expected improvement of the package ``bayesian-optimization``. Four things are adapted to this use.

- The process models the logarithm of the step time over the logarithms of the sizes. Points far worse than the best are
  all treated as equally bad, so that a cliff does not dwarf the differences that matter.
- Each observation has the error with which it was measured. Improvement is counted from the best *expected* value of
  the points tried, not from the luckiest measurement, and from plain DDP's value if that is better.
- Few observations would give extreme length scales. So these are bounded: the step time changes over some octaves. The
  fit begins at the usual scales and draws no random numbers, so a proposal depends on the observations alone.
- Expected improvement is evaluated on all points of the search space, which are valid by construction and few. Only
  points near the fastest one count, as those far off may cost much.

The first call imports scikit-learn and SciPy, which takes a second or more; ``prepare`` does that beforehand. A later
call takes milliseconds of processor time.

The module is pure: no clock, no randomness, no communication, and no thread of its own. The same step times give the
same decisions.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from lightning_bytescheduler.checks import require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.record import (
    Kind,
    Outcome,
    StepTimeEstimate,
    TrialEntry,
    TuningIdentity,
    is_clearly_slower,
    standing_of,
)
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, SearchSpace, TuningPoint, distance

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

log = logging.getLogger(__name__)

_LEAD = 2  # steps from a decision until it is in force: the other ranks get it during the first
_WARM_UP = 10  # first steps that do not count, unless they are plain DDP's
_COST_STEPS = 500  # whose share of time may be lost from the start
_PRECISION = 0.01  # of a step time: a trial ends when its standard error is at most so much
_SETTLE = 1  # steps after a change that do not count, as they include communication of the step before it
_LEAST_STEPS = 8  # measured steps of a trial that is not abandoned
_WATCHED = 20  # last steps that are kept while nothing is tried, as a training is long
_FIRST_LEAST_STEPS = 20  # of the first trial: it costs nothing, and the others are compared with it

_MUCH = 0.2  # of a plain DDP step: if so much could be hidden, overlap is likely to pay
_SOME = 0.05
_LEAST_S = 0.003  # each partition costs about a millisecond of processor time, so shorter waits cannot be hidden
_LEAVES_DDP = 0.98  # of DDP's time: slower overlapped steps are not worth a search
_AS_DDP_STEPS = 8  # until the time that could be hidden counts as known
_AFFORDABLE_AFTER = 100  # steps before a trial if overlap could hide only some communication
_FAILED_FACTOR = 4  # a failed trial of overlap is repeated after this many times the steps so far
_AGAIN_AFTER = 2000  # most steps until it is repeated
_FEW_STEPS_NOISE = 0.03  # of a step time that comes from few plain DDP steps

_TURN_STEPS = 6  # measured steps of a turn
_TURNS = 12  # of both points together
_WORTH_IT = 0.99  # of plain DDP's time
_CERTAIN = 2.0  # standard errors

_WINDOW = 20  # steps
_WINDOWS = 3
_LEAST = 0.1  # of the reference: a smaller change is not worth another search
_CERTAIN_DRIFT = 4.0  # standard errors of a window's median

_LEAST_TRIAL = 5 + _LEAD  # steps: two measured, the first one of each change, and two to measure the best again
_LEAST_GAIN = 0.003  # of the step time: the search ends when no point promises to save so much
_LEAST_POINTS = 5  # with fewer, the search cannot know that there is nothing to gain
_CONTENDS = 0.02  # of the step time of the faster of both ways, on top of errors
_PLAIN_CONTENDS = 0.06  # the fastest of many trials is partly lucky

_OCTAVES = 0.25  # spacing of the grid of candidates
_REACH = 2.0  # octaves from the fastest point
_WORST = 0.5  # logarithm of a step time relative to the best one; beyond it all points are equally bad
_LEAST_SPREAD = 0.05  # share by which sizes are expected to change the step time at least
_FIRST_SPREAD, _FEW = 0.2, 4  # the same, while there are at most so many points
_USUAL_LENGTH_SCALE, _LENGTH_SCALES = 3.0, (1.7, 9.0)  # octaves: where the fit begins, and its bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningOptions:
    """Limits of a search.

    Attributes:
        trials: Most points that are tried, including those at the start.
        steps_per_trial: Most steps of a trial; fewer if the step time is steady, or the point clearly worse.
        plain_ddp: Whether plain DDP is among the candidates.
        cost_share: Time that may be lost, as a share of the time of the steps since the search began.

    Raises:
        OptionError: Names the option that is not allowed.
    """

    trials: int = 15
    steps_per_trial: int = 100
    plain_ddp: bool = True
    cost_share: float = 0.02

    def __post_init__(self) -> None:
        require_whole("trials", self.trials, 2)  # the one in force, and plain DDP
        require_whole("steps_per_trial", self.steps_per_trial, 4)
        if require_positive("cost_share", self.cost_share) >= 1:
            raise OptionError("cost_share", self.cost_share, "less than 1")


class Turn:
    """Consecutive steps at one point: collects their times, and says what they lose.

    Args:
        settle: First steps that are not part of the measurement. What they lose counts all the same.
    """

    def __init__(self, *, settle: int) -> None:
        self._settle = settle
        self._settling: list[float] = []
        self.samples: list[float] = []

    def step_took(self, seconds: float) -> bool:
        """Note a step's time, and return whether it is part of the measurement."""
        settles = len(self._settling) < self._settle
        (self._settling if settles else self.samples).append(seconds)
        return not settles

    def time(self, *, usual_noise: float = 0.0) -> StepTimeEstimate | None:
        """The step time as far as it is known."""
        return StepTimeEstimate.of(self.samples, usual_noise=usual_noise) if self.samples else None

    def lost(self, best_seconds: float, *, ahead: int = 0) -> float:
        """Seconds lost against steps of ``best_seconds``; 0 after one step, which may be disturbed.

        Args:
            best_seconds: The best known step time.
            ahead: Further steps that will be taken here.
        """
        steps = [*self._settling, *self.samples]
        if len(steps) < 2:
            return 0.0
        here = StepTimeEstimate.of(self.samples if len(self.samples) > 2 else steps).seconds
        return (len(steps) + ahead) * max(here - best_seconds, 0.0)


class DriftDetector:
    """Compares step times with a reference.

    Args:
        reference: The measured step time.
    """

    def __init__(self, reference: StepTimeEstimate) -> None:
        self._reference = reference
        self._window: list[float] = []
        self._off = 0  # windows in a row; negative where faster

    def step_took(self, seconds: float) -> bool:
        """Note a step's time, and return whether a change has lasted; true until a window is as before again."""
        self._window.append(seconds)
        if len(self._window) == _WINDOW:
            window, self._window = StepTimeEstimate.of(self._window), []
            change = window.seconds - self._reference.seconds
            margin = max(_LEAST * self._reference.seconds, _CERTAIN_DRIFT * (window.error + self._reference.error))
            way = (change > margin) - (change < -margin)
            self._off = way if way * self._off <= 0 else self._off + way
        return abs(self._off) >= _WINDOWS


def is_worth_it(time: StepTimeEstimate, plain: StepTimeEstimate) -> bool:
    """Whether a point of this step time is worth leaving plain DDP: it is faster by enough, and not by chance."""
    return time.seconds + _CERTAIN * math.hypot(time.error, plain.error) < _WORTH_IT * plain.seconds


class Exploration:
    """The trials of one search after its first.

    Args:
        space: The points to search.
        first: Points to measure before the search proposes any.
        trials: Trials that were made already.
        options: Limits.

    Attributes:
        trials: All trials.
        lost: Seconds lost so far.
        done: Whether there is nothing left to try.
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
        self._queue = list(first)
        self.trials = list(trials)
        self.lost = 0.0
        self.done = False

    @property
    def best(self) -> TrialEntry | None:
        """The fastest point that was measured to the end."""
        measured = (trial for trial in self.trials if trial.outcome == "measured")
        return min(measured, key=lambda trial: trial.time.seconds, default=None)

    @property
    def usual_noise(self) -> float:
        """Relative scale of this training's step times: the median over the trials."""
        noises = sorted(trial.time.noise for trial in self.trials if trial.outcome == "measured")
        return noises[len(noises) // 2] if noises else 0.0

    def left_seconds(self, steps: int) -> float:
        """The time that may still be lost, ``steps`` after the search began."""
        best = self.best
        if best is None:
            return float("inf")  # no point is known to be better than the one in force
        return self._options.cost_share * max(_COST_STEPS, steps) * best.time.seconds - self.lost

    def plan(self, steps: int) -> tuple[Kind, TuningPoint] | None:
        """The next trial, ``steps`` after the search began; ``None`` while it is better to stay at the best point."""
        best = self.best
        if best is None or len(self.trials) >= self._options.trials:
            self.done = True
            return None
        if self.left_seconds(steps) < _LEAST_TRIAL * best.time.seconds:
            return None
        if self._queue:
            point = self._queue.pop(0)
            return "ddp" if point.is_plain_ddp else "guess", point
        try:
            proposed, gain = propose(self._space, self.trials)
        except Exception:  # a matrix that is not positive definite, or another fault: no reason to stop a training
            log.warning("bytescheduler: no more is tried, as no next point could be computed.", exc_info=True)
            proposed, gain = None, 0.0
        points = {trial.point for trial in self.trials} - {PLAIN_DDP}
        self.done = proposed is None or gain <= (_LEAST_GAIN if len(points) >= _LEAST_POINTS else 0.0)
        return None if self.done or proposed is None else ("search", proposed)

    def contenders(self) -> list[TuningPoint]:
        """The fastest point with sizes, and plain DDP, in this order; one alone if it is clearly faster.

        Plain DDP may take part even if its trial was abandoned: it wins a tie.
        """
        ddp = next((trial for trial in self.trials if trial.point.is_plain_ddp), None)
        measured = (trial for trial in self.trials if trial is not ddp and trial.outcome == "measured")
        sized = min(measured, key=lambda trial: trial.time.seconds, default=None)
        if sized is None or ddp is None:
            return [trial.point for trial in (sized, ddp) if trial is not None]
        if ddp.time.seconds - 2 * ddp.time.error > sized.time.seconds * (1 + _PLAIN_CONTENDS):
            return [sized.point]
        if sized.time.seconds - 2 * sized.time.error > ddp.time.seconds * (1 + _CONTENDS):
            return [PLAIN_DDP]
        return [sized.point, PLAIN_DDP]


class CreditTuning:
    """Decides, step by step, which point is in force.

    Args:
        space: The points to search; a single point if no size is tuned.
        start: The sizes without tuning, a point of the space.
        identity: What the results hold for.
        options: Limits.
        as_ddp: Begin as plain DDP; otherwise at ``start``.

    Attributes:
        in_force_from: The first step at ``current``; all ranks put that in force before it.
        verdict: Whether steps are plain DDP's for now, and whether both ways were timed; ``None`` before that is
            decided.
    """

    _drift: DriftDetector  # while nothing is tried

    def __init__(
        self,
        space: SearchSpace,
        *,
        start: TuningPoint,
        identity: TuningIdentity,
        options: TuningOptions | None = None,
        as_ddp: bool = False,
    ) -> None:
        self._space = space
        self._start = start
        self._identity = identity
        self._options = options or TuningOptions()
        self._entries: list[TrialEntry] = []
        self._last_step = -1
        self._search = 0
        self._try_from = 0  # the step from which overlapped steps may be tried again
        self._hideable: float | None = None
        self.in_force_from = 0
        self.verdict: tuple[bool, bool] | None = None
        self._begin_search(PLAIN_DDP if as_ddp else start)

    @property
    def current(self) -> TuningPoint:
        """The point that the last decision puts in force. After a resume, the point to start with."""
        return self._current

    @property
    def is_settled(self) -> bool:
        """Whether a choice holds until the step time, or the time that could be hidden, changes."""
        as_ddp = self._phase == "as ddp" and self._hideable is not None and self._steps >= _AS_DDP_STEPS
        return as_ddp or self._phase == "settled"

    @property
    def tunes_sizes(self) -> bool:
        """Whether there is more than one credit or partition size to choose from."""
        return self._space.tunes_credit or self._space.tunes_partitions

    @property
    def entries(self) -> tuple[TrialEntry, ...]:
        """All entries since this object was made, in order: for loggers and the record."""
        return tuple(self._entries)

    @property
    def standing(self) -> str:
        """The result of the search so far, in words; empty before anything is known."""
        if self._entries:
            return standing_of(self._entries, self._options.trials)
        time, hideable = self._turn.time(), self._hideable
        if self._phase == "settled":
            return f"{self._current} was fastest before"
        if self._phase != "as ddp" or time is None or hideable is None:
            return ""
        if math.isinf(hideable):
            return "it is not known what could be hidden"
        so = "overlap is tried soon" if self._share_hideable(time.seconds) >= _SOME else "too little"
        return f"{1e3 * hideable:.1f} ms of a step's {1e3 * time.seconds:.1f} ms could be hidden: {so}"

    def step_took(self, step: int, seconds: float, *, hideable: float | None = None) -> None:
        """Note the time of a step; ``current`` may be another point afterwards.

        Args:
            step: Its number; larger than the one before.
            seconds: From the start of this step to the start of the next.
            hideable: Seconds that overlap could hide in a typical plain DDP step. All ranks wait at least that long.
                Infinite if it cannot be known, ``None`` if it is not known yet.
        """
        self._last_step = step
        if self._warm_up_left:
            self._warm_up_left -= 1
            return
        self._steps += 1
        if step < self.in_force_from:
            return  # still at the point before the last decision, whose turn has counted this step
        measured = self._turn.step_took(seconds)
        if self._phase == "as ddp":
            self._hideable = hideable
            self._watch_as_ddp()
        elif self._phase == "trial":
            self._watch_trial()
        elif self._phase == "confirming" and len(self._turn.samples) >= _TURN_STEPS:
            self._end_turn()
        elif self._phase in ("waiting", "settled"):
            self._watch(seconds, measured=measured)

    # As DDP.

    def _share_hideable(self, step_seconds: float) -> float:
        hideable = self._hideable
        return 0.0 if hideable is None or hideable < _LEAST_S else min(hideable / step_seconds, 1.0)

    def _watch_as_ddp(self) -> None:
        """Check whether overlapped steps may pay, while steps are plain DDP's."""
        del self._turn.samples[:-_WATCHED]
        time = self._turn.time(usual_noise=_FEW_STEPS_NOISE)
        if time is None or time.steps < 2:
            return
        if self.is_settled and self.verdict is None:
            self.verdict = True, False
        share = self._share_hideable(time.seconds)
        least = _MUCH if self._last_step < _AFFORDABLE_AFTER else _SOME
        if share >= least and self._last_step >= self._try_from:
            self._exploration.trials.append(self._enter("start", PLAIN_DDP, time))
            self._next_trial()

    def _stay_as_ddp(self, ddp: TrialEntry) -> None:
        """Return to plain DDP, as the first overlapped steps did not pay, and try again much later."""
        self.verdict = True, True
        self._enter("chosen", PLAIN_DDP, ddp.time)
        self._try_from = self._last_step + min(_FAILED_FACTOR * max(self._last_step, _AFFORDABLE_AFTER), _AGAIN_AFTER)
        self._go_to(PLAIN_DDP)
        self._search += 1
        self._begin_search(PLAIN_DDP)

    # Exploration.

    def _begin_search(self, in_force: TuningPoint, trials: Sequence[TrialEntry] = ()) -> None:
        wanted = [PLAIN_DDP, self._start] if self._options.plain_ddp else [self._start]
        known = {in_force, *(trial.point for trial in trials)}
        first = [point for point in wanted if point not in known]
        self._steps = 0  # since the search began
        self._exploration = Exploration(self._space, first=first, trials=trials, options=self._options)
        best = self._exploration.best
        self._kind: Kind = "start"
        self._current = in_force
        self._turn = Turn(settle=_SETTLE if 0 <= self._last_step < self.in_force_from else 0)
        if best is not None:
            self._phase = "waiting"
            self._drift = DriftDetector(best.time)
        else:
            self._phase = "as ddp" if in_force.is_plain_ddp else "trial"
        # The first steps of a training take longer.
        self._warm_up_left = 0 if self._last_step >= 0 else 1 if self._phase == "as ddp" else _WARM_UP

    def _next_trial(self) -> None:
        explored = self._exploration
        planned, best = explored.plan(self._steps), explored.best
        if explored.done:
            self._again: dict[TuningPoint, list[float]] = {point: [] for point in explored.contenders()}
            self._phase = "confirming"
            self._choose_or_go_on()
        elif planned is not None:
            self._phase, (self._kind, point) = "trial", planned
            self._go_to(point)
        elif best is not None and self._phase != "waiting":
            self._phase = "waiting"
            self._drift = DriftDetector(best.time)
            self._go_to(best.point)

    def _watch_trial(self) -> None:
        """End the trial once its step time is known, or if it is clearly slower than the best, or costs too much."""
        explored, best = self._exploration, self._exploration.best
        time = self._turn.time(usual_noise=explored.usual_noise)
        if time is None:
            return
        outcome: Outcome = "measured"
        precision, least = _PRECISION / 2, _FIRST_LEAST_STEPS
        if best is not None:
            precision, least = _PRECISION, _LEAST_STEPS
            # With another step, and those until a change is in force.
            lost = self._turn.lost(best.time.seconds, ahead=1 + _LEAD)
            if is_clearly_slower(time, best.time) or lost > max(explored.left_seconds(self._steps), 0.0):
                outcome = "abandoned"
        is_known = time.steps >= least and time.error <= precision * time.seconds
        if outcome == "measured" and not is_known and time.steps < self._options.steps_per_trial:
            return
        self._close_turn()
        entry = self._enter(self._kind, self._current, time, outcome)
        explored.trials.append(entry)
        first, *others = explored.trials
        if first.point.is_plain_ddp and len(others) == 1:
            if entry.time.seconds >= _LEAVES_DDP * first.time.seconds:
                self._stay_as_ddp(first)
                return
            self.verdict = False, True
        self._next_trial()

    # Confirmation.

    def _end_turn(self) -> None:
        self._again[self._current] += self._turn.samples
        self._close_turn()
        self._choose_or_go_on()

    def _choose_or_go_on(self) -> None:
        points, taken = list(self._again), sum(map(len, self._again.values())) // _TURN_STEPS
        if len(points) > 1 and taken < _TURNS:
            self._go_to(points[(taken + 1) // 2 % 2])  # back and forth: a, b, b, a, ...
            return
        times = {point: StepTimeEstimate.of(samples) for point, samples in self._again.items() if samples}
        for point, time in times.items():
            self._enter("confirm", point, time)
        chosen = points[0]
        if len(points) > 1 and not is_worth_it(times[chosen], times[PLAIN_DDP]):
            chosen = PLAIN_DDP
        explored = self._settle(chosen)
        self.verdict = chosen.is_plain_ddp, True
        self._enter("chosen", chosen, times.get(chosen, explored))
        self._go_to(chosen)

    def _settle(self, chosen: TuningPoint) -> StepTimeEstimate:
        # The reference is the trial's step time, not the confirmation's: if the machine has changed since the trials,
        # these are of no use, and the difference reveals that.
        trials = (entry for entry in self._exploration.trials if entry.point == chosen)
        explored = min(trials, key=lambda entry: entry.time.seconds).time
        self._phase = "settled"
        self._drift = DriftDetector(explored)
        return explored

    # Settled, or waiting.

    def _watch(self, seconds: float, *, measured: bool) -> None:
        """Look for a drift, and for a point to try, while steps are at the best known point."""
        del self._turn.samples[:-_WATCHED]
        drifted = measured and self._drift.step_took(seconds)
        # No earlier, as the loss of two searches must stay within the budget of their steps.
        if drifted and self._steps >= _COST_STEPS:
            here = self._turn.time()
            if here is not None:
                self._enter("drift", self._current, here)
            self._search += 1
            self._try_from, self._hideable, self.verdict = 0, None, None
            self._begin_search(self._current)
        elif self._phase == "waiting":
            self._next_trial()

    # Changes.

    def _go_to(self, point: TuningPoint) -> None:
        self._close_turn()
        if point != self._current:
            self._current = point
            self.in_force_from = self._last_step + _LEAD
            self._turn = Turn(settle=_SETTLE)

    def _close_turn(self) -> None:
        """Count what the steps at this point lose, once, with those until the next point is in force."""
        best = self._exploration.best
        if best is not None and self._phase != "settled":
            self._exploration.lost += self._turn.lost(best.time.seconds, ahead=_LEAD - 1)
        self._turn = Turn(settle=0)

    def _enter(
        self, kind: Kind, point: TuningPoint, time: StepTimeEstimate, outcome: Outcome = "measured"
    ) -> TrialEntry:
        entry = TrialEntry(
            search=self._search, kind=kind, step=self._last_step, point=point, time=time, outcome=outcome
        )
        self._entries.append(entry)
        return entry

    # Resume.

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types: the trials that have ended, and the choice."""
        best = self._exploration.best
        kept = _State(
            identity=self._identity,
            space=self._space,
            plain_ddp=self._options.plain_ddp,
            search=self._search,
            steps=self._steps,
            lost_seconds=self._exploration.lost,
            trials=self._exploration.trials,
            settled=self._phase == "settled",
            current=self._current if best is None or self._phase == "settled" else best.point,
        )
        state: dict[str, Any] = msgspec.to_builtins(kept)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue from a saved state, in the space of that time, if it is of the same identity.

        An unfinished trial or turn begins anew. Put ``current`` in force before the next step; steps may be numbered
        anew from there. Its first steps do not count.

        Args:
            state: From ``state_dict``.

        Returns:
            Whether the state was used; if not, nothing was changed.

        Raises:
            OptionError: If it is not a state of this version; nothing was changed then.
        """
        try:
            kept = msgspec.convert(state, _State)
            if kept.settled and kept.current not in {trial.point for trial in kept.trials}:
                raise ValueError("the chosen point was never tried")
        except (msgspec.ValidationError, ValueError) as error:
            raise OptionError("state", state, f"made by state_dict() ({error})") from error
        if not kept.identity.matches(self._identity) or kept.plain_ddp != self._options.plain_ddp:
            return False
        self._space, self._search, self._last_step = kept.space, kept.search, -1
        self._begin_search(kept.current, kept.trials)
        self._steps, self._exploration.lost = kept.steps, kept.lost_seconds
        if kept.settled:
            self._settle(kept.current)
        return True


class _State(msgspec.Struct, kw_only=True):
    """A search's state in a checkpoint."""

    version: Literal[4] = 4
    identity: TuningIdentity
    space: SearchSpace
    plain_ddp: bool
    search: Annotated[int, msgspec.Meta(ge=0)]
    steps: Annotated[int, msgspec.Meta(ge=0)]
    lost_seconds: Annotated[float, msgspec.Meta(ge=0)]
    trials: list[TrialEntry]
    settled: bool
    current: TuningPoint


def prepare() -> None:
    """Import the search's libraries, so that no step has to wait for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old versions of SciPy and scikit-learn warn of each other
        import bayes_opt  # noqa: F401


def propose(space: SearchSpace, trials: Sequence[TrialEntry]) -> tuple[TuningPoint | None, float]:
    """Propose the point to measure next. Deterministic.

    Args:
        space: The points to search.
        trials: All trials, each at another point, in any order. At least one has sizes.

    Returns:
        The most promising point, or ``None`` if there is no other; its expected improvement, as a share of the best
            step time.
    """
    tried = {trial.point: trial.time for trial in trials if not trial.point.is_plain_ddp}
    ddp = min((trial.time.seconds for trial in trials if trial.point.is_plain_ddp), default=math.inf)
    fastest = min(tried, key=lambda point: tried[point].seconds)
    best = min(ddp, tried[fastest].seconds)
    candidates = [p for p in space.points(octaves=_OCTAVES) if p not in tried and distance(p, fastest) <= _REACH]
    if not candidates:
        return None, 0.0
    import numpy as np
    from bayes_opt.acquisition import ExpectedImprovement
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    tuned = 2 if space.tunes_partitions else 1

    def octaves(points: Iterable[TuningPoint]) -> Vector:
        return np.log2(np.array([point[:tuned] for point in points], dtype=np.float64))

    seen = np.array([-min(math.log(time.seconds / best), _WORST) for time in tried.values()])
    errors = np.array([time.error / time.seconds for time in tried.values()])
    known = octaves(tried)
    least_spread = _FIRST_SPREAD if len(seen) <= _FEW else _LEAST_SPREAD
    middle, spread = float(np.mean(seen)), max(float(np.std(seen)), least_spread)
    process = GaussianProcessRegressor(
        kernel=Matern(length_scale=[_USUAL_LENGTH_SCALE] * tuned, length_scale_bounds=_LENGTH_SCALES, nu=2.5),
        alpha=np.square(np.maximum(errors, 1e-3) / spread),
        random_state=0,  # nothing is drawn
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a length scale at its bound
        process.fit(known, (seen - middle) / spread)
    improvement = ExpectedImprovement(xi=0.0)
    # Relative to the best expected value of the tried points, or to plain DDP's time if that is better.
    ceiling = (-math.log(ddp / best) - middle) / spread
    improvement.y_max = max(float(process.predict(known).max()), ceiling)  # type: ignore[assignment]
    mean, deviation = process.predict(octaves(candidates), return_std=True)
    gains: list[float] = (spread * improvement.base_acq(mean, deviation)).tolist()
    chosen = max(range(len(candidates)), key=gains.__getitem__)
    return candidates[chosen], gains[chosen]
