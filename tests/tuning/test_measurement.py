from __future__ import annotations

import random

import pytest

from lightning_bytescheduler.tuning.record import StepTimeEstimate, is_clearly_slower
from lightning_bytescheduler.tuning.search import DriftDetector, Exploration, TuningOptions, Turn
from tests.tuning.training import SPACE, START, trial


def steps(count: int, *, seconds: float = 0.3, noise: float = 0.03, outliers: float = 0.0, seed: int = 0):
    random_ = random.Random(seed)
    return [
        seconds * (1 + noise * random_.gauss(0, 1)) * (5 if random_.random() < outliers else 1) for _ in range(count)
    ]


def test_outliers_move_neither_location_nor_error_much() -> None:
    clean, disturbed = StepTimeEstimate.of(steps(100)), StepTimeEstimate.of(steps(100, outliers=0.1))
    assert disturbed.seconds == pytest.approx(clean.seconds, rel=0.01)
    assert disturbed.error < 1.5 * clean.error


def test_the_error_is_what_medians_scatter_by() -> None:
    estimates = [StepTimeEstimate.of(steps(30, seed=seed)) for seed in range(300)]
    mean = sum(time.seconds for time in estimates) / len(estimates)
    scatter = (sum((time.seconds - mean) ** 2 for time in estimates) / len(estimates)) ** 0.5
    typical = sum(time.error for time in estimates) / len(estimates)
    assert 0.7 < typical / scatter < 1.4


def test_equal_steps_are_not_certain() -> None:
    assert StepTimeEstimate.of([0.3] * 50).error > 0
    assert StepTimeEstimate.of([0.3, 0.3], usual_noise=0.05).noise == pytest.approx(0.05)


def test_one_step_says_nothing_and_two_only_if_both_are_slow() -> None:
    reference = StepTimeEstimate.of(steps(50))
    assert not is_clearly_slower(StepTimeEstimate.of([3.0], usual_noise=0.03), reference)
    assert not is_clearly_slower(StepTimeEstimate.of([3.0, 0.3], usual_noise=0.03), reference)
    assert is_clearly_slower(StepTimeEstimate.of([0.6, 3.0], usual_noise=0.03), reference)


def test_what_is_alike_is_rarely_called_slower() -> None:
    reference = StepTimeEstimate.of(steps(50))
    wrong = sum(is_clearly_slower(StepTimeEstimate.of(steps(20, seed=seed)), reference) for seed in range(1, 301))
    assert wrong <= 15


def test_a_turn_counts_its_first_steps_as_long_as_the_others() -> None:
    turn = Turn(settle=1)
    assert not turn.step_took(2.0)
    assert all(turn.step_took(0.4) for _ in range(10))
    assert turn.samples == [0.4] * 10
    assert turn.lost(0.3) == pytest.approx(11 * 0.1)
    assert turn.lost(0.3, ahead=2) == pytest.approx(13 * 0.1)
    assert turn.lost(0.9) == 0.0, "a gain is no loss"
    assert Turn(settle=1).lost(0.3) == 0.0


def test_one_disturbed_step_is_no_reason_to_leave() -> None:
    turn = Turn(settle=1)
    turn.step_took(5.0)
    assert turn.lost(0.3, ahead=2) == 0.0
    turn.step_took(0.3)
    assert turn.lost(0.3, ahead=2) == 0.0
    slow = Turn(settle=1)
    slow.step_took(5.0)
    slow.step_took(4.0)
    assert slow.lost(0.3) == pytest.approx(2 * 3.7)


def test_a_budget_grows_with_the_steps() -> None:
    options = TuningOptions(cost_share=0.02)
    explored = Exploration(SPACE, first=[], trials=[trial(START, 1.0)], options=options)
    assert explored.left_seconds(0) == pytest.approx(10.0)
    explored.lost += 4.0
    assert explored.left_seconds(400) == pytest.approx(6.0)
    assert explored.left_seconds(1000) == pytest.approx(16.0)


@pytest.mark.parametrize(("factor", "drifts"), [(1.05, False), (1.3, True), (0.8, True)])
def test_a_drift_is_large_and_lasts(factor: float, drifts: bool) -> None:
    detector = DriftDetector(StepTimeEstimate.of(steps(50)))
    assert not any(detector.step_took(step) for step in steps(200, outliers=0.05, seed=1))
    assert not any(detector.step_took(step) for step in steps(40, seconds=0.3 * factor, seed=2))
    assert any(detector.step_took(step) for step in steps(40, seconds=0.3 * factor, seed=3)) == drifts


def test_there_and_back_is_no_drift() -> None:
    detector = DriftDetector(StepTimeEstimate.of(steps(50)))
    for seed in range(10):
        assert not any(detector.step_took(step) for step in steps(20, seconds=0.5, seed=seed))
        assert not any(detector.step_took(step) for step in steps(20, seconds=0.2, seed=seed))
