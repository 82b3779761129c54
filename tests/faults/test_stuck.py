"""Ranks that stop taking part without failing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run, run_together

TIMEOUT_S = 5.0
SOON = {"patience": 2.0}  # until a training thread that does not come back is ended


def test_a_rank_that_never_comes_back_ends_all_after_the_timeout(nursery: Nursery, tmp_path: Path) -> None:
    options = {"where": "training_step", "kind": "sleep", "timeout": TIMEOUT_S, "ranks": [1]}
    ranks = run(nursery, Scenario(world_size=3, options=options, own_options={1: {"bounds": SOON}}), tmp_path)
    check_end(ranks, failed=1, says="bucket", clean=False)
    survivors = [ranks[0], ranks[2]]
    for survivor in survivors:
        assert survivor.stamp("AFTER_FAILURE") is not None, survivor.log
    assert any(
        "SchedulerTimeoutError: " in each.log and "rank 1 is in epoch 0, batch 3 (training_step)" in each.log
        for each in survivors
    )
    # And the one that sleeps is told before it is ended.
    assert "did not come back within 2 s, so its process is ended. It was at:" in ranks[1].log
    assert "time.sleep" in ranks[1].log


@pytest.mark.slow
def test_survivors_end_although_the_failed_process_lives_on(nursery: Nursery, tmp_path: Path) -> None:
    """It ends after them: it waits for that. A rank in a step as DDP's waits inside of torch, for futures."""
    outliving = [(3, 1, "overlapped", SOON), (2, 0, "ddp", {})]
    scenarios = [
        Scenario(
            world_size=n,
            options={"where": "training_step", "ranks": [rank], "mode": mode, "outlived": True, "bounds": bounds},
            own_options={rank: {"again": "outlives"}},
        )
        for n, rank, mode, bounds in outliving
    ]
    for (_, rank, mode, _), ranks in zip(outliving, run_together(nursery, scenarios, tmp_path), strict=True):
        says = f"Rank {rank} failed: ValueError: boom"
        check_end(ranks, failed=rank, code=0, says=says, clean=mode == "ddp")
        assert " threads=[] gated=0 groups=1" in ranks[rank].log


@pytest.mark.slow
def test_training_again_after_a_failure(nursery: Nursery, tmp_path: Path) -> None:
    together = Scenario(world_size=3, options={"where": "on_train_batch_end", "ranks": [0, 1, 2], "again": "fit"})
    alone = Scenario(
        world_size=2,
        options={"where": "training_step", "ranks": [0], "bounds": SOON},
        own_options={0: {"again": "fit", "native": 1.0}},
    )
    all_again, one_again = run_together(nursery, [together, alone], tmp_path)
    # All ranks fail alike and go on, as when a trial of a search is given up.
    assert [rank.code for rank in all_again] == [0, 0, 0], all_again[0].log
    assert all("AGAIN" in rank.log for rank in all_again)
    # One rank fails alone and goes on, alone, once it has waited for the others.
    check_end(one_again, failed=0, says="Rank 0 failed: ValueError: boom", clean=False)
    assert "RankFailedError: Rank 1 failed: it shows no sign of life" in one_again[0].log


@pytest.mark.slow
def test_a_checkpoint_may_take_its_time(nursery: Nursery, tmp_path: Path) -> None:
    # Rank 0 is writing for longer than a training thread has to come back when rank 1 fails.
    scenario = Scenario(
        world_size=2,
        options={
            "where": "on_save_checkpoint",
            "ranks": [1],
            "regular_checkpoint": str(tmp_path),
            "slow": 10.0,
            "bounds": {"patience": 9.0},
        },
    )
    ranks = run(nursery, scenario, tmp_path)
    check_end(ranks, failed=1, says="Rank 1 failed: ValueError: boom")
    assert "CHECKPOINT_WRITTEN" in ranks[0].log
    assert (tmp_path / "regular.ckpt").exists()


@pytest.mark.slow
def test_a_frozen_host_of_the_store_does_not_keep_a_failing_rank(nursery: Nursery, tmp_path: Path) -> None:
    scenario = Scenario(
        world_size=2,
        options={"where": "training_step", "ranks": [0, 1], "bounds": {"linger": 2.0, "goodbye": 5.0}},
        own_options={0: {"kind": "SIGSTOP"}},
    )
    frozen, failed = run(nursery, scenario, tmp_path, await_only=1)
    assert frozen.code is None  # killed by the test
    assert failed.code == 1
    assert "terminate called" not in failed.log
