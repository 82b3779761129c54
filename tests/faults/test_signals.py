"""Ctrl-C and SIGTERM, to one rank or to all."""

from __future__ import annotations

from pathlib import Path

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run, run_together

LONG = {"pause": 0.02, "steps": 1000}


def test_an_interrupt_of_one_rank_ends_all(nursery: Nursery, tmp_path: Path) -> None:
    options = {"where": "training_step", "kind": "SIGINT", "ranks": [1]}
    ranks = run(nursery, Scenario(world_size=3, options=options), tmp_path)
    check_end(ranks, failed=1, says="Rank 1 failed: KeyboardInterrupt")


def test_signals_to_all_ranks_end_all(nursery: Nursery, tmp_path: Path) -> None:
    scenarios = [
        Scenario(world_size=2, options={**LONG, "where": "training_step", "kind": kind, "ranks": [0, 1]})
        for kind in ("SIGINT", "SIGTERM")
    ]
    for code, ranks in zip((1, 143), run_together(nursery, scenarios, tmp_path), strict=True):
        check_end(ranks, failed=0, code=code, survivors_code=code, says="AFTER_FAILURE")
    # Lightning stops all ranks at a SIGTERM; none of them is to blame.
    assert all("failed" not in rank.log for rank in ranks)


def test_sigterm_to_one_rank_stops_all(nursery: Nursery, tmp_path: Path) -> None:
    options = {**LONG, "where": "training_step", "kind": "SIGTERM", "ranks": [1]}
    ranks = run(nursery, Scenario(world_size=3, options=options), tmp_path)
    check_end(ranks, failed=1, code=143, survivors_code=143, says="A SIGTERM")
    assert all(rank.log.count("ends training: exit code 143") == 1 and "failed" not in rank.log for rank in ranks)
