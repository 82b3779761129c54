"""Balanced batches: every sample once an epoch, shares by pace, and what cannot be shared out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_bytescheduler import ByteSchedulerStrategy, OptionError, UnsupportedError
from lightning_bytescheduler.collectives.number_exchange import PostedNumbers
from lightning_bytescheduler.ddp.batches import (
    Balance,
    BalancedBatchSampler,
    BatchSharing,
    EpochOrder,
    LateLoader,
    require_balanceable,
)
from lightning_bytescheduler.ddp.sample_weights import Weighting
from tests.ddp.balanced_fits import Numbered, Seen, fit_balanced
from tests.support.rank_pool import RankPool

CPU = torch.device("cpu")

# ---------------------------------------------------------------------- the sampler


def drawn(
    size: int, batch_size: int, shares: Sequence[Sequence[int]], *, first: int = 0, drop_last: bool = False
) -> list[list[list[int]]]:
    """Batches by rank, of an epoch whose n-th batch has the n-th shares, over and over."""
    found = []
    for rank in range(len(shares[0])):
        sampler = BalancedBatchSampler(
            EpochOrder(size, seed=3),
            batch_size,
            rank,
            lambda batch: shares[batch % len(shares)],
            drop_last=drop_last,
            trained=lambda: first,
        )
        batches = list(sampler)
        found.append([batch[: sampler.size_of(first + n)] for n, batch in enumerate(batches)])
        assert all(batches), "a rank has something to compute on in every batch"
    return found


@given(st.integers(1, 200), st.lists(st.permutations([1, 3, 6]), min_size=1, max_size=5))
def test_every_sample_is_used_once_whatever_the_shares_are(size: int, shares: list[list[int]]) -> None:
    batches = drawn(size, 10, shares)
    assert sorted(n for rank in batches for batch in rank for n in batch) == list(range(size))
    full = size // 10
    assert all([len(rank[b]) for rank in batches] == shares[b % len(shares)] for b in range(full))


@given(st.integers(1, 200), st.data())
def test_an_epoch_goes_on_under_other_shares(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, (size - 1) // 10))
    before, after = drawn(size, 10, [[4, 6]]), drawn(size, 10, [[9, 1]], first=first)
    used = [n for rank in before for batch in rank[:first] for n in batch]
    used += [n for rank in after for batch in rank for n in batch]
    assert sorted(used) == list(range(size))


def test_the_last_batch_may_be_left_out() -> None:
    assert [len(batch) for batch in drawn(25, 10, [[4, 6]], drop_last=True)[0]] == [4, 4]
    assert len(BalancedBatchSampler(EpochOrder(25), 10, 0, lambda _: (4, 6))) == 3


def test_orders_are_seeded_by_epoch() -> None:
    one, other = EpochOrder(50, seed=4), EpochOrder(50, seed=4)
    assert list(one) == list(other)
    first = list(one)
    one.set_epoch(1)
    assert list(one) != first
    assert sorted(one) == list(range(50))
    assert list(EpochOrder(5, shuffle=False)) == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- who knows what when


def posted(*rows: list[int]) -> PostedNumbers:
    made = PostedNumbers()
    made.arrive(list(rows))
    return made


def test_shares_of_a_batch_do_not_depend_on_when_they_are_asked_for() -> None:
    """One rank's loader draws twelve batches ahead of the training, the other's one."""
    ahead = 15

    def play(drawn: int) -> list[tuple[int, ...]]:
        shares = Balance(40, 2, ahead=ahead)
        found = [shares.of_pass(batch) for batch in range(drawn)]
        for batch in range(100):
            known = found[batch - 1] if batch else (0, 0)
            slow = 3 if batch > 60 else 1
            shares.add(posted([0, known[0], known[0] * 1000], [0, known[1], known[1] * 1000 * slow]))
            found.append(shares.of_pass(drawn + batch))
        return found[:100]

    assert play(1) == play(12)
    assert len(set(play(1))) == 2


def test_a_loader_that_draws_too_far_ahead_is_an_error() -> None:
    shares = Balance(4, 2, ahead=3)
    shares.of_pass(0)
    shares.of_pass(1)
    with pytest.raises(RuntimeError, match="Batch 2 was drawn before batch 0 had begun"):
        shares.of_pass(2)


def test_nothing_is_drawn_before_it_is_known_where_the_epoch_stands() -> None:
    stands = 0
    sampler = BalancedBatchSampler(EpochOrder(12, shuffle=False), 4, 0, lambda _: (2, 2), trained=lambda: stands)
    batches = iter(LateLoader(Numbered(12), batch_sampler=sampler))
    stands = 2
    assert [batch[2].tolist() for batch in batches] == [[8, 9]]
    assert sampler.size_of(2) == 2


def test_a_wait_for_a_rank_that_has_failed_hears_of_it() -> None:
    shares = Balance(4, 2, ahead=2, failure=lambda: ValueError("it is gone"))
    shares.add(PostedNumbers())
    with pytest.raises(ValueError, match="it is gone"):
        shares.of_pass(0) and shares.of_pass(1)


# ---------------------------------------------------------------------- fits


def used(found: Sequence[Seen], epoch: int, size: int) -> list[int]:
    """Numbers of the samples that all ranks have used in an epoch; where there are too few, one is borrowed."""
    return sorted(n for seen in found for batch in seen.batches[epoch] for n in batch)


SIZE = 16 * 25 + 7
ANEW = {"reload_dataloaders_every_n_epochs": 2}


@pytest.fixture(scope="module")
def paced(two_ranks: RankPool) -> list[Seen]:
    """Three epochs in which rank 0 takes three times as long for a sample."""
    return two_ranks.run(fit_balanced, size=SIZE, seconds=[3.0, 1.0], epochs=3, trainer=ANEW)


def test_shares_follow_pace_and_every_sample_is_used_once(paced: list[Seen]) -> None:
    found = paced
    for seen in found:
        assert not seen.error
        assert "batches of 16 samples, by rank (4, 12)" in seen.plan
        assert seen.metrics["bytescheduler/share_of_rank_0"] == 4
        assert seen.changes == 1
    sizes = [[len(batch) for batch in seen.batches[0]] for seen in found]
    assert sizes[0][0] == sizes[1][0] == 8
    assert [sizes[0][24], sizes[1][24]] == [4, 12]
    assert [sizes[0][25], sizes[1][25]] == [2, 5]
    for epoch in range(1, 3):
        assert [len(seen.batches[epoch][0]) for seen in found] == [4, 12], "paces are kept, also by a loader made anew"
    for epoch in range(3):
        assert used(found, epoch, SIZE) == list(range(SIZE))
    assert found[0].batches[0] != found[0].batches[1]


def test_the_training_does_not_depend_on_the_shares(two_ranks: RankPool, paced: list[Seen]) -> None:
    """It is that of one process on the same batches, whichever rank computes which part."""
    equal = two_ranks.run(fit_balanced, size=SIZE, seconds=[1.0, 1.0], epochs=3, trainer=ANEW)[0]
    unequal = paced[0]
    assert (unequal.changes, equal.changes) == (1, 0)
    for name, weight in equal.weights.items():
        assert (unequal.weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_epochs_of_one_batch_are_balanced_too(two_ranks: RankPool) -> None:
    found = two_ranks.run(fit_balanced, size=16, seconds=[3.0, 1.0], epochs=10)
    assert [len(seen.batches[9][0]) for seen in found] == [4, 12]


def test_a_rank_for_which_no_sample_is_left_trains_along(two_ranks: RankPool) -> None:
    found = two_ranks.run(fit_balanced, size=33, seconds=[1.0, 1.0])
    assert not [seen.error for seen in found if seen.error]
    last = [seen.batches[0][-1] for seen in found]
    assert last[0] == last[1], "it borrows the one there is"
    assert [len(seen.batches[0]) for seen in found] == [3, 3]


def test_an_epoch_is_resumed_under_other_shares(two_ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    before = two_ranks.run(fit_balanced, size=16 * 30, seconds=[3.0, 1.0], save=(path, 18))
    after = two_ranks.run(fit_balanced, size=16 * 30, seconds=[1.0, 1.0], resume=path)
    assert [len(batch) for batch in before[0].batches[0]][17] == 4
    assert {len(batch) for seen in after for batch in seen.batches[0]} == {8}
    rest = [n for seen in after for batch in seen.batches[0] for n in batch]
    first = [n for seen in before for batch in seen.batches[0][:18] for n in batch]
    assert sorted(first + rest) == list(range(480))


@pytest.mark.slow
def test_an_epoch_goes_on_with_another_number_of_ranks(
    two_ranks: RankPool, three_ranks: RankPool, tmp_path: Path
) -> None:
    """From a checkpoint in the middle of a step, of which it lacks the gradients."""
    size, path = 16 * 6 + 5, str(tmp_path / "middle.ckpt")
    together: dict[str, Any] = {
        "size": size,
        "epochs": 2,
        "loader": {"batch_size": 16},
        "options": {"batch_size": "global"},
        "trainer": {"accumulate_grad_batches": 2},
    }
    before = two_ranks.run(fit_balanced, seconds=[1.0] * 2, **together, save=(path, 2))
    after = three_ranks.run(fit_balanced, seconds=[1.0] * 3, **together, resume=path)
    assert not [seen.error for seen in (*before, *after) if seen.error]
    assert [len(seen.batches[0][0]) for seen in (*before, *after)] == [8, 8, 6, 5, 5]
    assert [len(seen.batches[0]) for seen in after] == [3] * 3, "the fifth batch again, whose gradients were lost"
    for one, rest, skipped in ((0, 0, 4), (1, 1, 0)):
        expected = [sorted(n for seen in before for n in seen.batches[one][b]) for b in range(skipped, 7)]
        assert [sorted(n for seen in after for n in seen.batches[rest][b]) for b in range(7 - skipped)] == expected
    assert used(before, 0, size) == list(range(size))
    again = two_ranks.run(fit_balanced, seconds=[1.0] * 2, **together, resume=path)
    for name, weight in before[0].weights.items():
        assert torch.equal(again[0].weights[name], weight), f"{name}: the same two ranks, bit for bit"
        assert (after[0].weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_an_epoch_that_cannot_go_on_is_refused(two_ranks: RankPool, three_ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    two_ranks.run(fit_balanced, size=160, seconds=[1.0] * 2, save=(path, 4))
    for seen in three_ranks.run(fit_balanced, size=160, seconds=[1.0] * 3, resume=path):
        assert "UnsupportedError: The checkpoint is of the middle of an epoch of batches of 16 sam" in seen.error
        assert "(on 2 ranks)" in seen.error
        assert "This training has batches of 24 samples (on 3 ranks)" in seen.error
        assert "with batch_size='global' its batch_size counts for all ranks" in seen.error


def test_one_rank_alone_goes_on_with_the_same_batches_or_not_at_all(tmp_path: Path) -> None:
    """Lightning would begin the epoch's loader anew: samples would count twice, and others not at all."""
    path = str(tmp_path / "middle.ckpt")
    one: dict[str, Any] = {"size": 160, "seconds": [1.0]}
    larger: dict[str, Any] = {**one, "loader": {"batch_size": 16}}
    with RankPool(1) as alone:
        (before,) = alone.run(fit_balanced, **larger, options={"batch_size": "global"}, save=(path, 4))
        (after,) = alone.run(fit_balanced, **larger, resume=path)
        (refused,) = alone.run(fit_balanced, **one, resume=path)
    assert not after.error
    assert after.batches == [before.batches[0][4:]]
    assert "of an epoch of batches of 16 samples (on 1 rank)" in refused.error
    assert "This training has batches of 8 samples (on 1 rank)" in refused.error


