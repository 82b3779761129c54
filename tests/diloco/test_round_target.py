from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.round_target import FastestSteps, FixedSteps, Pace, SampleTarget, fastest_steps
from lightning_bytescheduler.exceptions import OptionError

INFINITY = 1e12


def test_the_seeds_theoretical_batch_size() -> None:
    assert SampleTarget.of_steps(batch_size=32, steps=500) == SampleTarget(16_000)


def test_samples_are_planned_by_projection() -> None:
    workers = [Pace(batch_size=size, step_seconds=time) for size, time in ((12, 0.025), (6, 0.04), (2, 0.06))]
    target = SampleTarget(100)
    assert target.left(samples=40, steps=[3, 0, 2]) == 60
    plan = target.plan(60, workers, now=0.0, within=1.0)
    assert plan.steps == (4, 2, 1)
    assert plan.seconds == pytest.approx(0.1)
    assert target.plan(60, workers, now=0.0, within=0.0999) is None
    assert target.step_cap is None


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(1, 500),
    st.integers(1, 500),
    st.integers(0, 2),
)
def test_what_is_ruled_out_early_is_not_within_reach(workers, to_go, within, committed) -> None:
    paces = [Pace(batch_size=size, step_seconds=time, committed=committed) for time, size in workers]
    target = SampleTarget(1)
    sure = target.plan(to_go, paces, now=0.0, within=INFINITY)
    assert (target.plan(to_go, paces, now=0.0, within=within) is None) == (sure.seconds > within)


def test_steps_are_shared_out_by_speed() -> None:
    # Speeds of 10, 5, 3.33 and 0.1 steps a second: 60 * v / v_max, rounded down, and at least one.
    assert fastest_steps(60, [0.1, 0.2, 0.3, 10.0]) == (60, 30, 20, 1)
    assert fastest_steps(61, [0.1, 0.2, 0.3]) == (61, 30, 20)
    assert fastest_steps(7, [2.0]) == (7,)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(8000, 9000))
def test_shares_end_within_one_step_of_the_slowest(times, steps) -> None:
    ends = [count * time for count, time in zip(fastest_steps(steps, times), times, strict=True)]
    assert max(ends) <= min(times) * steps * (1 + 1e-6)
    assert max(ends) - min(ends) <= max(times) * (1 + 1e-6)


def test_the_fastest_workers_steps() -> None:
    target = FastestSteps(10)
    workers = [Pace(batch_size=1, step_seconds=1.0, steps=6), Pace(batch_size=1, step_seconds=2.0, steps=3)]
    assert target.left(samples=9, steps=[6, 3]) == 4
    plan = target.plan(4, workers, now=0.0, within=4.0)
    assert (plan.steps, plan.seconds) == ((4, 2), 4.0)
    assert target.plan(4, workers, now=0.0, within=3.9) is None
    assert target.step_cap == 10


def test_fixed_steps_wait_for_the_slowest() -> None:
    target = FixedSteps(10)
    workers = [Pace(batch_size=1, step_seconds=1.0, steps=6), Pace(batch_size=1, step_seconds=2.0, steps=3)]
    assert target.left(samples=9, steps=[6, 3]) == 7
    plan = target.plan(7, workers, now=0.0, within=14.0)
    assert (plan.steps, plan.seconds) == ((4, 7), 14.0)
    assert target.step_cap == 10


@pytest.mark.parametrize("kind", [SampleTarget, FastestSteps, FixedSteps])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9"])
def test_what_is_no_target(kind: type, value: object) -> None:
    with pytest.raises(OptionError, match="a whole number, 1 or more"):
        kind(value)


def test_what_is_no_theoretical_step() -> None:
    with pytest.raises(OptionError, match="batch_size"):
        SampleTarget.of_steps(batch_size=0, steps=5)
    with pytest.raises(OptionError, match="steps"):
        SampleTarget.of_steps(batch_size=5, steps=0)
