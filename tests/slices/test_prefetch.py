from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.slices.prefetch import PrefetchDepth


def after(fetch: float, consume: float, *, stalled: bool = False, times: int = 20, most: int = 8) -> PrefetchDepth:
    depth = PrefetchDepth(most=most)
    for _ in range(times):
        depth.fetched(fetch)
        depth.consumed(consume, stalled=stalled)
    return depth


def test_it_covers_what_is_consumed_during_a_fetch_and_one_more():
    assert PrefetchDepth(most=8).depth == 2
    assert after(1.0, 10.0).depth == 2
    assert after(10.0, 10.0).depth == 2
    assert after(29.0, 10.0).depth == 4
    assert after(1.0, 0.0).depth == 8


def test_it_follows_a_change():
    depth = after(1.0, 10.0)
    for _ in range(20):
        depth.fetched(50.0)
    assert depth.depth >= 6


def test_stalls_add_to_it_and_calm_takes_it_back():
    depth = after(1.0, 10.0, stalled=True, times=3)
    assert depth.depth == 5
    for _ in range(100):
        depth.consumed(10.0, stalled=False)
    assert depth.depth == 2


def test_a_fixed_depth_follows_nothing():
    depth = PrefetchDepth(most=8, fixed=3)
    depth.fetched(100.0)
    depth.consumed(0.1, stalled=True)
    assert depth.depth == 3


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.booleans())), st.integers(1, 20))
def test_it_stays_within_its_bounds(measured, most):
    depth = PrefetchDepth(most=most)
    for fetch, consume, stalled in measured:
        depth.fetched(fetch)
        depth.consumed(consume, stalled=stalled)
        assert 1 <= depth.depth <= most
