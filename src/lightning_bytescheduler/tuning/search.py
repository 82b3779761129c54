"""Tunes credit and partition size while a training runs: what to change, and before which step.

One rank tunes, by its own clock, and says which point is in force from which step on (``current``, ``in_force_from``).
Plain DDP is one of the points. Every rank must put a point in force before the *same* step. The partition size and
plain DDP say which messages a step consists of; if one rank cut a bucket of step 100 into four pieces and another into
two, the first piece of one would be added to twice as much of the other, or both would wait for messages that never
come. So a decision has to reach all ranks before the step it names: ``lead`` steps after the one in which it is made.

A search is five things, one after the other.

1. *As DDP*, where it begins so: steps are DDP's, at no cost, until what could be hidden in them says that overlapped
   steps may pay. That is the time for which all ranks wait for gradients with idle processors. If it is a large part of
   a step, overlapped steps are tried at once; if it is a smaller part, once a trial's few steps are negligible among
   the steps so far. If the first overlapped trial does not pay, steps are DDP's again, and the next trial is delayed.
2. *Exploration*: the point in force is measured, then plain DDP, guesses from outside, and points that the search
   proposes, until the trials are used up or nothing promises enough. A trial ends when its step time is known precisely
   enough, when it is clearly slower than the best, or when it costs too much. While there is nothing affordable to
   try, training goes on with the best point.
3. *Confirmation*: the best few are measured again in turns.
4. *Settled*: the winner stays in force. Steps are watched.
5. When the step time has drifted for good, the next search starts from the point in force; not before the last one
   began so many steps ago that both together stay within what may be lost.

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

*The next point* (:func:`propose`): Bayesian optimization with scikit-learn's Gaussian process and the expected
improvement of the package ``bayesian-optimization``, with four things set for this use.

- The process models the logarithm of the step time over the logarithms of the sizes. Points far worse than the
  best are all taken to be equally bad, so that a cliff does not dwarf the differences that matter.
- Each observation has the error with which it was measured. Improvement is counted from the best *expected* value of
  the points tried, not from the luckiest measurement, and from plain DDP's if that is better.
- Few observations would let the length scales run away, so they are the most probable ones of a grid, under a prior
  that expects the step time to change over some octaves. Without a numerical search for them, a suggestion is a
  function of the observations alone, and costs little.
- Expected improvement is evaluated on all points of the search space, which are legal by construction and few; not
  far from what was measured, and only where the time that a trial would probably lose is affordable.

The first call imports scikit-learn and SciPy, which takes a second or more; ``prepare`` does that beforehand. A
call after that takes about ten milliseconds of a processor.

Pure: no clock, no randomness, no communication, and no thread of its own. The same step times give the same decisions.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from lightning_bytescheduler.checks import require_bool, require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.record import (
    Kind,
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

_LEAST_STEPS = 8  # measured steps of a trial that is not abandoned
_WATCHED = 20  # last steps that are kept while nothing is tried; a training is long
_FIRST_LEAST_STEPS = 20  # of the first trial: it costs nothing, and the others are compared with it

_MUCH = 0.2  # of a step as DDP's: if so much could be hidden, overlap is likely to pay
_SOME = 0.05
_LEAST_S = 0.003  # each partition costs about a millisecond of processor time, so shorter waits cannot be hidden
_LEAVES_DDP = 0.98  # of DDP's time: slower overlapped steps are not worth a search
_AS_DDP_STEPS = 8  # until what could be hidden counts as known
_AFFORDABLE_AFTER = 100  # steps before a trial if only some communication could be hidden
_FAILED_FACTOR = 4  # a failed trial of overlap is repeated after this many times the steps so far
_AGAIN_AFTER = 2000  # longest number of steps until then
_FEW_STEPS_NOISE = 0.03  # of a step time that few steps as DDP's tell

_TURN_STEPS = 6  # measured ones of a turn
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

_OCTAVES = 0.25  # of the grid of candidates
_REACH = 2.0  # octaves from the nearest point that is not bad
_NOT_BAD = 0.3  # logarithm of the step time above the best one's
_WORST = 0.5  # the same; beyond, all are equally bad
_LEAST_SPREAD = 0.05  # sizes are expected to change the step time by this share at least, whatever was seen
_FIRST_SPREAD, _FEW = 0.2, 4  # and by this one, while so few points or fewer were seen
_LENGTH_SCALES = (1.0, 1.7, 3.0, 5.0, 9.0)  # octaves
_USUAL_LENGTH_SCALE, _LENGTH_SCALE_SPREAD = 3.0, 0.7  # log-normal


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningOptions:
    """Budgets of a search.

    Attributes:
        trials: Points that are tried at most, those at the start among them.
        steps_per_trial: Steps of a trial at most; fewer where the step time is steady, or the point clearly worse.
        precision: A trial ends when its step time is known with this standard error, as a share.
        plain_ddp: Whether DDP's own behaviour is among the candidates.
        least_gain: The search ends when nothing promises to save this share of the step time.
        cost_share: What may be lost, as a share of the time of the steps since the search began.
        cost_steps: So many steps' share may be lost from the start.
        warm_up: First steps that do not count, unless they are DDP's.
        settle: Steps after a change that do not count; the communication of the last step before it is in them.
        lead: Steps from a decision to the first one that it governs.

    Raises:
        OptionError: Names the option that is not allowed.
    """

    trials: int = 15
    steps_per_trial: int = 100
    precision: float = 0.01
    plain_ddp: bool = True
    least_gain: float = 0.003
    cost_share: float = 0.02
    cost_steps: int = 500
    warm_up: int = 10
    settle: int = 1
    lead: int = 1

    def __post_init__(self) -> None:
        least = {"trials": 1, "steps_per_trial": 4, "cost_steps": 1, "warm_up": 0, "settle": 0, "lead": 1}
        for option in least:
            require_whole(option, getattr(self, option), least[option])
        for option in ("precision", "least_gain", "cost_share"):
            if require_positive(option, getattr(self, option)) >= 1:
                raise OptionError(option, getattr(self, option), "less than 1")
        require_bool("plain_ddp", self.plain_ddp)

    @property
    def least_steps(self) -> int:
        """Steps that a point takes until it can be left for good reason: two measured, and both changes' first ones."""
        return 2 + self.settle + self.lead


