"""Ranks that stop taking part without failing."""

from __future__ import annotations

from pathlib import Path

from tests.faults.ranks import Nursery
from tests.faults.scenario import BOUND_S, Scenario, check_end, run, run_together

TIMEOUT_S = 3.0


def test_a_rank_that_never_comes_back_ends_all_after_the_timeout(nursery: Nursery, tmp_path: Path) -> None:
    options = {"where": "training_step", "kind": "sleep", "timeout": TIMEOUT_S}
    scenarios = [Scenario(world_size=n, options={**options, "ranks": [rank]}) for n, rank in ((3, 1), (2, 0))]
    for rank, ranks in zip((1, 0), run_together(nursery, scenarios, tmp_path), strict=True):
        # Lightning's broadcast at the start of each batch may use up one timeout, and hides that it did.
        check_end(ranks, failed=rank, says="bucket", bound=2 * TIMEOUT_S + BOUND_S, clean=False)
        start = ranks[rank].stamp("FAILED_AT") or 0.0
        survivors = [each for number, each in enumerate(ranks) if number != rank]
        for survivor in survivors:
            raised = survivor.stamp("AFTER_FAILURE")
            assert raised is not None, survivor.log
            assert raised - start < 2 * TIMEOUT_S + 4.0, survivor.log
        assert any(
            "SchedulerTimeoutError: " in each.log and f"rank {rank}: in training_step, step 3" in each.log
            for each in survivors
        )
        # And the one that sleeps is told before it is ended.
        assert "did not come back within 5 s, so its process is ended. It was at:" in ranks[rank].log
        assert "time.sleep" in ranks[rank].log


def test_survivors_end_although_the_failed_process_lives_on(nursery: Nursery, tmp_path: Path) -> None:
    scenarios = [
        Scenario(
            world_size=n, options={"where": "training_step", "ranks": [rank]}, own_options={rank: {"again": "sleep"}}
        )
        for n, rank in ((2, 0), (3, 1))
    ]
    for rank, ranks in zip((0, 1), run_together(nursery, scenarios, tmp_path), strict=True):
        check_end(ranks, failed=rank, code=0, bound=40.0, says=f"Rank {rank} failed: ValueError: boom", clean=False)
        start = ranks[rank].stamp("FAILED_AT") or 0.0
        assert all(each.ended - start < BOUND_S for number, each in enumerate(ranks) if number != rank)
        assert " threads=[] gated=0 groups=1" in ranks[rank].log


def test_a_rank_in_a_step_as_ddps_is_woken_too(nursery: Nursery, tmp_path: Path) -> None:
    # It waits inside of torch, for futures.
    options = {"where": "training_step", "ranks": [0], "mode": "ddp"}
    ranks = run(nursery, Scenario(world_size=2, options=options, own_options={0: {"again": "sleep"}}), tmp_path)
    check_end(ranks, failed=0, code=0, bound=40.0, says="Rank 0 failed: ValueError: boom")
    assert ranks[1].ended - (ranks[0].stamp("FAILED_AT") or 0.0) < BOUND_S


def test_training_again_after_a_failure(nursery: Nursery, tmp_path: Path) -> None:
    together = Scenario(world_size=3, options={"where": "on_train_batch_end", "ranks": [0, 1, 2], "again": "fit"})
    alone = Scenario(world_size=2, options={"where": "training_step", "ranks": [0]}, own_options={0: {"again": "fit"}})
    all_again, one_again = run_together(nursery, [together, alone], tmp_path)
    # All ranks fail alike and go on, as when a trial of a search is given up.
    assert [rank.code for rank in all_again] == [0, 0, 0], all_again[0].log
    assert all("AGAIN" in rank.log for rank in all_again)
    # One rank fails alone and goes on, alone.
    # After 8 seconds of waiting for the others.
    check_end(one_again, failed=0, says="Rank 0 failed: ValueError: boom", bound=BOUND_S + 8.0, clean=False)
    assert "Rank 1 failed: it does not train again after this: Rank 0 failed: ValueError: boom" in one_again[0].log


def test_a_checkpoint_may_take_its_time(nursery: Nursery, tmp_path: Path) -> None:
    # Rank 0 is writing for longer than a training thread has to come back when rank 1 fails.
    scenario = Scenario(
        world_size=2,
        options={"where": "on_save_checkpoint", "ranks": [1], "regular_checkpoint": str(tmp_path), "slow": 6.0},
    )
    ranks = run(nursery, scenario, tmp_path)
    check_end(ranks, failed=1, says="Rank 1 failed: ValueError: boom", bound=BOUND_S + 6.0)
    assert "CHECKPOINT_WRITTEN" in ranks[0].log
    assert (tmp_path / "regular.ckpt").exists()


def test_a_frozen_host_of_the_store_does_not_keep_a_failing_rank(nursery: Nursery, tmp_path: Path) -> None:
    scenario = Scenario(
        world_size=2,
        options={"where": "training_step", "ranks": [0, 1]},
        own_options={0: {"kind": "SIGSTOP"}},
    )
    frozen, failed = run(nursery, scenario, tmp_path, timeout=30.0, await_only=1)
    assert frozen.code is None  # killed by the test
    assert failed.code == 1
    # It gives the frozen one seconds to answer, several times.
    assert failed.ended - (failed.stamp("FAILED_AT") or 0.0) < 2 * BOUND_S, failed.log
    assert "terminate called" not in failed.log
