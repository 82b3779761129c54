"""Ranks that go separate ways: uneven data, and collectives that some ranks skip. None fails, but all have to end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ranks import Ended, Nursery

SCRIPT = Path(__file__).with_name("train_apart.py")
PATIENCE_S = 120.0  # for what takes 5 on an idle machine, and ten minutes where nothing is noticed
APART = "RanksDivergedError: The ranks wait for each other in different places: "
Case = tuple[dict[str, Any], dict[int, dict[str, Any]]]


def run(nursery: Nursery, folder: Path, *cases: Case, world_size: int = 2) -> list[list[Ended]]:
    def one(number: int, case: Case) -> list[Ended]:
        options, own = case
        place = folder / str(number)
        place.mkdir()
        return nursery.run(
            SCRIPT,
            {"batches": 4, **options},
            world_size=world_size,
            folder=place,
            timeout=PATIENCE_S,
            own_arguments=own,
        )

    with ThreadPoolExecutor(4) as pool:  # they wait most of the time
        return list(pool.map(one, range(len(cases)), cases))


def check(ranks: Sequence[Ended], *says: str) -> None:
    """All ranks have ended in order, and say the same."""
    for rank in ranks:
        assert rank.code == 1, rank.log
        assert all(text in rank.log for text in says), (says, rank.log)
        assert "THREADS [] " in rank.log, rank.log
        assert "did not come back" not in rank.log, rank.log


WAYS_OUT = ("use_distributed_sampler=True", "DistributedSampler(dataset, drop_last=True)", "SliceDataModule")


def test_one_batch_more_is_named_with_the_counts_and_the_ways_out(nursery: Nursery, tmp_path: Path) -> None:
    at_the_end: Case = ({}, {1: {"batches": 5}})  # the other one has trained all it has
    as_ddp: Case = ({"stream": True, "mode": "ddp", "epochs": 2}, {0: {"batches": 3}})
    # Lightning asks for a batch, and a next one in the next epoch, which the other rank does not begin.
    nothing: Case = ({"stream": True, "plain": True, "epochs": 5}, {1: {"batches": 0}})
    ended, drifted, empty = run(nursery, tmp_path, at_the_end, as_ddp, nothing)
    check(empty, APART, "waits for the gradients of step 1", "waits for the others to begin this batch")
    check(ended, APART, "has begun 4 batches, 4 in each epoch", "has begun 5 batches, 5 in each epoch", *WAYS_OUT)
    check(drifted, APART, "has begun 6 batches, ", *WAYS_OUT)


@pytest.mark.slow
def test_one_batch_more_is_named_at_a_checkpoint_and_with_accumulation(nursery: Nursery, tmp_path: Path) -> None:
    at_a_checkpoint: Case = (
        {"stream": True, "cross_barrier": False, "checkpoint": "kept"},
        {0: {"batches": 5}},
    )
    # Each would take one step, but Lightning's ranks exchange messages before each batch.
    accumulates: Case = ({"accumulate": 4}, {1: {"batches": 3}})
    by_samples: Case = ({"weighting": "samples"}, {1: {"batches": 3}})
    saving, accumulating, weighted = run(nursery, tmp_path, at_a_checkpoint, accumulates, by_samples)
    check(saving, APART, "has begun 4 batches, ", "waits in all_reduce", *WAYS_OUT)
    check(saving, "has begun 5 batches, ", "waits for the others to begin this batch")
    check(accumulating, APART)
    check(weighted, APART, "has begun 3 batches, 3 in each epoch", *WAYS_OUT)


def test_a_collective_of_one_rank_alone_is_named_with_its_place(nursery: Nursery, tmp_path: Path) -> None:
    training: Case = ({}, {1: {"collective": "training_step"}})
    validating: Case = ({"val_batches": 2, "epochs": 2}, {0: {"collective": "on_validation_epoch_end"}})
    # Rank 1 has all the gradients it needs as it begins batch 4; rank 0 has not gone forward in batch 3.
    buffers: Case = ({"collective": "training_step", "from_step": 2}, {1: {"collective": ""}})
    in_training, in_validation, waiting = run(nursery, tmp_path, training, validating, buffers)
    check(in_training, APART, "rank 1 is in epoch 0, batch 1 (training_step), waits in all_gather")
    check(in_training, "rank 0 is in epoch 0, batch 1 (backward), waits for the gradients of step 1 (")
    check(in_validation, APART, "rank 0 is in batch 2 of the validation after step 4 (on_validation_epoch_end)")
    check(in_validation, "sync_dist=True", "rank 1 is in epoch 1, batch 1")
    check(in_validation, "waits for the others to begin this batch (has begun 5 batches")
    check(waiting, APART, "rank 0 is in epoch 0, batch 3 (training_step), waits in all_gather")
    check(waiting, "rank 1 is in epoch 0, batch 4", "waits for the others to begin this batch (has begun 4 batches")


def test_a_rank_that_gloo_ends_is_explained(nursery: Nursery, tmp_path: Path) -> None:
    # Of two broadcasts that meet one is larger than the other expects.
    ((survivor, dead),) = run(nursery, tmp_path, ({"broadcasts": 1000}, {1: {"batches": 5, "broadcasts": 1}}))
    assert dead.code == -6
    assert "gloo::EnforceNotMet" in dead.log
    assert survivor.code == 1
    assert "RankFailedError: Rank 1 failed: it shows no sign of life" in survivor.log
    assert "by the last signs of life, four in a second, rank 0 is in " in survivor.log
    assert "batches, 4 in each epoch" in survivor.log
    assert "batches, 5 in each epoch" in survivor.log


@pytest.mark.slow
def test_a_rank_that_is_only_slow_is_waited_for(nursery: Nursery, tmp_path: Path) -> None:
    loading: Case = ({"stream": True}, {0: {"pause": 7.0}})
    validating: Case = ({"val_batches": 2, "sync": True, "epochs": 2}, {0: {"busy": "validation_step"}})
    hooked: Case = ({"mode": "ddp"}, {1: {"busy": "on_train_batch_end"}})
    # Epochs of different lengths do no harm where the number of steps is the same: DDP trains this, too.
    steps: Case = ({"stream": True, "epochs": 50, "max_steps": 18}, {1: {"batches": 5}})
    for ranks in run(nursery, tmp_path, loading, validating, hooked, steps):
        for rank in ranks:
            assert rank.code == 0, rank.log
            assert "wait for each other" not in rank.log
