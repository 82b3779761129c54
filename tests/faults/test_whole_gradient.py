"""Failures while gradients travel as messages between pairs of ranks, which gloo cannot call off (norm clipping)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run, run_together

CLIP = {"clip": 0.1}


@pytest.mark.slow
def test_an_exception_ends_all_ranks(nursery: Nursery, tmp_path: Path) -> None:
    failing = [("backward", 3, 1), ("on_before_optimizer_step", 2, 0), ("on_train_batch_end", 2, 1)]
    scenarios = [Scenario(world_size=n, options={**CLIP, "where": where, "ranks": [r]}) for where, n, r in failing]
    for (_, _, rank), ranks in zip(failing, run_together(nursery, scenarios, tmp_path), strict=True):
        check_end(ranks, failed=rank, says=f"Rank {rank} failed: ValueError: boom")


@pytest.mark.slow
def test_a_failure_in_mid_communication_ends_all_ranks(nursery: Nursery, tmp_path: Path) -> None:
    options = {**CLIP, "where": "sending", "pause": 0.05}
    killed = Scenario(world_size=3, options={**options, "kind": "SIGKILL", "ranks": [1]})
    raising = Scenario(world_size=3, options={**options, "kind": "order", "ranks": [2]})
    ranks, others = run_together(nursery, [killed, raising], tmp_path)
    check_end(ranks, failed=1, code=-9, says="Rank 1 failed: it shows no sign of life")
    check_end(others, failed=2, says="Rank 2 failed: LaunchOrderError: the ranks run different")


@pytest.mark.slow
def test_a_rank_that_never_comes_back_ends_all_after_the_timeout(nursery: Nursery, tmp_path: Path) -> None:
    options = {
        **CLIP,
        "where": "on_train_batch_end",
        "kind": "sleep",
        "timeout": 5.0,
        "ranks": [1],
        "bounds": {"patience": 2.0},
    }
    ranks = run(nursery, Scenario(world_size=3, options=options), tmp_path)
    check_end(ranks, failed=1, says="SchedulerTimeoutError: ", clean=False)