class Turn:
    """Steps at one point, one after the other: gathers them, and says what they lose.

    Args:
        settle: First steps that are not part of the measurement. Their loss is a loss all the same.
    """

    def __init__(self, *, settle: int) -> None:
        self._settle = settle
        self._settling: list[float] = []
        self.samples: list[float] = []

    def step_took(self, seconds: float) -> bool:
        """Take down a step, and return whether it is measured."""
        if self._settle:
            self._settle -= 1
            self._settling.append(seconds)
            return False
        self.samples.append(seconds)
        return True

    def time(self, *, usual_noise: float = 0.0) -> StepTimeEstimate | None:
        """The step time as far as it is known."""
        return StepTimeEstimate.of(self.samples, usual_noise=usual_noise) if self.samples else None

    def lost(self, best_seconds: float, *, before_seconds: float | None = None) -> float:
        """Seconds lost against steps of ``best_seconds``.

        Args:
            best_seconds: The best step time that is known.
            before_seconds: The step time at the point before this one, whose last communication may be in the first
                steps here; that much longer they may take for a reason.
        """
        here = self._likely_seconds()
        if here is None:
            return 0.0
        longest = float("inf") if before_seconds is None else here + before_seconds
        settling = sum(max(min(seconds, longest) - best_seconds, 0.0) for seconds in self._settling)
        return settling + len(self.samples) * max(here - best_seconds, 0.0)

    def loses_each_step(self, best_seconds: float) -> float:
        """Seconds that another step will probably lose; nothing is known after one step, which may be disturbed."""
        here = self._likely_seconds()
        if here is None or len(self.samples) + len(self._settling) < 2:
            return 0.0
        return max(here - best_seconds, 0.0)

    def _likely_seconds(self) -> float | None:
        """Of a step here. While little is measured, the first steps are better than nothing."""
        few = self.samples if len(self.samples) > 2 else [*self._settling, *self.samples]
        return StepTimeEstimate.of(few).seconds if few else None


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
        if rounds < _ROUNDS or turns:
            return False
        times = self.times()
        fastest, plain = min(time.seconds for time in times.values()), times.get(PLAIN_DDP)
        return plain is None or not self.winner().is_plain_ddp or fastest >= _WORTH_IT * plain.seconds

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
    kind: Kind = "search"
    done: bool = False
    note: str = ""


