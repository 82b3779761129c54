"""A rank that dies without a word is named by the others, whose processes end within ten seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run, run_together


@pytest.mark.parametrize(
    ("place", "kind", "code"),
    [("training_step", "exit", 1), ("sending", "SIGKILL", -9), ("validation_step", "SIGKILL", -9)],
)
def test_a_rank_that_is_gone_is_named(place: str, kind: str, code: int, nursery: Nursery, tmp_path: Path) -> None:
    scenarios = [Scenario(world_size=n, options={"where": place, "kind": kind, "ranks": [1]}) for n in (2, 3)]
    for ranks in run_together(nursery, scenarios, tmp_path):
        check_end(ranks, failed=1, code=code, says="Rank 1 failed: it shows no sign of life")


@pytest.mark.parametrize(("place", "kind", "code"), [("training_step", "exit", 1), ("sending", "SIGKILL", -9)])
def test_rank_zero_takes_the_store_with_it_and_is_named(
    place: str, kind: str, code: int, nursery: Nursery, tmp_path: Path
) -> None:
    scenarios = [Scenario(world_size=n, options={"where": place, "kind": kind, "ranks": [0]}) for n in (2, 3)]
    for ranks in run_together(nursery, scenarios, tmp_path):
        check_end(ranks, failed=0, code=code, says="Rank 0 failed: its process is gone", quiet=False)


@pytest.mark.parametrize(("failed", "says"), [(1, "Rank 1 failed: it shows no sign of life"), (0, "Rank 0 failed")])
def test_a_death_with_gradients_on_two_lanes(failed: int, says: str, nursery: Nursery, tmp_path: Path) -> None:
    """As over long round trips; each lane has connections and threads of its own."""
    options = {"where": "sending", "kind": "SIGKILL", "ranks": [failed], "far": True}
    ranks = run(nursery, Scenario(world_size=3, options=options), tmp_path)
    check_end(ranks, failed=failed, code=-9, says=says, quiet=failed != 0)


@pytest.mark.parametrize(("failed", "says"), [(1, "Rank 1 failed: it shows no sign of life"), (0, "Rank 0 failed")])
def test_a_death_while_credit_and_partition_are_tuned(failed: int, says: str, nursery: Nursery, tmp_path: Path) -> None:
    options = {
        "where": "training_step",
        "kind": "SIGKILL",
        "ranks": [failed],
        "step": 31,
        "steps": 300,
        "rows": 1000,
        "val_batches": 0,
        "tuner": {"trials": 15, "steps_per_trial": 6, "warm_up": 2},
    }
    ranks = run(nursery, Scenario(world_size=2, options=options), tmp_path)
    check_end(ranks, failed=failed, code=-9, says=says, quiet=failed != 0)
    trials, settled = re.findall(r"^STEP 30 TRIALS (\d+) SETTLED (\w+)$", ranks[0].log, re.MULTILINE)[0]
    assert int(trials) > 0, "values had been agreed on"
    assert settled == "False", "more of them were to come"
