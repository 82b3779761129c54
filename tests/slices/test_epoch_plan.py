"""Ranks that step together cover an epoch exactly, through any change of ranks, batch sizes and shares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError, UnsupportedError
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import EpochPlan, EpochPool, SampleRun, SliceBatch
from lightning_bytescheduler.slices.slice import Slice

COUNTS = [40, 25, 60, 33, 50, 42, 7]
ALL = Counter((index, sample) for index, count in enumerate(COUNTS) for sample in range(count))
Samples = list[tuple[int, int]]
NUMBERS = st.lists(st.integers(1, 12), min_size=1, max_size=12)
RANKS = st.lists(st.integers(1, 6), min_size=1, max_size=6) | st.lists(st.just(1), min_size=1, max_size=8)


def catalogue(counts: Sequence[int] = COUNTS) -> SliceCatalogue:
    return SliceCatalogue(
        Slice(key=f"{number}", url=f"/rows/{number}", size=count, samples=count) for number, count in enumerate(counts)
    )


def shared(ranks: int, size: int, *, unfinished: int = 0, shares: Sequence[Sequence[int]] = (), **more: object):
    """A plan for each rank; its n-th batch has the n-th shares, over and over, and a smaller one equal ones."""

    def shares_of(batch: int, samples: int) -> list[int]:
        if shares and samples == size:
            return list(shares[batch % len(shares)])
        return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]

    sizes = [size] + [0] * (ranks - 1)  # only their sum counts
    plans = [
        EpochPlan(catalogue(), batch_sizes=sizes, rank=rank, seed=3, is_shared=True, **more) for rank in range(ranks)
    ]
    for plan in plans:
        plan.share_out(shares_of, unfinished=lambda: unfinished)
    return plans


def together(batch_sizes: Sequence[int], counts: Sequence[int] = COUNTS, **more: object) -> list[EpochPlan]:
    """A plan for each rank."""
    options = {"seed": 3, **more}
    return [
        EpochPlan(catalogue(counts), batch_sizes=batch_sizes, rank=rank, **options) for rank in range(len(batch_sizes))
    ]


def samples(batch: SliceBatch) -> Samples:
    return [(run.slice_index, sample) for run in batch.runs for sample in range(run.start, run.stop)]


def train(plans: Sequence[EpochPlan], steps: int | None = None, *, ahead: int = 0) -> list[list[Samples]]:
    """Take steps on all ranks, each of which draws more batches ahead; returns the samples of each rank's batches."""
    passes = [iter(plan) for plan in plans]
    drawn: list[list[Samples]] = [[] for _ in plans]
    for rank, batches in enumerate(passes):
        for _, batch in zip(range(ahead), batches, strict=False):
            drawn[rank].append(samples(batch))
    steps = plans[0].batches if steps is None else steps
    for _ in range(steps):
        for rank, plan in enumerate(plans):
            drawn[rank] += [samples(batch) for batch in [next(passes[rank], None)] if batch is not None]
            plan.trained()
    return [batches[:steps] for batches in drawn]


def used(found: list[list[Samples]]) -> Counter[tuple[int, int]]:
    """What counts: a rank without a sample computes on another's of that step."""
    steps = zip(*found, strict=True)
    return Counter(sample for batches in steps for sample in {sample for batch in batches for sample in batch})


SPLITS = st.lists(st.integers(1, 14).map(lambda first: [first, 15 - first]), min_size=1, max_size=4)


@given(SPLITS, st.integers(0, 18), st.integers(0, 6), st.integers(1, 4), st.integers(1, 30))
def test_an_epoch_goes_on_on_other_ranks_under_other_shares(
    shares: list[list[int]], steps: int, ahead: int, ranks: int, size: int
) -> None:
    before = shared(2, 15, shares=shares)
    steps = min(steps, before[0].batches)
    found = used(train(before, steps, ahead=ahead))
    state = json.loads(json.dumps(before[0].state_dict()))
    assert state == before[1].state_dict() == json.loads(json.dumps(state)), "the same on every rank"
    after = shared(ranks, size)
    for plan in after:
        plan.load_state_dict(state)
    assert found + used(train(after)) == ALL
    assert all(plan.left.taken == plan.left.steps for plan in after)


def test_the_same_ranks_go_on_with_what_would_have_come() -> None:
    whole = train(shared(2, 15, shares=[[4, 11]]))
    before, after = shared(2, 15, shares=[[4, 11]]), shared(2, 15, shares=[[4, 11]])
    train(before, 7, ahead=5)
    for plan in after:
        plan.load_state_dict(before[1].state_dict())
    assert train(after, ahead=3) == [batches[7:] for batches in whole]


def test_a_step_that_accumulates_goes_on_from_its_beginning() -> None:
    whole = train(shared(2, 15))
    before, after = shared(2, 15, unfinished=2), shared(2, 15)
    train(before, 9, ahead=2)
    after[0].load_state_dict(before[0].state_dict())
    assert after[0].batches == 18 - 7
    assert [samples(batch) for batch in after[0]] == whole[0][7:]
    at_the_start = shared(2, 15, unfinished=2)
    train(at_the_start, 2)
    assert at_the_start[0].state_dict() == shared(2, 15)[0].state_dict()