class Exploration:
    """The trials of one search, after its first.

    Args:
        space: Where to look.
        first: Points to measure before the search has a say.
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
        self._queue = list(first)
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
        if best is None or len(self.trials) >= self._options.trials:
            return Plan(done=True)
        if steps < self._ask_at:
            return Plan()
        affordable = self.left_seconds(steps) * _OF_WHAT_IS_LEFT / (self._options.least_steps * best.step_seconds)
        plan = Plan()
        # A prediction may be wrong, so this also holds for what the search proposes.
        if affordable >= _UNKNOWN_LOSS:
            if self._queue:
                point = self._queue.pop(0)
                return Plan(point, "ddp" if point.is_plain_ddp else "guess")
            plan = self._proposed(best, affordable)
        if plan.point is None and not plan.done:
            self._ask_at = steps + _ASK_AGAIN
        return plan

    def _proposed(self, best: TrialEntry, affordable: float) -> Plan:
        ddp = [trial for trial in self.trials if trial.point.is_plain_ddp]
        # A few disturbed steps in a row make the fastest of points look slow. Others have neighbours that tell; DDP has
        # none, so it gets another trial that can be afforded even if it is as slow again.
        if [trial.outcome for trial in ddp] == ["abandoned"] and ddp[
            0
        ].step_seconds / best.step_seconds < 1 + affordable:
            return Plan(PLAIN_DDP, "ddp")
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
        return Plan(None if proposal.gain < least else proposal.point, "search")

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


class CreditTuning:
    """Decides, step by step.

    Args:
        space: Where to look; of one point where no size is tuned.
        start: The sizes without tuning; not plain DDP. They need not be in the space, but have its partition size where
            that is not tuned.
        identity: What the results hold for.
        guesses: Points to try before the search proposes its own; others than of the space are left out.
        options: Limits.
        as_ddp: Begin as DDP; otherwise at ``start``.

    Attributes:
        in_force_from: The first step at ``current``: all ranks put that in force before it.
        verdict: Whether steps are DDP's for now, and whether both ways were timed; ``None`` before that is decided.

    Raises:
        OptionError: If ``start`` is plain DDP.
    """

    _drift: DriftDetector  # while nothing is tried

    def __init__(
        self,
        space: SearchSpace,
        *,
        start: TuningPoint,
        identity: TuningIdentity,
        guesses: Sequence[TuningPoint] = (),
        options: TuningOptions | None = None,
        as_ddp: bool = False,
    ) -> None:
        self._space = space
        credit, partition = start.sizes
        if not space.tunes_partitions:
            partition = space.partitions[0]
        self._start = TuningPoint(credit=max(credit, partition), partition_size=partition)
        self._guesses = tuple(guesses)
        self._identity = identity
        self._options = options or TuningOptions()
        self._entries: list[TrialEntry] = []
        self._last_step = -1
        self._search = 0
        self._try_from = 0  # the step from which overlapped steps may be tried again
        self._hideable: float | None = None
        self.in_force_from = 0
        self.verdict: tuple[bool, bool] | None = None
        self._begin_search(PLAIN_DDP if as_ddp else self._start)
        self._warm_up_left = self._warm_up

    @property
    def current(self) -> TuningPoint:
        """The point in force, or to be put in force by the last decision. After a resume: what to start with."""
        return self._current

    @property
    def is_settled(self) -> bool:
        """Whether a choice was made that holds until the step time, or what could be hidden, changes."""
        as_ddp = self._phase == "as ddp" and self._hideable is not None and self._steps >= _AS_DDP_STEPS
        return as_ddp or self._phase == "settled"

    @property
    def tunes_sizes(self) -> bool:
        """Whether there is more than one credit or partition size to choose from."""
        return self._space.credits[0] < self._space.credits[1] or self._space.tunes_partitions

    @property
    def entries(self) -> tuple[TrialEntry, ...]:
        """All that happened since this object was made, in order: for loggers and the record."""
        return tuple(self._entries)

    @property
    def standing(self) -> str:
        """What the search has come to so far, in words; empty before anything is known."""
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

    @property
    def lost_seconds(self) -> float:
        """What this search has cost so far, against the best that was known."""
        return self._exploration.lost

    def step_took(self, step: int, seconds: float, *, hideable: float | None = None) -> None:
        """Take down how long a step took; ``current`` may be another point afterwards.

        Args:
            step: Its number; larger than the one before.
            seconds: From the start of this step to the start of the next.
            hideable: Seconds that overlap could hide in a typical step as DDP's, of which all ranks wait at least so
                long; infinite if that cannot be known, ``None`` if it is not known yet.

        Raises:
            OptionError: If the step is not larger than the one before, or ``seconds`` is not a finite number above 0.
        """
        require_whole("step", step, self._last_step + 1)
        require_positive("seconds", seconds)
        self._last_step = step
        if self._warm_up_left:
            self._warm_up_left -= 1
            return
        self._steps += 1
        if step < self.in_force_from:
            self._lose(seconds)  # still at the point that the last decision left
            return
        measured = self._turn.step_took(seconds)
        if self._phase == "as ddp":
            self._hideable = hideable
            self._watch_as_ddp()
        elif self._phase == "trial" and self._trial_is_over():
            self._end_trial()
        elif self._phase == "confirming" and len(self._turn.samples) >= _TURN_STEPS:
            self._end_turn()
        elif self._phase in ("waiting", "settled"):
            self._watch(seconds, measured=measured)

    @property
    def _warm_up(self) -> int:
        return 1 if self._phase == "as ddp" else self._options.warm_up

    # As DDP.

    def _share_hideable(self, step_seconds: float) -> float:
        hideable = self._hideable
        return 0.0 if hideable is None or hideable < _LEAST_S else min(hideable / step_seconds, 1.0)

    def _watch_as_ddp(self) -> None:
        """At plain DDP, where nothing is tried: see whether overlapped steps may pay."""
        del self._turn.samples[:-_WATCHED]
        time = self._turn.time(usual_noise=_FEW_STEPS_NOISE)
        if time is None or time.steps < 2:
            return
        if self.is_settled and self.verdict is None:
            self.verdict = True, False
        share = self._share_hideable(time.seconds)
        least = _MUCH if self._last_step < _AFFORDABLE_AFTER else _SOME
        if share >= least and self._last_step >= self._try_from:
            self._exploration.take(self._enter("start", PLAIN_DDP, time))
            self._next_trial()

    def _stay_as_ddp(self, ddp: TrialEntry) -> None:
        """Go back to plain DDP, as the first overlapped steps did not pay, and try again much later."""
        self.verdict = True, True
        self._enter("chosen", PLAIN_DDP, ddp.step_time)
        self._try_from = self._last_step + min(_FAILED_FACTOR * max(self._last_step, _AFFORDABLE_AFTER), _AGAIN_AFTER)
        self._go_to(PLAIN_DDP)
        self._search += 1
        self._begin_search(PLAIN_DDP)

    # Exploration.

    def _begin_search(self, in_force: TuningPoint, trials: Sequence[TrialEntry] = ()) -> None:
        options = self._options
        known = {in_force, *(trial.point for trial in trials)}
        wanted = [PLAIN_DDP] if options.plain_ddp else []
        wanted += [self._start, *(guess for guess in self._guesses if guess in self._space)]
        first = [point for point in dict.fromkeys(wanted) if point not in known]
        self._steps = 0  # since the search began
        self._exploration = Exploration(self._space, first=first, trials=trials, options=options)
        self._confirmation = Confirmation(())
        best = self._exploration.best
        self._kind: Kind = "start"
        self._before: float | None = None  # step time at the point before
        self._current = in_force
        self._turn = Turn(settle=options.settle if 0 <= self._last_step < self.in_force_from else 0)
        if best is not None:
            self._phase = "waiting"
            self._drift = DriftDetector(best.step_time)
        else:
            self._phase = "as ddp" if in_force.is_plain_ddp else "trial"

    def _next_trial(self) -> None:
        plan = self._exploration.plan(self._steps)
        best = self._exploration.best
        if plan.note and best is not None:
            self._enter("failed", best.point, best.step_time, note=plan.note)
        if plan.done:
            self._confirmation = Confirmation([entry.point for entry in self._exploration.contenders()])
            self._phase = "confirming"
            self._choose_or_go_on(enough=self._confirmation.is_done)
        elif plan.point is not None:
            self._phase, self._kind = "trial", plan.kind
            self._go_to(plan.point)
        elif best is not None and self._phase != "waiting":
            self._phase = "waiting"
            self._drift = DriftDetector(best.step_time)
            self._go_to(best.point)

    def _trial_is_over(self) -> bool:
        turn, options, best = self._turn, self._options, self._exploration.best
        steps, time = len(turn.samples), turn.time(usual_noise=self._exploration.usual_noise)
        if time is None:
            return False
        if steps >= options.steps_per_trial:
            return True
        if best is None:
            return steps >= _FIRST_LEAST_STEPS and time.error <= options.precision / 2 * time.seconds
        precise = steps >= _LEAST_STEPS and time.error <= options.precision * time.seconds
        return precise or is_clearly_slower(time, best.step_time) or self._is_too_costly(best.step_seconds)

    def _is_too_costly(self, best_seconds: float) -> bool:
        """Whether another step, and those until a change is in force, would cost more than may be lost."""
        another = (1 + self._options.lead) * self._turn.loses_each_step(best_seconds)
        left = self._exploration.left_seconds(self._steps)
        return another > 0 and self._turn.lost(best_seconds, before_seconds=self._before) + another > left

    def _end_trial(self) -> None:
        turn, best = self._turn, self._exploration.best
        time = turn.time(usual_noise=self._exploration.usual_noise)
        if time is None:
            return
        outcome = "measured"
        if best is not None and (is_clearly_slower(time, best.step_time) or self._is_too_costly(best.step_seconds)):
            outcome = "abandoned"
        lost = self._close_turn()
        entry = self._enter(self._kind, self._current, time, outcome=outcome, lost_seconds=lost)
        self._exploration.take(entry)
        first, *others = self._exploration.trials
        if first.point.is_plain_ddp and len(others) == 1:
            if entry.step_seconds >= _LEAVES_DDP * first.step_seconds:
                self._stay_as_ddp(first)
                return
            self.verdict = False, True
        self._next_trial()

    # Confirmation.

    def _end_turn(self) -> None:
        self._confirmation.take(self._turn.samples)
        self._close_turn()
        left = self._exploration.left_seconds(self._steps, reserve=0.0)
        self._choose_or_go_on(enough=self._confirmation.is_done or left <= 0)

    def _choose_or_go_on(self, *, enough: bool) -> None:
        if not enough:
            self._go_to(self._confirmation.point)
            return
        again = self._confirmation.times()
        for point, time in again.items():
            self._enter("confirm", point, time)
        chosen = self._confirmation.winner()
        explored = self._settle(chosen)
        self.verdict = chosen.is_plain_ddp, True
        self._enter("chosen", chosen, again.get(chosen, explored))
        self._go_to(chosen)

    def _settle(self, chosen: TuningPoint) -> StepTimeEstimate:
        # Not what was measured again: if the machine has changed since the trials, they are of no use, and this is how
        # it comes out.
        trials = (entry for entry in self._exploration.trials if entry.point == chosen)
        explored = min(trials, key=lambda entry: entry.step_seconds).step_time
        self._phase = "settled"
        self._drift = DriftDetector(explored)
        return explored

    # Settled, or waiting.

    def _watch(self, seconds: float, *, measured: bool) -> None:
        """At the best point known: look for a drift, and for something to try."""
        del self._turn.samples[:-_WATCHED]
        drifted = measured and self._drift.step_took(seconds)
        # Not before: what two searches lose must stay within what may be lost in their steps.
        if drifted and self._steps >= self._options.cost_steps:
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
            self.in_force_from = self._last_step + self._options.lead
            self._turn = Turn(settle=self._options.settle)

    def _close_turn(self) -> float:
        """Account for what the steps at this point have lost; once."""
        time, best = self._turn.time(), self._exploration.best
        lost = 0.0
        if best is not None and self._phase != "settled":
            lost = self._turn.lost(best.step_seconds, before_seconds=self._before)
            self._exploration.lose(lost)
        self._before = time.seconds if time is not None else self._before
        self._turn = Turn(settle=0)
        return lost

    def _lose(self, seconds: float) -> None:
        best = self._exploration.best
        if best is not None:
            longest = best.step_seconds + (self._before or 0.0)  # what is longer has something else in it
            self._exploration.lose(min(seconds, longest) - best.step_seconds)

    def _enter(self, kind: Kind, point: TuningPoint, time: StepTimeEstimate, **more: Any) -> TrialEntry:
        entry = TrialEntry(
            search=self._search,
            kind=kind,
            step=self._last_step,
            credit=point.credit,
            partition_size=point.partition_size,
            step_seconds=time.seconds,
            error_seconds=time.error,
            noise=time.noise,
            steps=time.steps,
            **more,
        )
        self._entries.append(entry)
        return entry

    # Resume.

    def state_dict(self) -> dict[str, Any]:
        """What is known, as plain types: the trials that have ended, and the choice."""
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

    def load_state_dict(self, state: dict[str, Any], *, given: Collection[str] = ()) -> bool:
        """Go on where ``state_dict`` was called, in the space of then, if model, workers and link are the same.

        A trial or a turn that was under way begins anew. Put ``current`` in force before the next step; steps may be
        numbered anew from there. The first ones, ``warm_up`` of this object's, do not count.

        Args:
            state: From ``state_dict``.
            given: See ``SearchSpace.goes_on_in``.

        Returns:
            Whether the state was used; if not, nothing was changed.

        Raises:
            OptionError: If it is no state of this version's; nothing was changed.
        """
        try:
            kept = msgspec.convert(state, _State)
            if kept.settled and kept.current not in {trial.point for trial in kept.trials}:
                raise ValueError("what was chosen was never tried")
        except (msgspec.ValidationError, ValueError) as error:
            raise OptionError("state", state, f"made by state_dict() ({error})") from error
        same = kept.identity.matches(self._identity) and kept.plain_ddp == self._options.plain_ddp
        if not same or not self._space.goes_on_in(kept.space, given=given):
            return False
        self._space, self._search = kept.space, kept.search
        self._begin_search(kept.current, kept.trials)
        self._steps, self._exploration.lost, self._last_step = kept.steps, kept.lost_seconds, -1
        if kept.settled:
            self._settle(kept.current)
        self._warm_up_left = self._warm_up
        return True


class _State(msgspec.Struct, kw_only=True):
    """What a checkpoint has of a search."""

    version: Literal[2] = 2
    identity: TuningIdentity
    space: SearchSpace
    plain_ddp: bool
    search: Annotated[int, msgspec.Meta(ge=0)]
    steps: Annotated[int, msgspec.Meta(ge=0)]
    lost_seconds: Annotated[float, msgspec.Meta(ge=0)]
    trials: list[TrialEntry]
    settled: bool
    current: TuningPoint


@dataclass(frozen=True, slots=True)
class Proposal:
    """The point that promises most.

    Attributes:
        point: It, or ``None`` if nothing is affordable.
        gain: Expected improvement, as a share of the best step time, of this point.
        gain_anywhere: The same of the most promising point of all, affordable or not.
    """

    point: TuningPoint | None
    gain: float
    gain_anywhere: float


def prepare() -> None:
    """Import what a search needs, so that no step has to wait for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what old versions of SciPy and scikit-learn say of each other
        import bayes_opt  # noqa: F401


