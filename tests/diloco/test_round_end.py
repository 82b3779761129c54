"""What ends a round: targets, the projection of when they are reached, and the defaults of its time limits."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.round_end import (
    FastestSteps,
    FixedSteps,
    Pace,
    RoundOptions,
    SampleTarget,
    project,
    seconds_of,
)

INFINITY = 1e12


def test_samples_are_planned_by_projection() -> None:
    workers = [Pace(batch_size=size, step_seconds=time) for size, time in ((12, 0.025), (6, 0.04), (2, 0.06))]
    target = SampleTarget(100)
    assert target.left(samples=40, steps=[3, 0, 2]) == 60
    plan = target.plan(60, workers, now=0.0, within=1.0)
    assert plan == (4, 2, 1)
    assert seconds_of(plan, workers, now=0.0) == pytest.approx(0.1)
    assert target.plan(60, workers, now=0.0, within=0.05) is None
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
    plan = target.plan(to_go, paces, now=0.0, within=within)
    is_within = plan is not None and seconds_of(plan, paces, now=0.0) <= within
    assert is_within == (seconds_of(sure, paces, now=0.0) <= within)
    assert plan is None or not is_within or plan == sure


def fastest_steps(steps: int, times: list[float]) -> tuple[int, ...]:
    paces = [Pace(batch_size=1, step_seconds=time) for time in times]
    return tuple(FastestSteps(steps).plan(steps, paces, now=0.0, within=INFINITY))


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
    assert (plan, seconds_of(plan, workers, now=0.0)) == ([4, 2], 4.0)
    assert target.step_cap == 10


def test_fixed_steps_wait_for_the_slowest() -> None:
    target = FixedSteps(10)
    workers = [Pace(batch_size=1, step_seconds=1.0, steps=6), Pace(batch_size=1, step_seconds=2.0, steps=3)]
    assert target.left(samples=9, steps=[6, 3]) == 7
    plan = target.plan(7, workers, now=0.0, within=14.0)
    assert (plan, seconds_of(plan, workers, now=0.0)) == ([4, 7], 14.0)
    assert target.step_cap == 10


def test_the_defaults_of_rounds() -> None:
    assert asdict(RoundOptions()) == {
        "outer_steps": None,
        "closing_rounds": 0,
        "start_workers": 1,
        "quorum": 0.5,
        "grace": 60.0,
        "silent_after": 10.0,
        "first_step_limit": 600.0,
    }


def plain_project(to_go, response_times, batch_sizes, time_steps=10, time_cap=5 * 60 * 1000):
    """A plain simulation, step by step, as it was proposed for performance-aware scheduling."""
    updates = np.zeros(batch_sizes.shape)
    next_update = deepcopy(response_times)
    time = 0
    done = 0
    while np.max(updates) < time_steps and time < time_cap and (to_go - done) > 0:
        update_idx = np.argmin(next_update)
        time = next_update[update_idx]
        done += batch_sizes[update_idx]
        updates[update_idx] += 1
        next_update[update_idx] += response_times[update_idx]
    return time, done, (to_go - done), updates


def paces(times, sizes, **more) -> list[Pace]:
    return [Pace(batch_size=size, step_seconds=time, **more) for time, size in zip(times, sizes, strict=True)]


drawn_workers = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=6)


@given(drawn_workers, st.integers(0, 600), st.integers(1, 15), st.integers(1, 300))
def test_it_agrees_with_the_seed(workers, to_go, step_limit, time_limit) -> None:
    """In milliseconds, whole ones, so that neither rounds. The seed may stop in the middle of a tie; it is then behind
    by what ends at that instant."""
    times, sizes = zip(*workers, strict=True)
    time, done, left, updates = plain_project(
        to_go, np.array(times), np.array(sizes), time_steps=step_limit, time_cap=time_limit
    )
    ours = project(to_go, paces(times, sizes), step_limit=step_limit, time_limit=float(time_limit))
    assert ours.seconds == time
    assert ours.left == to_go - ours.samples
    steps = np.array(ours.steps)
    assert ours.samples == (steps * np.array(sizes)).sum()
    behind = steps - updates
    assert set(behind) <= {0, 1}
    assert all(time % times[index] == 0 for index in np.flatnonzero(behind))
    if not behind.any():
        assert (ours.samples, ours.left) == (done, left)


def test_the_worked_example() -> None:
    """Batches of 12, 6, 2 at 25, 40, 60 ms. Sixty samples: the steps end at

        25 ms: 12     40 ms: 18     50 ms: 30     60 ms: 32     75 ms: 44     80 ms: 50     100 ms: 62

    so that at 100 ms the first has taken four steps, the second two (its third would end at 120), the third one, and
    two samples are too many.
    """
    found = project(60, paces([25.0, 40.0, 60.0], [12, 6, 2]), time_limit=1e4)
    assert (found.seconds, found.samples, found.left, found.steps) == (100.0, 62, -2, (4, 2, 1))
    assert found.stopped == "target"


def test_a_round_older_than_any_limit_still_gets_scheduled() -> None:
    workers = paces([25.0, 40.0, 60.0], [12, 6, 2], began=1e9)
    assert project(60, workers, now=1e9, time_limit=1e4).steps == (4, 2, 1)


def test_finishes_count_from_the_last_report() -> None:
    workers = [
        Pace(batch_size=1, step_seconds=10.0, began=95.0),  # ends at 105, 115
        Pace(batch_size=1, step_seconds=10.0, began=92.0),  # ends at 102, 112
    ]
    found = project(3, workers, now=100.0)
    assert (found.seconds, found.steps) == (12.0, (1, 2))


def test_a_step_that_is_overdue_ends_now_at_the_earliest() -> None:
    found = project(2, [Pace(batch_size=1, step_seconds=10.0, began=0.0)], now=100.0)
    assert (found.seconds, found.steps) == (10.0, (2,))


def test_ties_complete_together() -> None:
    found = project(1, paces([0.1, 0.3, 0.3], [1, 1, 1], began=5.0), now=5.0)
    assert found.steps == (1, 0, 0)
    found = project(3, paces([0.1, 0.3, 0.3], [1, 1, 1], began=5.0), now=5.0)
    assert found.steps == (3, 1, 1)  # though 3 * 0.1 is not 0.3 in floating point


def test_limits() -> None:
    workers = paces([1.0, 2.0], [1, 1])
    assert project(100, workers, step_limit=4).stopped == "steps"
    assert project(100, workers, step_limit=4).steps == (4, 2)
    assert project(100, workers, time_limit=2.5).stopped == "time"
    assert project(100, workers, time_limit=2.5).seconds == 3.0
    assert project(100, []).stopped == "idle"
    capped = paces([1.0, 2.0], [1, 1], most=5, steps=2)
    assert project(100, capped).steps == (3, 3)
    assert project(100, capped).stopped == "idle"


def test_what_is_sure_counts_from_the_start() -> None:
    """The slow worker will finish its step whatever is decided, so the fast one need not do that work as well."""
    fast = Pace(batch_size=1, step_seconds=1.0, committed=1)
    slow = Pace(batch_size=8, step_seconds=100.0, committed=1)
    found = project(10, [fast, slow])
    assert (found.steps, found.samples, found.seconds) == ((2, 1), 10, 100.0)


@given(drawn_workers, st.integers(1, 600), st.integers(0, 3))
def test_it_overshoots_by_less_than_a_batch_and_ties(workers, to_go, committed) -> None:
    times, sizes = zip(*workers, strict=True)
    found = project(to_go, paces(times, sizes, committed=committed))
    sure = committed * sum(sizes)
    assert found.samples >= to_go
    if sure < to_go:
        ends = [count * time if count > committed else 0 for count, time in zip(found.steps, times, strict=True)]
        ties = [size for size, end in zip(sizes, ends, strict=True) if end == max(ends)]
        assert found.samples - to_go < max(max(sizes), sum(ties))
    else:
        assert found.steps == (committed,) * len(times)