@pytest.mark.parametrize("first", ["shared", "lock step"])
def test_an_epoch_goes_on_in_the_other_plan_and_back(first: str) -> None:
    def plans(kind: str) -> Sequence[EpochPlan]:
        if kind == "shared":
            return shared(2, 15, shares=[[3, 12]])
        return together([3, 5])

    kinds = ["shared", "lock step"] * 2
    state, found = None, Counter[tuple[int, int]]()
    for number, kind in enumerate(kinds if first == "shared" else kinds[::-1]):
        made = plans(kind)
        for plan in made:
            if state is not None:
                plan.load_state_dict(state)
        found += used(train(made, None if number == 3 else 4))
        state = json.loads(json.dumps(made[1].state_dict()))
    assert found == ALL


def test_a_last_batch_without_a_sample_for_each_rank() -> None:
    plans = shared(3, 32)  # 257 samples
    last = [batches[-1] for batches in train(plans)]
    assert last[0] == last[1] == last[2]
    assert [plan.size_of(8) for plan in plans] == [1, 0, 0]
    assert plans[0].share_of_step(8, 1) == plans[0].share_of_step(0, 2) == 1.0
    assert plans[0].share_of_step(8, 9) == pytest.approx(9 / 257)


def restored(processed: int) -> SimpleNamespace:
    """A Trainer that goes on in the middle of an epoch."""
    progress = SimpleNamespace(current=SimpleNamespace(processed=processed), is_last_batch=False)
    return SimpleNamespace(
        fit_loop=SimpleNamespace(
            restarting=True, epoch_loop=SimpleNamespace(batch_progress=progress), epoch_progress=None
        )
    )


def test_batches_are_numbered_as_the_training_loop_counts_them() -> None:
    (plan,) = shared(1, 20)
    train([plan], 3)
    plan.open(restored(5))  # type: ignore[arg-type]
    assert plan.batches == 5 + 10
    next(iter(plan))
    assert (plan.size_of(5), plan.size_of(3), plan.size_of(6)) == (20, None, None)


def test_the_next_slices_are_named_across_the_end_of_an_epoch() -> None:
    plans = shared(2, 16, shares=[[4, 12]])
    for plan in plans:
        batches = list(plan)
        following = {batch.runs[-1].slice_index for batch in batches[1:4]} - {batches[0].runs[-1].slice_index}
        assert following <= set(batches[0].ahead)
        plan.start_epoch(1)
        assert next(iter(plan)).runs[0].slice_index in batches[-1].ahead


