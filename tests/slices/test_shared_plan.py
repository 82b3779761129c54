"""The batches of ranks that share each of them: drawn ahead, resumed, and handed on to other plans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError, UnsupportedError
from lightning_bytescheduler.slices.batches import SliceBatch
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import EpochPlan
from lightning_bytescheduler.slices.lock_step import LockStepPlan
from lightning_bytescheduler.slices.shared_plan import SharedPlan
from lightning_bytescheduler.slices.slice import Slice

COUNTS = [40, 25, 60, 33, 50, 42, 7]
ALL = Counter((index, sample) for index, count in enumerate(COUNTS) for sample in range(count))
Samples = list[tuple[int, int]]


def catalogue(counts: Sequence[int] = COUNTS) -> SliceCatalogue:
    return SliceCatalogue(
        Slice(key=f"{number}", url=f"/rows/{number}", start=0, size=count, samples=count)
        for number, count in enumerate(counts)
    )


def shared(ranks: int, size: int, *, unfinished: int = 0, shares: Sequence[Sequence[int]] = (), **more: object):
    """A plan for each rank; its n-th batch has the n-th shares, over and over, and a smaller one equal ones."""

    def shares_of(batch: int, samples: int) -> list[int]:
        if shares and samples == size:
            return list(shares[batch % len(shares)])
        return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]

    plans = [SharedPlan(catalogue(), batch_size=size, rank=rank, ranks=ranks, seed=3, **more) for rank in range(ranks)]
    for plan in plans:
        plan.share_out(shares_of, unfinished=lambda: unfinished)
    return plans


def samples(batch: SliceBatch) -> Samples:
    return [(run.slice_index, sample) for run in batch.runs for sample in range(run.start, run.stop)]


def train(plans: Sequence[EpochPlan], steps: int | None = None, *, ahead: int = 0) -> list[list[Samples]]:
    """Take steps on all ranks, each of which draws more batches ahead; returns the samples of each rank's batches."""
    passes = [iter(plan) for plan in plans]
    drawn: list[list[Samples]] = [[] for _ in plans]
    for rank, batches in enumerate(passes):
        for _, batch in zip(range(ahead), batches, strict=False):
            drawn[rank].append(samples(batch))
    steps = len(plans[0]) if steps is None else steps
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
@settings(max_examples=60, deadline=None)
def test_an_epoch_goes_on_on_other_ranks_under_other_shares(
    shares: list[list[int]], steps: int, ahead: int, ranks: int, size: int
) -> None:
    before = shared(2, 15, shares=shares)
    steps = min(steps, len(before[0]))
    found = used(train(before, steps, ahead=ahead))
    state = json.loads(json.dumps(before[0].state_dict()))
    assert state == before[1].state_dict() == json.loads(json.dumps(state)), "the same on every rank"
    after = shared(ranks, size)
    for plan in after:
        plan.load_state_dict(state)
    assert found + used(train(after)) == ALL
    assert all(plan.over for plan in after)


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
    assert len(after[0]) == 18 - 7
    assert [samples(batch) for batch in after[0]] == whole[0][7:]
    at_the_start = shared(2, 15, unfinished=2)
    train(at_the_start, 2)
    assert at_the_start[0].state_dict() == shared(2, 15)[0].state_dict()


@pytest.mark.parametrize("first", ["shared", "lock step"])
def test_an_epoch_goes_on_in_the_other_plan_and_back(first: str) -> None:
    def plans(kind: str) -> Sequence[EpochPlan]:
        if kind == "shared":
            return shared(2, 15, shares=[[3, 12]])
        return [LockStepPlan(catalogue(), batch_sizes=[3, 5], rank=rank, seed=3) for rank in range(2)]

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
    dropping = shared(3, 32, shortage="drop")
    assert len(dropping[0]) == 8
    assert dropping[0].shares.dropped == 1
    assert all(len(batch) > 1 for batches in train(dropping) for batch in batches)


def test_batches_are_numbered_as_the_training_loop_counts_them() -> None:
    (plan,) = shared(1, 20)
    train([plan], 3)
    plan.open(counted=5)
    assert len(plan) == 5 + 10
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


def test_misuse() -> None:
    with pytest.raises(UnsupportedError, match="before the strategy has shared them out"):
        next(iter(SharedPlan(catalogue(), batch_size=4)))
    with pytest.raises(OptionError, match="batch_size"):
        SharedPlan(catalogue(), batch_size=0)
    (plan,) = shared(1, 20)
    with pytest.raises(OptionError, match="no more batches were drawn"):
        plan.trained()
    train([plan], 2)
    state = plan.state_dict()
    for damage in ({"rest": [[0, 5], [3, 9]]}, {"rest": [[0, 900]]}, {"rest": [[5, 5]]}, {"held": "x"}):
        with pytest.raises(TrackerStateError, match="damaged"):
            plan.load_state_dict({**state, **damage})
        assert plan.state_dict() == state
    other = SharedPlan(catalogue([9, 9]), batch_size=4, seed=3)
    with pytest.raises(TrackerStateError, match="other data or another order"):
        other.load_state_dict(state)
