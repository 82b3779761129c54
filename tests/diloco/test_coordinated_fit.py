"""Trainers that are workers of a coordinator: the same training as that of ranks launched together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bytescheduler.coordinator.server import CoordinatorServer
from tests.diloco.coordinated_fits import coordinator_options, fit_coordinated, fit_together
from tests.diloco.fits import Result
from tests.support.rank_pool import RankPool


def assert_equal(one: Result, other: Result) -> None:
    assert list(one.weights) == list(other.weights)
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {"wire_dtype": "fp32"},
        {"wire_dtype": "bf16", "fragments": 2, "overlap_steps": 1},
    ],
    ids=["fp32", "bf16"],
)
def test_it_has_the_bits_of_workers_launched_together(
    options: dict[str, Any], diloco_ranks: RankPool, tmp_path: Path
) -> None:
    options = {"inner_steps": 4, "equal_steps": True, "outer_steps": 4, **options}
    together = diloco_ranks.run(fit_together, options=options, default_root_dir=str(tmp_path))
    with CoordinatorServer(coordinator_options(rounds={"start_workers": 2}, **options)) as server:
        workers = diloco_ranks.run(fit_coordinated, url=server.url, default_root_dir=str(tmp_path), timeout=60.0)
        assert server.status().weights_version == 4
    for worker in workers:
        assert_equal(worker, together[0])
    assert [worker.global_step for worker in workers] == [one.global_step for one in together] == [16, 16]
    assert [worker.losses for worker in workers] == [one.losses for one in together]
