"""Who takes which samples of an epoch, over any restarts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bytescheduler.ddp.batches import EpochOrder
from lightning_bytescheduler.diloco.loaders import EpochShare, ShareLoader, deal, shared_loader


class Worker:
    """One rank with its count of batches, as Lightning has it."""

    def __init__(self, samples: int, size: int, rank: int, ranks: int) -> None:
        self.batches = 0
        order = EpochOrder(samples, seed=3)
        order.set_epoch(2)
        self.share = EpochShare(order, size, rank, ranks, trained=lambda: self.batches)

    def train(self, most: int) -> list[int]:
        taken: list[int] = []
        batches = iter(self.share)
        for _ in range(most):
            batch = next(batches, None)
            if batch is None:
                break
            taken += batch
            self.batches += 1
        return taken


@pytest.mark.parametrize(("samples", "ranks"), [(10, 2), (11, 3), (2, 5), (7, 1)])
def test_shares_are_those_of_the_sampler_that_lightning_puts_in(samples: int, ranks: int) -> None:
    for rank in range(ranks):
        sampler: DistributedSampler[int] = DistributedSampler(range(samples), ranks, rank, seed=3)  # type: ignore[arg-type]
        sampler.set_epoch(2)
        assert Worker(samples, 3, rank, ranks).train(99) == list(sampler)


@given(
    samples=st.integers(1, 60),
    stretches=st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4), max_size=5),
)
def test_each_sample_counts_once_over_any_restarts(samples: int, stretches: list[list[tuple[int, int]]]) -> None:
    """Workers of any batch sizes get as far as they do; what is repeated is what fills up shares."""
    seen: Counter[int] = Counter()
    saved: list[dict[str, object]] = []
    repeated = 0
    for stretch in [*stretches, [(2, 99), (3, 99)]]:
        workers = [Worker(samples, size, rank, len(stretch)) for rank, (size, _) in enumerate(stretch)]
        if saved:
            assert all(worker.share.resume(saved, 1) for worker in workers)
        repeated += len(workers) - 1
        for worker, (_, most) in zip(workers, stretch, strict=True):
            seen.update(worker.train(most))
        saved = [worker.share.position for worker in workers]
        if set(seen) == set(range(samples)):
            break
    assert set(seen) == set(range(samples))
    assert seen.total() <= samples + repeated


def test_batches_of_before_a_restart_are_counted_once() -> None:
    before, after = Worker(12, 2, 0, 1), Worker(12, 2, 0, 1)
    taken = before.train(2)
    after.batches = 2  # as Lightning has them from the checkpoint
    assert after.share.resume([before.share.position], 1)
    taken += after.train(1)
    assert after.share.position["taken"] == 6
    assert len(set(taken)) == 6


def test_other_data_are_not_gone_on_with() -> None:
    worker, other = Worker(10, 2, 0, 1), Worker(11, 2, 0, 1)
    worker.train(2)
    assert not other.share.resume([worker.share.position], 1)
    assert len(other.train(99)) == 11


def test_loaders_of_other_kinds_stay_as_they_are() -> None:
    plain: DataLoader[int] = DataLoader(list(range(8)), batch_size=2)  # type: ignore[arg-type]
    assert shared_loader(plain, 0, 2, lambda: 0) is plain
    other = object()
    assert shared_loader(other, 0, 2, lambda: 0) is other
    sampler: DistributedSampler[int] = DistributedSampler(plain.dataset, 2, 1)
    dealt = DataLoader(plain.dataset, batch_size=2, sampler=sampler)
    assert shared_loader(dealt, 0, 2, lambda: 0) is dealt  # another rank's
    made = shared_loader(dealt, 1, 2, lambda: 0)
    assert isinstance(made, ShareLoader)
    assert [batch.tolist() for batch in made] == [batch.tolist() for batch in dealt]
    assert deal([], 2, 0) == []
