"""A rank of a node that adds up gradients dies or fails, anywhere: all others end in time, and name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ranks import Nursery
from tests.faults.scenario import Scenario, check_end, run


@pytest.mark.parametrize(
    ("servers", "failed", "where", "kind"),
    [
        pytest.param(0, 3, "sending", "SIGKILL", id="killed while it sends; ranks are servers", marks=pytest.mark.slow),
        pytest.param(1, 2, "adding up", "SIGKILL", id="killed while it adds up; one server"),
        pytest.param(1, 1, "adding up", "raise", id="an error while it adds up", marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_a_node_is_named_on_all(
    servers: int, failed: int, where: str, kind: str, nursery: Nursery, tmp_path: Path
) -> None:
    options = {
        "where": where,
        "kind": kind,
        "ranks": [failed],
        "nodes": 2,
        "served": {"servers": {"group": "node", "spare": servers}},
    }
    ranks = run(nursery, Scenario(world_size=4, options=options), tmp_path)
    killed = kind == "SIGKILL"
    says = f"Rank {failed} failed: it shows no sign of life" if killed else "boom"
    check_end(ranks, failed=failed, code=-9 if killed else 1, says=says, quiet=False)