@given(NUMBERS, RANKS, st.integers(0, 2**64 - 1), st.booleans())
def test_every_rank_has_a_batch_in_every_step_and_together_they_cover_the_epoch(
    counts: list[int], batch_sizes: list[int], seed: int, shuffle: bool
) -> None:
    plans = together(batch_sizes, counts, seed=seed, shuffle=shuffle)
    ranks, total, plan = len(batch_sizes), sum(counts), plans[0]
    found = train(plans)
    for size, batches in zip(batch_sizes, found, strict=True):
        assert len(batches) == plan.left.steps
        assert all(1 <= len(batch) <= size for batch in batches)
    trained = Counter(sample for batches in found for batch in batches for sample in batch)
    assert sum(trained.values()) == total + plan.padded
    assert len(trained) == total
    assert 0 <= plan.padded < ranks
    if total >= ranks and min(batch_sizes) >= 2:
        assert plan.padded == 0
    assert plan.left.steps == -(-total // sum(batch_sizes))


@example(counts=[7], stages=[([1] * 5, 0.5)], last=[1])
@given(counts=NUMBERS, stages=st.lists(st.tuples(RANKS, st.floats(0, 1)), max_size=4), last=RANKS)
def test_before_and_after_any_changes_of_ranks_and_batch_sizes_the_epoch_is_covered_exactly(
    counts: list[int], stages: list[tuple[list[int], float]], last: list[int]
) -> None:
    trained, padded, state = Counter[tuple[int, int]](), 0, None
    for batch_sizes, part in [*stages, (last, 1.0)]:
        plans = together(batch_sizes, counts)
        for plan in plans:
            if state is not None:
                plan.load_state_dict(state)
        assert plans[0].left.samples == sum(counts) - len(trained)
        steps = int(part * plans[0].left.steps)
        for batches in train(plans, steps):
            trained.update(sample for batch in batches for sample in batch)
        padded += plans[0].padded if steps == plans[0].left.steps else 0
        state = json.loads(json.dumps(plans[-1].state_dict()))
    assert set(trained) == {(index, sample) for index, count in enumerate(counts) for sample in range(count)}
    assert sum(trained.values()) <= sum(counts) + padded


@given(NUMBERS, RANKS, st.floats(0, 1))
def test_the_same_ranks_go_on_with_the_next_batch(counts: list[int], batch_sizes: list[int], part: float) -> None:
    whole, before, after = (together(batch_sizes, counts) for _ in range(3))
    steps = int(part * before[0].left.steps)
    train(before, steps)
    for plan in after:
        plan.load_state_dict(before[0].state_dict())
    assert train(after) == [batches[steps:] for batches in train(whole)]


def sizes_of(batch_sizes: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    return [[len(batch) for batch in batches] for batches in train(together(batch_sizes, counts))]


def test_batch_sizes_are_kept_as_far_as_each_rank_has_a_sample_in_the_last_step() -> None:
    assert sizes_of([10, 30], [100] * 10) == [[10] * 25, [30] * 25]
    assert sizes_of([4, 4], [17]) == [[4, 3, 1], [4, 4, 1]] or sizes_of([4, 4], [17]) == [[4, 4, 1], [4, 3, 1]]


def test_a_rank_reads_whole_slices_but_for_a_few() -> None:
    for batches in train(together([7, 7, 7], [100] * 40)):
        slices = Counter(index for batch in batches for index, _ in batch)
        assert sum(count < 100 for count in slices.values()) <= 3
        assert len(slices) <= 16


def test_fewer_samples_than_ranks_are_repeated() -> None:
    padded = together([4] * 5, [2])
    assert (padded[0].left.steps, padded[0].padded) == (1, 3)
    assert [len(set(batch)) for (batch,) in train(padded)] == [1] * 5
    assert used(train(together([4] * 5, [2]))) == Counter([(0, 0), (0, 1)])


def test_the_order_is_another_one_in_each_epoch() -> None:
    (plan,) = together([5], [1] * 50)
    orders = []
    for epoch in (0, 1, 1):
        plan.start_epoch(epoch)
        orders.append([samples(batch) for batch in plan])
    assert orders[0] != orders[1] == orders[2]


def test_misuse() -> None:
    with pytest.raises(UnsupportedError, match="before the strategy has shared them out"):
        next(iter(EpochPlan(catalogue(), batch_sizes=[4], is_shared=True)))
    (plan,) = shared(1, 20)
    with pytest.raises(OptionError, match="no more batches were drawn"):
        plan.trained()
    train([plan], 2)
    state = plan.state_dict()
    ((dealt, held),) = state["together"]["position"]
    for damage in (["0", held], [dealt, "x"], [dealt, [[[0, "0", 5]]]]):
        with pytest.raises(TrackerStateError, match="damaged"):
            plan.load_state_dict({"together": {**state["together"], "position": [damage]}})
        assert plan.state_dict() == state
    (other,) = together([4], [9, 9])
    with pytest.raises(TrackerStateError, match="other data or another order"):
        other.load_state_dict(state)


def pool_of(counts: list[int], ranks: int, *, shuffle: bool = False) -> EpochPool:
    order = np.random.default_rng(1).permutation(len(counts)) if shuffle else np.arange(len(counts))
    return EpochPool(order.astype(np.int32), np.array(counts, dtype=np.int64), ranks)


def places(runs: Sequence[SampleRun]) -> Samples:
    return [(run.slice_index, place) for run in runs for place in range(run.start, run.stop)]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_each_sample_is_taken_once_in_the_shares_that_are_asked_for(counts: list[int], shares: list[list[int]]) -> None:
    pool = pool_of(counts, 3, shuffle=True)
    taken = Counter[tuple[int, int]]()
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
    assert taken == Counter((index, sample) for index, count in enumerate(counts) for sample in range(count))


def test_a_faster_rank_gets_more_slices_and_each_is_read_by_one_rank() -> None:
    pool = pool_of([100] * 40, 2)
    readers: dict[int, set[int]] = {index: set() for index in range(40)}
    while pool.left:
        for rank, own in enumerate(pool.take([10, 30])):
            for run in own:
                readers[run.slice_index].add(rank)
    read = [sum(rank in found for found in readers.values()) for rank in range(2)]
    assert read[0] in (10, 11)
    assert read[1] in (30, 31)
    assert sum(len(found) == 2 for found in readers.values()) <= 1


def test_what_a_slow_rank_holds_at_the_end_of_an_epoch_is_taken_over() -> None:
    """One slice for two ranks: they are done together, and each reads one stretch of it."""
    pool = pool_of([400], 2)
    found: list[Samples] = [[], []]
    while pool.left:
        for rank, own in enumerate(pool.take([10, 30])):
            found[rank] += places(own)
    assert [[sample for _, sample in own] for own in found] == [list(range(100)), list(range(100, 400))]


def test_a_rank_whose_speed_changes() -> None:
    pool = pool_of([64] * 12, 3)
    found = Counter[tuple[int, int]]()
    for shares in ([8, 8, 8], [1, 1, 22], [22, 1, 1]):
        for _ in range(12):
            if pool.left:
                found.update(place for own in pool.take(shares) for place in places(own))
    assert pool.left == 0
    assert found == Counter((index, sample) for index in range(12) for sample in range(64))
