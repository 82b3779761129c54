"""Ranks that share batches take each sample once, from slices of their own, whatever their shares are."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.slices.epoch_plan import EpochLine, Stretch
from lightning_bytescheduler.slices.shared_plan import SharedPool

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=20)


def pool_of(counts: list[int], ranks: int, *, shuffle: bool = False) -> tuple[EpochLine, SharedPool]:
    line = EpochLine(np.array(counts, dtype=np.int64), seed=1, epoch=0, shuffle=shuffle)
    return line, SharedPool(line, [(0, line.length)] if line.length else [], [()] * ranks)


def places(stretches: list[Stretch]) -> list[int]:
    return [place for start, stop in stretches for place in range(start, stop)]


@given(COUNTS, st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_each_sample_is_taken_once_in_the_shares_that_are_asked_for(counts: list[int], shares: list[list[int]]) -> None:
    line, pool = pool_of(counts, 3, shuffle=True)
    taken = Counter[int]()
    for number in range(1000):
        asked = shares[number % len(shares)]
        if sum(asked) > pool.left or (number >= len(shares) and not any(map(any, shares))):
            break
        again = pool.copy().take(asked)
        found = pool.take(asked)
        assert again == found, "a copy stands where it does"
        assert [len(places(own)) for own in found] == asked
        taken.update(place for own in found for place in places(own))
    for rank in range(3):
        share = [0] * 3
        share[rank] = pool.left
        taken.update(place for own in pool.take(share) for place in places(own))
    assert taken == Counter(range(line.length))


def test_who_is_faster_gets_more_slices_and_each_is_read_by_one_rank() -> None:
    line, pool = pool_of([100] * 40, 2)
    readers: dict[int, set[int]] = {index: set() for index in range(40)}
    while pool.left:
        for rank, own in enumerate(pool.take([10, 30])):
            for place in places(own):
                readers[line.slice_at(place)].add(rank)
    read = [sum(rank in found for found in readers.values()) for rank in range(2)]
    assert read[0] in (10, 11)
    assert read[1] in (30, 31)
    assert sum(len(found) == 2 for found in readers.values()) <= 1


def test_what_a_slow_rank_holds_at_the_end_of_an_epoch_is_taken_over() -> None:
    """One slice for two ranks: they are done together, and each reads one stretch of it."""
    _, pool = pool_of([400], 2)
    found: list[list[int]] = [[], []]
    while pool.left:
        for rank, own in enumerate(pool.take([10, 30])):
            found[rank] += places(own)
    assert found == [list(range(100)), list(range(100, 400))]


def test_a_rank_whose_speed_changes() -> None:
    line, pool = pool_of([64] * 12, 3)
    found = Counter[int]()
    for shares in ([8, 8, 8], [1, 1, 22], [22, 1, 1]):
        for _ in range(12):
            if pool.left:
                found.update(place for own in pool.take(shares) for place in places(own))
    assert pool.left == 0
    assert found == Counter(range(line.length))