def propose(space: SearchSpace, trials: Sequence[TrialEntry], *, affordable: float = math.inf) -> Proposal:
    """Say where to measure next. Deterministic.

    Args:
        space: Where to look.
        trials: What is known, in any order; a point may occur several times. One at least has sizes.
        affordable: How much slower than the best known a point may probably be, as a share of its step time.

    Raises:
        OptionError: If there are no trials of points with sizes.
    """
    merged = _merged(trial for trial in trials if not trial.point.is_plain_ddp)
    if not merged:
        raise OptionError("trials", trials, "at least one of a point with sizes")
    ddp = min((trial.step_seconds for trial in trials if trial.point.is_plain_ddp), default=math.inf)
    best = min(ddp, *(seconds for seconds, _ in merged.values()))
    targets = {point: -min(math.log(seconds / best), _WORST) for point, (seconds, _) in merged.items()}
    near = [point for point, target in targets.items() if target >= -_NOT_BAD]
    near = near or [max(targets, key=targets.__getitem__)]
    away = {
        point: min(distance(point, other) for other in near)
        for point in space.points(octaves=_OCTAVES)
        if point not in merged
    }
    if not away:
        return Proposal(None, 0.0, 0.0)
    # All that was tried may be outside the space, or on the far side of a gap in it.
    reach = max(_REACH, min(away.values()) + _OCTAVES)
    candidates = [point for point, octaves in away.items() if octaves <= reach]
    limit = math.log1p(affordable) if affordable > 0 else 0.0
    errors = [error / seconds for seconds, error in merged.values()]
    gains, probably_lost = _improvements(space, targets, errors, candidates, -math.log(ddp / best))
    within = [gain if lost <= limit else -1.0 for gain, lost in zip(gains, probably_lost, strict=True)]
    chosen = max(range(len(candidates)), key=within.__getitem__)
    if within[chosen] < 0:
        return Proposal(None, 0.0, max(gains))
    return Proposal(candidates[chosen], within[chosen], max(gains))