def test_batches_that_are_too_small_for_all_ranks_are_refused(two_ranks: RankPool) -> None:
    options: dict[str, Any] = {"loader": {"batch_size": 1}, "options": {"batch_size": "global"}}
    for seen in two_ranks.run(fit_balanced, size=8, seconds=[1.0] * 2, **options):
        assert "DataLoader(batch_size)=1 is not allowed" in seen.error
        assert "it counts for all 2 ranks together" in seen.error


@pytest.mark.parametrize("dropped", [0, 1])
def test_what_a_batch_counts_among_those_of_its_step(dropped: int) -> None:
    sampler = BalancedBatchSampler(EpochOrder(25), 10, 0, lambda _: (10,), drop_last=bool(dropped))
    assert [sampler.share_of_step(batch, 1) for batch in range(3 - dropped)] == [1.0] * (3 - dropped)
    assert sampler.share_of_step(0, 2) == sampler.share_of_step(1, 2) == 1.0
    if not dropped:
        assert sampler.share_of_step(2, 2) == 1.0, "the last step has but one batch"
        assert [sampler.share_of_step(batch, 3) for batch in range(3)] == [1.2, 1.2, 0.6]


def test_ranks_with_other_data_are_refused(two_ranks: RankPool) -> None:
    for seen in two_ranks.run(fit_other_data):
        assert "RanksDifferError" in seen.error
        assert "the training data is batches of 16 samples (on 2 ranks), of 64 shuffled from seed" in seen.error


