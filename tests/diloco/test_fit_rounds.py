"""Two workers, launched together: rounds, what ends them, and what they end with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_bytescheduler.diloco.round_record import read_rounds
from tests.diloco.fits import FAST_AND_SLOW, Result, calm_tower, fit_diloco
from tests.support.rank_pool import RankPool


def assert_same_weights(results: list[Result]) -> None:
    for result in results[1:]:
        assert list(result.weights) == list(results[0].weights)
        for name, value in result.weights.items():
            assert torch.equal(value, results[0].weights[name]), name


def test_workers_end_with_the_same_weights(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        # Not max_steps=12, which ends the other worker wherever it is when the first one gets there.
        options={"inner_steps": 4, "equal_steps": True, "outer_steps": 3},
        model=calm_tower,
        default_root_dir=str(tmp_path),
    )
    assert_same_weights(results)
    assert [result.global_step for result in results] == [12, 12]
    rounds = read_rounds(tmp_path / "rounds.jsonl")
    assert [one.samples for one in rounds] == [32, 32, 32]


def test_a_slow_worker_takes_fewer_steps(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={"samples_per_round": 64, "outer_steps": 4},
        model=partial(calm_tower, samples=4096),
        paces={0: 0.01, 1: 0.03},
        default_root_dir=str(tmp_path),
    )
    assert_same_weights(results)
    rounds = read_rounds(tmp_path / "rounds.jsonl")
    assert len(rounds) == 4
    for one in rounds:
        assert set(one.merged) == {"worker0", "worker1"}
        assert one.samples >= 64
    steps = [
        sum(worker.steps for one in rounds for worker in one.workers if worker.worker == f"worker{k}") for k in (0, 1)
    ]
    assert [result.global_step for result in results] == steps
    assert steps[0] > steps[1]


@pytest.mark.parametrize(
    ("limits", "overlap_steps", "steps"),
    [
        ({"max_steps": 10}, 0, 10),
        ({"max_steps": 10}, 3, 10),
        ({"max_epochs": 2}, 0, 2 * 16),
    ],
)
def test_with_equal_steps_no_worker_is_left_behind_at_the_end(
    limits: dict[str, int], overlap_steps: int, steps: int, diloco_ranks: RankPool, tmp_path: Path
) -> None:
    """The fast worker is in the middle of a round when it gets there, and the slow one steps behind it."""
    results = diloco_ranks.run(
        fit_diloco,
        options={"inner_steps": 7, "equal_steps": True, "overlap_steps": overlap_steps},
        model=calm_tower,
        pauses=FAST_AND_SLOW,
        default_root_dir=str(tmp_path),
        **limits,
    )
    assert_same_weights(results)
    assert [result.global_step for result in results] == [steps, steps]
    assert [result.samples for result in results] == [4 * steps, 4 * steps]