def _merged(trials: Iterable[TrialEntry]) -> dict[TuningPoint, tuple[float, float]]:
    """One mean and error for each point, weighted by what each measurement is worth."""
    sums: dict[TuningPoint, tuple[float, float]] = {}
    for trial in trials:
        weight = max(trial.error_seconds, 1e-9 * trial.step_seconds) ** -2
        total, weights = sums.get(trial.point, (0.0, 0.0))
        sums[trial.point] = total + weight * trial.step_seconds, weights + weight
    return {point: (total / weights, weights**-0.5) for point, (total, weights) in sums.items()}


def _improvements(
    space: SearchSpace,
    targets: Mapping[TuningPoint, float],
    errors: Sequence[float],
    candidates: Sequence[TuningPoint],
    ceiling: float,
) -> tuple[list[float], list[float]]:
    """Expected improvement of each candidate, and what it probably loses; in logarithms of the step time."""
    import numpy as np
    from bayes_opt.acquisition import ExpectedImprovement
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    tuned = 2 if space.tunes_partitions else 1

    def octaves(points: Iterable[TuningPoint]) -> Vector:
        return np.log2(np.array([point.sizes[:tuned] for point in points], dtype=np.float64))

    seen, known = np.array(list(targets.values())), octaves(targets)
    least_spread = _FIRST_SPREAD if len(seen) <= _FEW else _LEAST_SPREAD
    middle, spread = float(np.mean(seen)), max(float(np.std(seen)), least_spread)
    process = GaussianProcessRegressor(
        kernel=Matern(length_scale=[_USUAL_LENGTH_SCALE] * tuned, length_scale_bounds=(0.1, 100.0), nu=2.5),
        alpha=np.square(np.maximum(errors, 1e-3) / spread),
        optimizer=_most_probable,
        random_state=0,  # nothing is drawn
    )
    process.fit(known, (seen - middle) / spread)
    improvement = ExpectedImprovement(xi=0.0)
    # Over the best expected value of what was tried.
    improvement.y_max = max(float(process.predict(known).max()), (ceiling - middle) / spread)  # type: ignore[assignment]
    mean, deviation = process.predict(octaves(candidates), return_std=True)
    gains, lost = spread * improvement.base_acq(mean, deviation), -(middle + spread * (mean - deviation))
    return gains.tolist(), lost.tolist()


def _most_probable(negative_likelihood: Callable[..., float], initial: Vector, bounds: Vector) -> tuple[Vector, float]:
    """Choose logarithms of length scales from a grid, as scikit-learn's ``optimizer``."""
    import numpy as np

    def cost(theta: Vector) -> float:
        prior = np.square((theta - math.log(_USUAL_LENGTH_SCALE)) / _LENGTH_SCALE_SPREAD).sum() / 2
        return float(negative_likelihood(theta, eval_gradient=False) + prior)

    grid = [np.log(scales) for scales in itertools.product(_LENGTH_SCALES, repeat=len(initial))]
    costs = [cost(theta) for theta in grid]
    least = min(range(len(grid)), key=costs.__getitem__)
    return grid[least], costs[least]
