"""Which steps are as DDP's: decided as in a fit, by a step time for each kind and what is exposed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.ddp.ddp_mode import SHOWN, ModeChoice, ModeFound, ModeTrial


class Fit:
    """Ranks that step together; rank 0 decides.

    Args:
        trials: Of each rank.
        ddp_mode: Seconds of a step.
        overlapped: The same.
        exposed: Of a step as DDP's, for each rank.
    """

    def __init__(
        self, *trials: ModeTrial, ddp_mode: float, overlapped: float, exposed: Callable[[int], float] = lambda _: 0.0
    ) -> None:
        self.trials = trials or (ModeTrial(),)
        self.ddp_mode, self.overlapped, self.exposed = ddp_mode, overlapped, exposed
        self.modes: list[bool] = []
        self.found: list[tuple[int, ModeFound]] = []
        self.noise: Callable[[], float] = lambda: 1.0
        self._last: float | None = None

    def run(self, steps: int) -> Fit:
        for step in range(len(self.modes) + 1, len(self.modes) + steps + 1):
            self._look(step)
            modes = {trial.ddp_mode(step) for trial in self.trials}
            assert len(modes) == 1, "the same on all ranks"
            (mode,) = modes
            for rank, trial in enumerate(self.trials):
                if self._last is not None:
                    trial.add_step(step - 1, self._last * (1 + rank))  # others have clocks of their own
                if mode and step > 1:
                    trial.add_exposed(self.exposed(rank))
            changed = bool(self.modes) and self.modes[-1] != mode
            self.modes.append(mode)
            self._last = 10.0 if step == 1 or changed else (self.ddp_mode if mode else self.overlapped) * self.noise()
        return self

    def _look(self, step: int) -> None:
        due = {trial.is_due(step) for trial in self.trials}
        assert len(due) == 1, "ranks meet"
        if not due.pop():
            return
        by_all = [min(numbers) for numbers in zip(*(trial.exposed for trial in self.trials), strict=True)]
        choice = self.trials[0].choose(step, by_all)
        found = [trial.follow(step, choice, by_all) for trial in self.trials]
        if found[0] is not None:
            self.found.append((step, found[0]))

    @property
    def seconds(self) -> float:
        """Without the first step, and what a change costs."""
        return sum(self.ddp_mode if mode else self.overlapped for mode in self.modes[1:])


def test_nothing_is_tried_where_nothing_is_exposed() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=1.2, exposed=lambda _: 0.04).run(5000)
    assert all(fit.modes)
    ((step, found),) = fit.found
    assert step == 8
    assert found.ddp_mode
    assert (found.exposed_s, found.ddp_mode_s) == (0.04, 1.0)


def test_what_one_rank_alone_waits_for_is_nothing_to_hide() -> None:
    ranks = ModeTrial(), ModeTrial()
    assert all(Fit(*ranks, ddp_mode=1.0, overlapped=0.5, exposed=lambda rank: 0.5 * rank).run(1000).modes)


def test_what_takes_a_moment_is_not_hidden() -> None:
    assert all(Fit(ddp_mode=0.004, overlapped=0.003, exposed=lambda _: 0.0025).run(500).modes)


def test_much_that_is_exposed_is_hidden_soon() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=0.7, exposed=lambda _: 0.3).run(60)
    assert fit.modes == [True] * 3 + [False] * 57
    ((step, found),) = fit.found
    assert step == 9
    assert not found.ddp_mode
    assert (found.ddp_mode_s, found.overlapped_s) == (1.0, 0.7)


def test_a_trial_that_does_not_pay_is_short_and_not_soon_repeated() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=1.3, exposed=lambda _: 0.3).run(400)
    assert fit.modes == [True] * 3 + [False] * 5 + [True] * 392
    fit.run(600)
    assert fit.modes.count(False) == 10
    fit.run(9000)
    assert fit.modes.count(False) <= 35


def test_some_that_is_exposed_can_wait() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=0.95, exposed=lambda _: 0.1).run(300)
    first = fit.modes.index(False)
    assert 99 <= first <= 130
    assert not any(fit.modes[first : first + 100])


def test_a_tie_is_ddps() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=0.99, exposed=lambda _: 0.3).run(400)
    assert fit.modes.count(False) == 13, "as it was close, the trial was longer"
    assert fit.modes[-1]


def test_what_is_not_known_is_tried() -> None:
    assert not Fit(ddp_mode=1.0, overlapped=0.8, exposed=lambda _: math.inf).run(20).modes[-1]
    assert Fit(ddp_mode=1.0, overlapped=1.2, exposed=lambda _: math.inf).run(20).modes[-1]


def test_on_a_slow_link_it_is_ddps_way_that_is_tried() -> None:
    fit = Fit(ModeTrial(overlapped=True), ddp_mode=1.4, overlapped=1.0).run(1000)
    assert fit.modes[:20] == [False] * 20
    assert fit.modes[20:25] == [True] * 5
    assert fit.modes.count(True) == 15, "and less and less often"
    fit = Fit(ModeTrial(overlapped=True), ddp_mode=0.9, overlapped=1.0).run(200)
    assert all(fit.modes[20:])


def test_a_link_that_becomes_slow() -> None:
    fit = Fit(ddp_mode=1.0, overlapped=1.2, exposed=lambda _: 0.0).run(1000)
    fit.ddp_mode, fit.overlapped, fit.exposed = 2.0, 1.2, lambda _: 1.0
    assert fit.run(200).modes[1100:].count(True) == 5, "it was looked whether it still is"


@given(
    ranks=st.integers(1, 3),
    overlapped=st.floats(0.4, 1.3),
    exposed=st.floats(0.0, 0.6),
    slow=st.booleans(),
    noise=st.sampled_from([0.0, 0.01, 0.03]),
    seed=st.integers(0, 1000),
)
def test_never_much_slower_than_the_better_way(
    ranks: int, overlapped: float, exposed: float, slow: bool, noise: float, seed: int
) -> None:
    draw = random.Random(seed)
    fit = Fit(
        *(ModeTrial(overlapped=slow) for _ in range(ranks)),
        ddp_mode=1.0,
        overlapped=overlapped,
        exposed=lambda _: exposed * draw.uniform(0.8, 1.2),
    )
    fit.noise = lambda: max(draw.gauss(1.0, noise), 0.1)
    fit.run(500)
    if not slow:
        assert fit.seconds <= 1.02 * len(fit.modes), "never slower than DDP"
        if exposed < 0.04:
            assert all(fit.modes)
    if overlapped < 0.9 and (slow or exposed > 0.3):
        assert fit.seconds <= 1.1 * overlapped * len(fit.modes), "and what is to be gained is gained"


@given(choices=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), slow=st.booleans())
def test_followers_keep_step_whatever_rank_zero_chooses(choices: list[tuple[bool, bool]], slow: bool) -> None:
    one, other = (ModeTrial(overlapped=slow) for _ in range(2))
    step = 1
    for number, (ddp_mode, trying) in enumerate(choices):
        step = one.next_look
        other.add_step(step - 1, 0.5 + number)
        shown = [math.inf] * SHOWN
        choice = ModeChoice(ddp_mode=ddp_mode, trying=trying)
        one.follow(step, choice, shown)
        other.follow(step, choice, shown)
        assert one.next_look == other.next_look > step
        assert one.ddp_mode(step) == other.ddp_mode(step) == ddp_mode


def test_ddps_way_is_compared_with_steps_whose_layers_are_found() -> None:
    trial, layers_found = ModeTrial(overlapped=True, finds_layers=True), 60
    assert trial.next_look > layers_found + SHOWN  # the steps that a look goes by are the last ones


def test_without_figures_nothing_changes() -> None:
    trial = ModeTrial()
    assert trial.exposed == [math.inf] * SHOWN
    assert trial.choose(4, trial.exposed) == ModeChoice(ddp_mode=True, trying=False)


@pytest.mark.parametrize("count", [0, 3, SHOWN + 3])
def test_as_many_numbers_on_all_ranks(count: int) -> None:
    trial = ModeTrial()
    for number in range(count):
        trial.add_exposed(float(number))
    assert len(trial.exposed) == SHOWN
    assert trial.exposed[SHOWN - min(count, SHOWN) :] == [float(n) for n in range(count)][-SHOWN:]
