from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.tuning.search import propose
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, TuningPoint, distance
from tests.tuning.training import CREDITS, SPACE, START, inside, trial

GRID = SPACE.points(octaves=1.0)


@settings(max_examples=10)
@given(
    seen=st.lists(st.tuples(st.sampled_from(GRID), st.floats(1e-4, 100), st.floats(0, 0.5)), min_size=1, max_size=15),
    ddp=st.none() | st.floats(1e-4, 100),
)
def test_whatever_was_seen_a_proposal_is_legal_and_new(seen, ddp) -> None:
    trials = [trial(point, seconds, seconds * error) for point, seconds, error in seen]
    trials += [] if ddp is None else [trial(PLAIN_DDP, ddp)]
    point, gain = propose(SPACE, trials)
    assert (point, gain) == propose(SPACE, trials)
    assert math.isfinite(gain)
    if point is not None:
        assert inside(point, SPACE)
        assert point not in {point for point, _, _ in seen}


def test_identical_points_and_a_constant_objective() -> None:
    same = [trial(START, 0.3, 0.0)] * 5
    assert propose(SPACE, same)[0] is not None
    everywhere = [trial(point, 0.3, 0.001) for point in GRID]
    assert propose(SPACE, everywhere)[1] < 0.003


def test_noise_does_not_pass_for_an_optimum() -> None:
    """One lucky measurement with a large error does not keep a good one from being the best."""
    trials = [trial(point, 0.3, 0.002) for point in GRID]
    lucky = trial(GRID[5], 0.2, 0.2)
    assert propose(SPACE, [*trials, lucky])[1] == pytest.approx(propose(SPACE, trials)[1], abs=0.002)


def test_only_what_is_near_the_fastest_is_proposed() -> None:
    near, far = TuningPoint(credit=389_120, partition_size=97_280), TuningPoint(credit=97_280, partition_size=49_152)
    point, _ = propose(SPACE, [trial(near, 0.30, 0.001), trial(far, 0.55, 0.001)])
    assert point is not None
    assert distance(point, near) <= 2


def test_plain_ddp_far_ahead_leaves_little_to_gain() -> None:
    seen = [trial(point, 0.3 + 0.001 * index, 0.001) for index, point in enumerate(GRID[::4])]
    with_ddp = propose(SPACE, [*seen, trial(PLAIN_DDP, 0.2)])
    assert with_ddp[1] < propose(SPACE, seen)[1]
    assert with_ddp[1] < 0.005


def test_credits_alone() -> None:
    point, _ = propose(CREDITS, [trial(START, 0.3, 0.01)])
    assert point is not None
    assert inside(point, CREDITS)
