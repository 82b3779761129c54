"""Shares of a batch by pace: simulated on machines of known speed, without a clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.ddp.batches import Balance, part_of, shares_by_pace
from lightning_bytescheduler.ddp.sample_weights import RobustMean

AHEAD = 8


def shares_of(balance: Balance, batch: int) -> tuple[int, ...]:
    """Those of a batch that a loader asks for."""
    balance._asked = batch
    return balance.present


def play(
    total: int,
    seconds: Callable[[int, int, int], float],
    *,
    ranks: int,
    batches: int,
    ahead: int = AHEAD,
    limits: list[int] | None = None,
) -> tuple[Balance, list[tuple[int, ...]]]:
    """Shares of each batch, where ``seconds(rank, batch, share)`` is what it takes."""
    balance = Balance(total, ranks, ahead=ahead, limits=limits)
    played: list[tuple[int, ...]] = []
    for batch in range(batches):
        if batch >= ahead:
            told = batch - ahead
            balance.observe(told, [seconds(r, told, n) / n for r, n in enumerate(played[told])])
        played.append(shares_of(balance, batch))
        assert sum(played[-1]) == total
        assert min(played[-1]) >= 1
    return balance, played


def longest(shares: tuple[int, ...], per_sample: list[float]) -> float:
    return max(share * pace for share, pace in zip(shares, per_sample, strict=True))


@pytest.mark.parametrize("speeds", [[1, 3], [1, 1, 1, 8], [1, 8, 8, 8], [2, 3, 5, 7]])
def test_shares_follow_speed(speeds: list[int]) -> None:
    total = 32 * len(speeds)
    balance, played = play(total, lambda r, b, n: n / speeds[r], ranks=len(speeds), batches=60)
    ceiling = total / sum(speeds)
    assert longest(played[-1], [1 / s for s in speeds]) <= 1.1 * ceiling
    assert balance.changes == 1


def test_machines_that_are_alike_are_left_alone() -> None:
    generator = random.Random(1)
    balance, played = play(64, lambda r, b, n: n * generator.uniform(0.97, 1.03), ranks=4, batches=500)
    assert balance.changes == 0
    assert set(played) == {(16,) * 4}


@pytest.mark.parametrize("seed", range(6))
def test_noise_does_not_make_shares_swing(seed: int) -> None:
    """30% of noise on machines of speed 1:3: they settle at nearly the best shares, and stay there."""
    generator = random.Random(seed)
    speeds = [1.0, 3.0]

    def seconds(rank: int, batch: int, share: int) -> float:
        return max(generator.gauss(1.0, 0.3), 0.1) * share / speeds[rank]

    balance, played = play(128, seconds, ranks=2, batches=1000)
    assert balance.changes <= 4
    assert all(longest(shares, [1.0, 1 / 3]) <= 1.25 * 32 for shares in played[400:])
    assert len(set(played[500:])) <= 2


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_machine_that_changes_is_balanced_again_within_twenty_steps(noise: float, factor: float) -> None:
    generator = random.Random(5)

    def seconds(rank: int, batch: int, share: int) -> float:
        slow = factor if rank == 1 and batch >= 100 else 1.0
        return share * slow * (1 + noise * generator.uniform(-1, 1))

    _, played = play(96, seconds, ranks=3, batches=160)
    assert played[99] == (32, 32, 32)
    best = shares_by_pace(96, [1.0, factor, 1.0], [96] * 3)
    assert longest(played[120], [1.0, factor, 1.0]) <= 1.15 * longest(best, [1.0, factor, 1.0])
    assert longest(played[99], [1.0, factor, 1.0]) >= 1.2 * longest(best, [1.0, factor, 1.0])


def test_a_single_slow_step_moves_nothing() -> None:
    balance, _ = play(64, lambda r, b, n: n * (20.0 if b % 50 == 7 else 1.0), ranks=2, batches=300)
    assert balance.changes == 0


def test_steps_that_take_something_for_nothing_are_balanced_too() -> None:
    """A step's time is not in proportion to its samples: shares are found in a few rounds."""

    def seconds(rank: int, batch: int, share: int) -> float:
        return 10.0 + share * (1.0 if rank else 4.0)

    _, played = play(100, seconds, ranks=2, batches=200)
    slow, fast = (seconds(rank, 0, played[-1][rank]) for rank in range(2))
    assert abs(slow - fast) <= 0.15 * fast


def test_memory_limits_hold() -> None:
    _, played = play(64, lambda r, b, n: n / (1 + 9 * r), ranks=2, batches=60, limits=[64, 40])
    assert played[-1] == (24, 40)


paces = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)


@given(paces, st.integers(0, 1000))
def test_all_is_shared_out_and_no_rank_goes_without(seconds: list[float], more: int) -> None:
    total = len(seconds) + more
    shares = shares_by_pace(total, seconds, [total] * len(seconds))
    assert sum(shares) == total
    assert min(shares) >= 1


@given(st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3), st.integers(3, 12))
def test_no_other_shares_are_done_earlier(seconds: list[float], total: int) -> None:
    found = longest(shares_by_pace(total, seconds, [total] * len(seconds)), seconds)

    def every(left: int, ranks: int) -> list[tuple[int, ...]]:
        if ranks == 1:
            return [(left,)]
        return [(n, *rest) for n in range(1, left - ranks + 2) for rest in every(left - n, ranks - 1)]

    assert found <= min(longest(shares, seconds) for shares in every(total, len(seconds))) * (1 + 1e-9)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_a_short_batch_is_shared_as_a_part_of_the_shares(shares: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, sum(shares)))
    parts = part_of(shares, size)
    assert sum(parts) == size
    assert all(part <= share for part, share in zip(parts, shares, strict=True))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_a_short_batch_has_a_sample_for_each_rank_if_it_can(shares: list[int], data: st.DataObject) -> None:
    assert min(part_of(shares, data.draw(st.integers(len(shares), sum(shares))))) >= 1


def test_a_pace_forgets_what_was_before_a_change() -> None:
    pace = RobustMean(64, faster=2.0)
    for value in [1.0] * 30 + [3.0] * 4:
        pace.observe(value)
    assert pace.mean == pytest.approx(1.0)
    pace.observe(3.0)
    assert pace.mean == pytest.approx(3.0)
    assert pace.uncertainty == 0.0


def test_shares_are_the_same_however_far_ahead_a_rank_has_asked() -> None:
    """A loader with workers draws farther, and what it drew of a pass that is cut short is asked for again."""
    ahead, near = (Balance(32, 2, ahead=4) for _ in range(2))
    for batch in range(40):
        for balance in (ahead, near):
            balance.observe(batch, [1.0, 3.0])
    assert shares_of(ahead, 60) != (16, 16)
    assert shares_of(near, 5) == shares_of(ahead, 5) == (16, 16)
    assert ahead.present == (16, 16)
