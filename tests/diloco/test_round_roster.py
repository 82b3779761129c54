from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.ddp.sample_weights import RobustMean
from lightning_bytescheduler.diloco.messages import StepReport
from lightning_bytescheduler.diloco.round_roster import StepTime, WorkerProgress


def after(*seconds):
    times = StepTime()
    for value in seconds:
        times.observe(value, 8)
    return times


def test_the_first_step_after_a_synchronisation_does_not_count() -> None:
    times = StepTime()
    assert times.seconds is None
    times.observe(30.0, 8, first=True)
    assert times.seconds == 30.0  # better than nothing
    assert not times.is_known
    times.observe(1.0, 8)
    assert times.seconds == 1.0
    assert times.is_known
    times.observe(30.0, 8, first=True)
    assert times.seconds == 1.0


def test_a_worker_of_one_step_a_round_is_known_by_its_first_steps() -> None:
    times = StepTime()
    for seconds in (30.0, 2.0, 2.1):
        times.observe(seconds, 8, first=True)
    assert times.seconds == 2.0
    assert times.is_known


def test_only_the_last_four_first_steps_are_kept() -> None:
    times = StepTime()
    for seconds in (1.0, 5.0, 5.0, 5.0):
        times.observe(seconds, 8, first=True)
    assert times.seconds == 1.0
    times.observe(5.0, 8, first=True)
    assert times.seconds == 5.0


def test_a_change_of_less_than_half_is_taken_for_noise_at_first() -> None:
    assert after(*[1.0] * 11, *[1.4] * 5).seconds < 1.1
    assert after(*[1.0] * 11, *[1.6] * 5).seconds == pytest.approx(1.6)


def test_blips_do_not_move_it() -> None:
    assert after(*[1.0] * 9, 50.0, 1.0, 70.0, 1.0, 1.0, 60.0).seconds == 1.0


def test_it_follows_a_machine_that_has_changed_for_good() -> None:
    assert after(*[1.0] * 16, *[3.0] * 4).seconds == 1.0  # this may still be a blip
    assert after(*[1.0] * 16, *[3.0] * 5).seconds == 3.0
    assert after(*[3.0] * 16, *[1.0] * 5).seconds == 1.0
    assert after(*[1.0] * 16, *[1.2] * 12).seconds == 1.2


def test_it_is_near_the_mean_of_noisy_steps() -> None:
    chance = random.Random(0)
    errors = []
    for _ in range(200):
        errors.append(after(*(chance.lognormvariate(0.0, 0.1) for _ in range(16))).seconds - 1.0)
    assert max(map(abs, errors)) < 0.15
    assert abs(sum(errors) / len(errors)) < 0.01


def test_a_short_last_batch_does_not_change_the_batch_size() -> None:
    times = StepTime()
    for batch_size in [32] * 10 + [5] + [32] * 3:
        times.observe(1.0, batch_size)
    assert times.batch_size == 32


def test_a_step_of_no_time_does_not_count() -> None:
    times = after(1.0)
    times.observe(0.0, 8)
    assert times.seconds == 1.0


def test_zeros_are_values_too() -> None:
    mean = RobustMean()
    for _ in range(17):
        mean.observe(0.0)
    assert mean.mean == 0.0
    for _ in range(5):
        mean.observe(1.0)
    assert mean.mean == 1.0


def reported(worker: WorkerProgress, *seconds: float) -> None:
    """Reports of one round, in order."""
    worker.tell_to_start(0.0)
    worker.start(0.0)
    for step, took in enumerate(seconds, start=1):
        report = StepReport(worker="a", round=1, steps=step, samples=8 * step, seconds=took, batch_size=8)
        worker.take_report(report, float(step))


def test_the_first_step_of_each_round_does_not_count() -> None:
    worker = WorkerProgress(name="a", heard=0.0)
    reported(worker, 30.0, 1.0)
    assert worker.step_time.seconds == 1.0
    reported(worker, 20.0, 1.2)
    assert worker.step_time.seconds == pytest.approx(1.1)
    reported(worker, 25.0)
    assert worker.step_time.seconds == pytest.approx(1.1)


def test_only_the_first_step_does_not_count() -> None:
    worker = WorkerProgress(name="a", heard=0.0)
    reported(worker, 1.0, 3.0)
    assert worker.step_time.seconds == 3.0


def _plain_middle(values: list[float]) -> float:
    ordered = sorted(values)
    cut = max(len(values) // 4, 1) if len(values) > 2 else 0
    return statistics.fmean(ordered[cut : len(ordered) - cut])


@given(
    st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0]), st.sampled_from([1.0, 1.0, 1.1, 1.3, 4.0])), max_size=80
    )
)
def test_the_robust_mean_is_that_of_its_definition(chosen: list[tuple[float, float]]) -> None:
    """Without the shortcuts: values that are alike, and recent ones that cannot lie beyond those before."""
    mean, values = RobustMean(), list[float]()
    for level, noise in chosen:
        value = level * noise
        mean.observe(value)
        values = [*values, value][-16:]
        before, recent = values[:-5], values[-5:]
        if before:
            middle = _plain_middle(before)
            if min(recent) > 1.5 * middle or max(recent) < middle / 1.5:
                values = recent
        assert list(mean._values) == values
        assert mean.mean == pytest.approx(_plain_middle(values), rel=1e-12)
