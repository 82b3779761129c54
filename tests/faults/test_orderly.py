"""Nothing is left of a fit that ends in order, whichever rank leaves first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, run_together

CLEAN = "threads=[] gated=0 groups=1"


def test_nothing_is_left_after_fit_fit_again_and_validate(nursery: Nursery, tmp_path: Path) -> None:
    scenarios = [
        Scenario(world_size=2, options={"fits": 2, "validate": True, "steps": 5}),
        Scenario(world_size=3, options={"fits": 1, "validate": True, "steps": 5, "cross_barrier": False}),
    ]
    for fits, ranks in zip((2, 1), run_together(nursery, scenarios, tmp_path), strict=True):
        for rank in ranks:
            assert rank.code == 0, rank.log
            ends = [line for line in rank.log.splitlines() if line.startswith("AFTER_")]
            assert len(ends) == fits + 1, rank.log
            assert all(line.endswith(CLEAN) for line in ends), rank.log
            assert "failed" not in rank.log
            assert "[c10d]" not in rank.log


@pytest.mark.slow
def test_a_rank_may_come_to_the_end_much_later(nursery: Nursery, tmp_path: Path) -> None:
    # Longer than threads have to stop: rank 0 still writes something, or another rank does, for which rank 0 waits.
    options = {"where": "on_train_end", "kind": "pause", "steps": 4}
    scenarios = [
        Scenario(world_size=3, options={**options, "ranks": [rank], "bounds": {"linger": 2.0}}) for rank in (0, 1)
    ]
    for ranks in run_together(nursery, scenarios, tmp_path):
        for rank in ranks:
            assert rank.code == 0, rank.log
            assert f" {CLEAN}" in rank.log, rank.log
            assert "failed" not in rank.log
            assert "[c10d]" not in rank.log
