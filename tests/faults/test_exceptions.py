"""An exception on one rank, anywhere in a fit, ends every rank, and all name it."""

from __future__ import annotations

from pathlib import Path

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run, run_together

PLACES = [
    ("forward", 3, 0, 2),
    ("backward", 3, 1, 3),
    ("backward", 1, 0, 3),  # synchronised: DDP waits for the gradients
    ("on_train_batch_end", 3, 1, 2),
    ("validation_step", 3, 0, 2),
    ("setup", 0, 1, 2),
    ("configure_optimizers", 0, 2, 3),
]


def test_all_ranks_end_and_name_the_one_that_failed(nursery: Nursery, tmp_path: Path) -> None:
    scenarios = [
        Scenario(world_size=world_size, options={"where": place, "step": step, "ranks": [rank]})
        for place, step, rank, world_size in PLACES
    ]
    for (_, _, rank, _), ranks in zip(PLACES, run_together(nursery, scenarios, tmp_path), strict=True):
        check_end(ranks, failed=rank, says=f"Rank {rank} failed: ValueError: boom")
        assert "ValueError: boom" in ranks[rank].log
        assert " threads=[] gated=0 groups=1" in ranks[rank].log


def test_a_failure_on_a_scheduler_thread_is_published_while_the_training_thread_waits_elsewhere(
    nursery: Nursery, tmp_path: Path
) -> None:
    # The dispatcher of one rank stops. Its training thread is still in torch, and the others wait for its gradients.
    options = {"where": "sending", "kind": "order", "pause": 0.05, "ranks": [2]}
    ranks = run(nursery, Scenario(world_size=3, options=options), tmp_path)
    check_end(ranks, failed=2, says="Rank 2 failed: LaunchOrderError: the ranks run different")


def test_ranks_with_different_models_end_in_setup(nursery: Nursery, tmp_path: Path) -> None:
    scenarios = [
        Scenario(world_size=2, options={}, own_options={1: {"width": 48}}),
        Scenario(world_size=2, options={"frozen": True}, own_options={1: {"frozen": False}}),
    ]
    for ranks in run_together(nursery, scenarios, tmp_path):
        for rank in ranks:
            assert rank.code == 1, rank.log
            assert "RanksDifferError: The ranks are not in the same training: trained model is " in rank.log, rank.log
            assert " threads=[] gated=0 groups=1" in rank.log, rank.log
