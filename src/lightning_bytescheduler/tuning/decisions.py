"""Tunes credit and partition size while a training runs: what to change, and before which step.

One rank tunes, by its own clock, and says which point is in force from which step on (``current``, ``in_force_from``).
Every rank must put it in force before the *same* step. The partition size and plain DDP say which messages a step
consists of; if one rank cut a bucket of step 100 into four pieces and another into two, the first piece of one would be
added to twice as much of the other, or both would wait for messages that never come. The credit only says how many
messages may be in flight; where one rank decides the order of launches for all, its own credit is the one that matters.
So a decision has to reach all ranks before the step it names: ``lead`` steps after the one in which it is made. How it
travels is not decided here. It may come with what ranks exchange before the first gradient of step ``k + 1`` is ready;
if it cannot, ``lead`` is made larger, and the steps in between are still steps at the old point.

A search is four things, one after the other.

1. *Exploration*: the point in force is measured, then plain DDP, guesses from outside, and points that the search
   proposes, until the trials are used up or nothing promises enough. A trial ends when its step time is known precisely
   enough, when it is clearly slower than the best, or when it costs too much. While there is nothing affordable to
   try, training goes on with the best point.
2. *Confirmation*: the best few are measured again in turns.
3. *Settled*: the winner stays in force. Steps are watched.
4. When the step time has drifted for good, the next search starts from the point in force; not before the last one
   began so many steps ago that both together stay within what may be lost.

Pure: no clock, no randomness, no communication, and no thread of its own. The same step times give the same decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec

from lightning_bytescheduler.checks import require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.exploration import TURN_STEPS, Confirmation, DriftDetector, Exploration
from lightning_bytescheduler.tuning.record import StepTimeEstimate, TrialEntry, TuningIdentity, is_clearly_slower
from lightning_bytescheduler.tuning.search import TuningOptions
from lightning_bytescheduler.tuning.search_space import PLAIN_DDP, SearchSpace, TuningPoint

__all__ = ["CreditTuning"]

_LEAST_STEPS = 8  # measured steps of a trial that is not abandoned
_WATCHED = 20  # last steps that are kept while nothing is tried; a training is long
_FIRST_LEAST_STEPS = 20  # of the first trial: it costs nothing, and the others are compared with it


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


class CreditTuning:
    """Decides, step by step.

    Args:
        space: Where to look.
        start: The point in force when training starts; not plain DDP. It need not be in the space, but has its
            partition size where that is not tuned.
        identity: What the results hold for.
        guesses: Points to try before the search proposes its own, such as ``first_guesses`` makes; others than of the
            space are left out.
        options: Limits.

    Attributes:
        in_force_from: The first step at ``current``: all ranks put that in force before it.

    Raises:
        OptionError: If ``start`` is plain DDP.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        start: TuningPoint,
        identity: TuningIdentity,
        guesses: Sequence[TuningPoint] = (),
        options: TuningOptions | None = None,
    ) -> None:
        self._space = space
        self._start = start
        self._guesses = tuple(guesses)
        self._identity = identity
        self._options = options or TuningOptions()
        self._entries: list[TrialEntry] = []
        self._last_step = -1
        self._warm_up_left = self._options.warm_up
        self._search = 0
        self._begin_search(None)

    @property
    def current(self) -> TuningPoint:
        """The point in force, or to be put in force by the last decision. After a resume: what to start with."""
        return self._current

    @property
    def is_settled(self) -> bool:
        """Whether a choice was made that holds until the step time drifts."""
        return self._phase == "settled"

    @property
    def entries(self) -> tuple[TrialEntry, ...]:
        """All that happened since this object was made, in order: for loggers and the record."""
        return tuple(self._entries)

    @property
    def lost_seconds(self) -> float:
        """What this search has cost so far, against the best that was known."""
        return self._exploration.lost

    def step_took(self, step: int, seconds: float) -> None:
        """Take down how long a step took; ``current`` may be another point afterwards.

        Args:
            step: Its number; larger than the one before.
            seconds: From the start of this step to the start of the next.

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
        if self._phase not in ("trial", "confirming"):
            self._watch(seconds, measured=measured)
        elif self._phase == "trial" and self._trial_is_over():
            self._end_trial()
        elif self._phase == "confirming" and len(self._turn.samples) >= TURN_STEPS:
            self._end_turn()

    # Exploration.

    def _begin_search(self, in_force: TuningPoint | None, trials: Sequence[TrialEntry] = ()) -> None:
        options, tried = self._options, {trial.point for trial in trials}
        credit, partition = self._start.sizes
        if not self._space.tunes_partitions:
            partition = self._space.partitions[0]
        start = TuningPoint(credit=max(credit, partition), partition_size=partition)
        in_force = in_force or start
        guesses = [guess for guess in self._guesses if guess in self._space]
        wanted = [in_force, *([PLAIN_DDP] if options.plain_ddp else []), start, *guesses]
        self._steps = 0  # since the search began
        self._exploration = Exploration(
            self._space,
            first=[point for point in dict.fromkeys(wanted) if point not in tried],
            trials=trials,
            options=options,
        )
        self._confirmation: Confirmation | None = None
        best = self._exploration.best
        self._drift = None if best is None else DriftDetector(best.step_time)
        self._phase, self._kind = "trial" if best is None else "waiting", "start"
        self._before: float | None = None  # step time at the point before
        self._current = in_force
        self.in_force_from = 0
        self._turn = Turn(settle=0)
        if best is None:
            self._exploration.plan(0)

    def _next_trial(self) -> None:
        plan = self._exploration.plan(self._steps)
        best = self._exploration.best
        if plan.note and best is not None:
            self._enter("failed", best.point, best.step_time, note=plan.note)
        if plan.done:
            self._confirm()
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
        self._exploration.take(self._enter(self._kind, self._current, time, outcome=outcome, lost_seconds=lost))
        self._next_trial()

    # Confirmation.

    def _confirm(self) -> None:
        confirmation = self._confirmation = Confirmation([entry.point for entry in self._exploration.contenders()])
        self._phase = "confirming"
        self._choose_or_go_on(confirmation, enough=confirmation.is_done)

    def _end_turn(self) -> None:
        confirmation = self._confirmation
        if confirmation is None:
            return
        confirmation.take(self._turn.samples)
        self._close_turn()
        left = self._exploration.left_seconds(self._steps, reserve=0.0)
        self._choose_or_go_on(confirmation, enough=confirmation.is_done or left <= 0)

    def _choose_or_go_on(self, confirmation: Confirmation, *, enough: bool) -> None:
        if not enough:
            self._go_to(confirmation.point)
            return
        again = confirmation.times()
        for point, time in again.items():
            self._enter("confirm", point, time)
        chosen = confirmation.winner()
        explored = self._settle(chosen)
        self._enter("chosen", chosen, again.get(chosen, explored))
        self._go_to(chosen)

    def _settle(self, chosen: TuningPoint) -> StepTimeEstimate:
        # Not what was measured again: if the machine has changed since the trials, they are of no use, and this is how
        # it comes out.
        trials = (entry for entry in self._exploration.trials if entry.point == chosen)
        explored = min(trials, key=lambda entry: entry.step_seconds).step_time
        self._confirmation = None
        self._phase = "settled"
        self._drift = DriftDetector(explored)
        return explored

    # Settled, or waiting.

    def _watch(self, seconds: float, *, measured: bool) -> None:
        """At the best point known: look for a drift, and for something to try."""
        del self._turn.samples[:-_WATCHED]
        if measured and self._drift is not None:
            drifted = self._drift.step_took(seconds)
            # Not before: what two searches lose must stay within what may be lost in their steps.
            if drifted and self._steps >= self._options.cost_steps:
                self._search_again()
                return
        if self._phase == "waiting":
            self._next_trial()

    def _search_again(self) -> None:
        here = self._turn.time()
        if here is not None:
            self._enter("drift", self._current, here)
        self._search += 1
        self._begin_search(self._current)

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

    def _enter(
        self,
        kind: str,
        point: TuningPoint,
        time: StepTimeEstimate,
        *,
        outcome: str = "measured",
        lost_seconds: float = 0.0,
        note: str = "",
    ) -> TrialEntry:
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
            outcome=outcome,
            lost_seconds=lost_seconds,
            note=note,
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
            settled=self.is_settled,
            current=self._current if best is None or self.is_settled else best.point,
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
