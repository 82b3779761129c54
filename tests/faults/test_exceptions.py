"""An exception on one rank, anywhere in a fit, ends every rank within ten seconds, and all name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run_together

IN_SETUP = ("setup", "configure_model", "configure_optimizers")


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("training_step", 3),
        ("forward", 3),
        ("backward", 3),
        ("backward", 1),  # synchronised: DDP waits for the gradients
        ("on_before_optimizer_step", 3),
        ("on_train_batch_end", 3),
        ("validation_step", 3),
        *((place, 0) for place in IN_SETUP),
    ],
)
def test_all_ranks_end_and_name_the_one_that_failed(place: str, step: int, nursery: Nursery, tmp_path: Path) -> None:
    failing = [(2, 0), (3, 1 if step else 2)]
    scenarios = [
        Scenario(world_size=world_size, options={"where": place, "step": step, "ranks": [rank]})
        for world_size, rank in failing
    ]
    for (_, rank), ranks in zip(failing, run_together(nursery, scenarios, tmp_path), strict=True):
        check_end(ranks, failed=rank, says=f"Rank {rank} failed: ValueError: boom")
        assert "ValueError: boom" in ranks[rank].log
        assert " threads=[] gated=0 groups=1" in ranks[rank].log


def test_a_failure_on_a_scheduler_thread_is_published_while_the_training_thread_waits_elsewhere(
    nursery: Nursery, tmp_path: Path
) -> None:
    # The dispatcher of one rank stops. Its training thread is still in torch, and the others wait for its gradients.
    options = {"where": "sending", "kind": "order", "pause": 0.05}
    scenarios = [Scenario(world_size=n, options={**options, "ranks": [n - 1]}) for n in (2, 3)]
    for ranks in run_together(nursery, scenarios, tmp_path):
        failed = len(ranks) - 1
        check_end(ranks, failed=failed, says=f"Rank {failed} failed: LaunchOrderError: the ranks run different")


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
        assert abs(ranks[0].ended - ranks[1].ended) < 10.0