def fit_other_data(rank: int) -> Seen:
    return fit_balanced(rank, size=64 + rank, seconds=[1.0, 1.0])


# ---------------------------------------------------------------------- what cannot be shared out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"batch_size": "balance"},
            r"batch_size='balance' is not allowed: batch_size must be 'balanced', 'global', {'balanced': most}, or",
        ),
        ({"batch_size": 32}, r"batch_size=32 .*DiLoCoStrategy\(batch_size=\.\.\.\), or the DataLoader's"),
        ({"batch_size": "balanced", "weighting": "ranks"}, r"batch_size='balanced'.*need weighting='samples'"),
        ({"batch_size": {"balanced": 0}}, r"batch_size={'balanced': 0} .*1 or more, or one for each rank"),
        ({"batch_size": {"balanced": [4, "x"]}}, r"batch_size={'balanced': \[4, 'x'\]}"),
        ({"batch_size": {"global": 4}}, r"batch_size={'global': 4} .*'balanced', 'global', {'balanced': most}, or"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        ByteSchedulerStrategy(**{"weighting": "samples", **options})


class Endless(IterableDataset[Any]):
    """Has no numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class OwnLoader(DataLoader[Any]):
    """Of a user."""


def distributed(**options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(Numbered(8), num_replicas=2, rank=0, **options)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: [1, 2], "This is a list, with"),
        (lambda: OwnLoader(Numbered(8)), "This is a OwnLoader, with"),
        (lambda: DataLoader(Endless()), "samples need numbers. .* and sampler _InfiniteConstantSampler"),
        (lambda: DataLoader(Numbered(8), batch_size=None), "a DataLoader, with batch sampler NoneType"),
        (lambda: DataLoader(Numbered(8), batch_sampler=[[0]]), "a DataLoader, with batch sampler list"),
        (lambda: DataLoader(Numbered(8)), "and sampler SequentialSampler"),
        (lambda: DataLoader(Numbered(8), sampler=WeightedRandomSampler([1.0] * 8, 8)), "sampler WeightedRandomSampler"),
    ],
)
def test_what_has_no_batches_to_share_is_refused(loader: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        require_balanceable(loader(), "balanced", CPU, 2)


def test_a_device_whose_time_is_not_taken_is_refused() -> None:
    loader = DataLoader(Numbered(8), sampler=distributed())
    with pytest.raises(UnsupportedError, match="measured on CPUs and CUDA GPUs, and this trains on mps"):
        require_balanceable(loader, "balanced", torch.device("mps"), 2)
    for device in (CPU, torch.device("cuda")):
        require_balanceable(loader, "balanced", device, 2)
    require_balanceable(loader, "global", torch.device("mps"), 2)  # equal shares ask for no time


def test_one_rank_may_have_the_loader_of_one_process() -> None:
    loader = DataLoader(Numbered(8), shuffle=True)
    require_balanceable(loader, "global", CPU, 1)
    assert EpochOrder.of(loader).described == "shuffled from seed 0"
    assert EpochOrder.of(DataLoader(Numbered(8))).described == "as it is"
    drawn_again = DataLoader(Numbered(8), sampler=RandomSampler(Numbered(8), replacement=True))
    with pytest.raises(UnsupportedError, match=r"batch_size='global' shares out .* and sampler RandomSampler"):
        require_balanceable(drawn_again, "global", CPU, 1)


def test_several_loaders_are_refused() -> None:
    def trainer(loaders: int) -> Any:
        return SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[0] * loaders)))

    sharing = BatchSharing(Weighting("samples", "balanced"))
    sharing.require_one_loader(trainer(1))
    with pytest.raises(UnsupportedError, match=r"batch_size='balanced' shares out .* of one DataLoader, and there are"):
        sharing.require_one_loader(trainer(2))
    BatchSharing(Weighting("samples")).require_one_loader(trainer(2))


def fit_too_early(rank: int, weighting: str, batch_size: str | None) -> str:
    return fit_balanced(
        rank,
        size=16,
        seconds=[1.0, 1.0],
        options={"weighting": weighting, "batch_size": batch_size},
        trainer={"callbacks_extra": [LoadsEarly()]},
    ).error


class LoadsEarly(Callback):
    """Asks for what the training data say before the model is wrapped."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        assert trainer.estimated_stepping_batches


def test_data_that_is_loaded_too_early_is_refused(two_ranks: RankPool) -> None:
    for error in two_ranks.run(fit_too_early, weighting="samples", batch_size="balanced"):
        assert error.startswith("UnsupportedError: batch_size=...: training data was loaded before the model is")
        assert "Ask for that in configure_optimizers, or later" in error
    assert not any(two_ranks.run(fit_too_early, weighting="samples", batch_size=None)), "as many batches on each"
