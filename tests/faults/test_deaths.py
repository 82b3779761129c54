"""A rank that dies silently is named by the others, whose processes end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run, run_together
from tests.support.cases import cases

DEATHS = {
    "in steps and before them": [("sending", "SIGKILL", -9, 3), ("configure_model", "SIGKILL", -9, 2)],
    "elsewhere": [
        ("training_step", "exit", 1, 2),
        ("validation_step", "SIGKILL", -9, 2),
        ("configure_optimizers", "SIGKILL", -9, 2),
    ],
}


@pytest.mark.parametrize("deaths", cases(DEATHS, quick={"in steps and before them"}))
def test_a_rank_that_is_gone_is_named(
    nursery: Nursery, tmp_path: Path, deaths: list[tuple[str, str, int, int]]
) -> None:
    scenarios = [
        Scenario(
            world_size=n,
            options={"where": place, "kind": kind, "ranks": [1], "step": 0 if "configure" in place else 3},
        )
        for place, kind, _, n in deaths
    ]
    for (_, _, code, _), ranks in zip(deaths, run_together(nursery, scenarios, tmp_path), strict=True):
        check_end(ranks, failed=1, code=code, says="Rank 1 failed: it shows no sign of life")


def test_rank_zero_takes_the_store_with_it_and_is_named(nursery: Nursery, tmp_path: Path) -> None:
    options = {"where": "sending", "kind": "SIGKILL", "ranks": [0]}
    ranks = run(nursery, Scenario(world_size=3, options=options), tmp_path)
    check_end(ranks, failed=0, code=-9, says="Rank 0 failed: its process is gone", quiet=False)


@pytest.mark.slow
def test_a_death_with_gradients_on_two_lanes(nursery: Nursery, tmp_path: Path) -> None:
    """As over long round trips; each lane has connections and threads of its own."""
    options = {"where": "sending", "kind": "SIGKILL", "ranks": [1], "far": True}
    ranks = run(nursery, Scenario(world_size=3, options=options), tmp_path)
    check_end(ranks, failed=1, code=-9, says="Rank 1 failed: it shows no sign of life")


@pytest.mark.slow
def test_a_death_while_credit_and_partition_are_tuned(nursery: Nursery, tmp_path: Path) -> None:
    options = {
        "where": "training_step",
        "kind": "SIGKILL",
        "ranks": [1],
        "step": 31,
        "steps": 300,
        "rows": 1000,
        "val_batches": 0,
        "tuner": {"trials": 15, "steps_per_trial": 6},
    }
    ranks = run(nursery, Scenario(world_size=2, options=options), tmp_path)
    check_end(ranks, failed=1, code=-9, says="Rank 1 failed: it shows no sign of life")
    trials, settled = re.findall(r"^STEP 30 TRIALS (\d+) SETTLED (\w+)$", ranks[0].log, re.MULTILINE)[0]
    assert int(trials) > 0, "values had been agreed on"
    assert settled == "False", "more of them were to come"
