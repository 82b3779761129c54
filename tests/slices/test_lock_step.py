"""Ranks that step together cover an epoch exactly, through any change of ranks and batch sizes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.epoch_plan import Stage
from lightning_bytescheduler.slices.lock_step import LockStepEpoch

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=12)
RANKS = st.lists(st.integers(1, 6), min_size=1, max_size=6) | st.lists(st.just(1), min_size=1, max_size=8)
SHORTAGES = st.sampled_from(["pad", "drop"])


def make(counts, batch_sizes, **more):
    return LockStepEpoch(
        samples=np.array(counts, dtype=np.int64), batch_sizes=batch_sizes, **{"seed": 3, "epoch": 1, **more}
    )


def samples(epoch, rank, first_step=0):
    return [
        (run.slice_index, sample)
        for run in epoch.runs(rank, first_step=first_step)
        for sample in range(run.start, run.stop)
    ]


def train(epoch, ranks, steps):
    """What the ranks train on in the first steps."""
    found = Counter[tuple[int, int]]()
    for rank in range(ranks):
        count = sum(epoch.batch(rank, step) for step in range(steps))
        found.update(samples(epoch, rank)[:count])
    return found


@given(counts=COUNTS, batch_sizes=RANKS, shortage=SHORTAGES, seed=st.integers(0, 2**64 - 1), shuffle=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_rank_has_a_batch_in_every_step_and_together_they_cover_the_epoch(
    counts, batch_sizes, shortage, seed, shuffle
):
    epoch = make(counts, batch_sizes, shortage=shortage, seed=seed, shuffle=shuffle)
    ranks, total = len(batch_sizes), sum(counts)
    for rank, size in enumerate(batch_sizes):
        batches = [epoch.batch(rank, step) for step in range(epoch.steps)]
        assert all(1 <= batch <= size for batch in batches)
        assert sum(batches) == epoch.share(rank) == len(samples(epoch, rank))
    trained = train(epoch, ranks, epoch.steps)
    assert sum(trained.values()) == total + epoch.padded - epoch.dropped
    assert len(trained) == total - epoch.dropped
    assert 0 <= epoch.padded < ranks
    assert 0 <= epoch.dropped < ranks
    assert epoch.padded == 0 if shortage == "drop" else epoch.dropped == 0
    if total >= ranks and min(batch_sizes) >= 2:
        assert epoch.padded == epoch.dropped == 0
    assert epoch.steps in (-(-total // sum(batch_sizes)), total // sum(batch_sizes))


@example(counts=[7], stages=[([1] * 5, "pad", 0.5)], last=[1])
@given(counts=COUNTS, stages=st.lists(st.tuples(RANKS, SHORTAGES, st.floats(0, 1)), max_size=4), last=RANKS)
@settings(max_examples=150, deadline=None)
def test_before_and_after_any_changes_of_ranks_and_batch_sizes_the_epoch_is_covered_exactly(counts, stages, last):
    trained, padded = Counter[tuple[int, int]](), 0
    taken: tuple[Stage, ...] = ()
    for batch_sizes, shortage, part in stages:
        epoch = make(counts, batch_sizes, shortage=shortage, stages=taken)
        assert epoch.left == sum(counts) - len(trained)
        steps = int(part * epoch.steps)
        trained += train(epoch, len(batch_sizes), steps)
        padded += epoch.padded if steps == epoch.steps else 0
        taken = epoch.after(steps)
    epoch = make(counts, last, stages=taken)
    trained += train(epoch, len(last), epoch.steps)
    assert set(trained) == {(index, sample) for index, count in enumerate(counts) for sample in range(count)}
    assert sum(trained.values()) <= sum(counts) + padded + epoch.padded


@given(counts=COUNTS, batch_sizes=RANKS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_same_ranks_go_on_with_the_next_batch(counts, batch_sizes, data):
    epoch = make(counts, batch_sizes)
    steps = data.draw(st.integers(0, epoch.steps))
    for rank in range(len(batch_sizes)):
        count = sum(epoch.batch(rank, step) for step in range(steps))
        assert samples(epoch, rank, first_step=steps) == samples(epoch, rank)[count:]


def test_a_rank_reads_whole_slices_but_for_two():
    counts = [100] * 40
    epoch = make(counts, [7, 7, 7])
    for rank in range(3):
        runs = list(epoch.runs(rank))
        assert sum(run.stop - run.start < 100 for run in runs) <= 2
        assert len(runs) <= 15


def test_shares_are_in_proportion_to_batch_sizes():
    epoch = make([100] * 10, [10, 30])
    assert (epoch.share(0), epoch.share(1), epoch.steps) == (250, 750, 25)


def test_a_short_last_step_takes_from_the_one_before_so_that_each_rank_has_a_sample():
    epoch = make([17], [4, 4])
    assert [[epoch.batch(rank, step) for step in range(3)] for rank in (0, 1)] == [[4, 3, 1], [4, 4, 1]]
    assert epoch.padded == epoch.dropped == 0


def test_fewer_samples_than_ranks_are_padded_or_dropped_and_it_is_said():
    padded, dropped = make([2], [4] * 5), make([2], [4] * 5, shortage="drop")
    assert (padded.steps, padded.padded, padded.dropped) == (1, 3, 0)
    assert [samples(padded, rank) for rank in range(5)] == [[(0, 0)], [(0, 1)], [(0, 0)], [(0, 1)], [(0, 0)]]
    assert (dropped.steps, dropped.padded, dropped.dropped) == (0, 0, 2)
    assert make([2], [4] * 2, stages=dropped.after(0)).steps == 1


def test_what_some_ranks_drop_is_left_for_others():
    epoch = make([5], [1, 1, 1], shortage="drop")
    assert (epoch.steps, epoch.dropped) == (1, 2)
    assert make([5], [1, 1], stages=epoch.after(1)).left == 2


def test_no_samples_are_no_steps():
    assert make([0, 0], [4, 4]).steps == 0
    assert list(make([], [4]).runs(0)) == []


def test_the_order_is_another_one_in_each_epoch():
    orders = [[run.slice_index for run in make([1] * 50, [5], epoch=epoch).runs(0)] for epoch in (0, 1, 1)]
    assert orders[0] != orders[1] == orders[2]


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("batch_sizes", {"batch_sizes": []}),
        ("batch_sizes", {"batch_sizes": [4, 0]}),
        ("batch_sizes", {"batch_sizes": [True]}),
        ("shortage", {"shortage": "ignore"}),
        ("samples", {"samples": np.array([3, -1])}),
        ("seed", {"seed": -1}),
        ("epoch", {"epoch": 0.5}),
        ("steps", {"stages": [Stage(batch_sizes=(2,), steps=6)]}),
        ("steps", {"stages": [Stage(batch_sizes=(2,), steps=-1)]}),
        ("batch_sizes", {"stages": [Stage(batch_sizes=(0,), steps=1)]}),
    ],
)
def test_misuse_names_the_option(option, options):
    usual = {"samples": np.array([10]), "batch_sizes": [2], "seed": 0, "epoch": 0}
    with pytest.raises(OptionError, match=f"{option}="):
        LockStepEpoch(**{**usual, **options})


def test_no_more_steps_are_taken_than_there_are():
    epoch = make([10], [2])
    for steps in (-1, 6, True):
        with pytest.raises(OptionError, match="steps="):
            epoch.after(steps)
