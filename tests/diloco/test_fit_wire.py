"""Fragments, overlap, wire formats and batch sizes."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bytescheduler.diloco.round_record import read_rounds
from tests.diloco.fits import Result, SixOrTwo, calm_tower, fit_diloco, plain_sgd
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

SMALL_PARTS = 300


def same_weights(results: list[Result]) -> bool:
    first = results[0].weights
    return all(torch.equal(result.weights[name], value) for result in results for name, value in first.items())


@pytest.mark.parametrize(
    ("wire_dtype", "fragments", "overlap_steps"),
    [
        ("bf16", 3, 0),
        ("int8", 1, 2),
        ("sparse", 3, 2),
        ("int4", 1, 1),
    ],
)
def test_all_workers_hold_the_same_bits(
    wire_dtype: str, fragments: int, overlap_steps: int, diloco_ranks: RankPool, tmp_path: Path
) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={
            "inner_steps": 4,
            "wire_dtype": wire_dtype,
            "fragments": fragments,
            "overlap_steps": overlap_steps,
        },
        part=SMALL_PARTS,
        model=calm_tower,
        pauses={1: 0.003},
        max_steps=14,
        default_root_dir=str(tmp_path),
    )
    assert same_weights(results)
    assert all(math.isfinite(loss) for result in results for loss in result.losses)
    assert max(result.global_step for result in results) == 14


class LongForward(Tower):
    """Its forward pass, in which Lightning has another default dtype, takes most of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("wire_dtype", "precision"), [("fp32", "64-true"), ("int8", "bf16-true"), ("sparse", "bf16-true")]
)
def test_a_precision_that_changes_the_default_dtype(
    wire_dtype: str, precision: str, diloco_ranks: RankPool, tmp_path: Path
) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={"inner_steps": 4, "wire_dtype": wire_dtype, "overlap_steps": 2},
        part=SMALL_PARTS,
        model=partial(LongForward, optimizer=plain_sgd, dropout=0.0),
        max_steps=12,
        precision=precision,
        default_root_dir=str(tmp_path),
    )
    assert same_weights(results)
    assert all(math.isfinite(loss) for result in results for loss in result.losses)


def test_epochs_and_validations_with_overlap(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={"inner_steps": 3, "fragments": 2, "overlap_steps": 2},
        model=calm_tower,
        pauses={1: 0.004},
        max_epochs=2,
        limit_val_batches=2,
        val_check_interval=5,
        default_root_dir=str(tmp_path),
    )
    assert same_weights(results)
    assert [result.epoch for result in results] == [2, 2]
    assert results[0].metrics["validation_loss"] == results[1].metrics["validation_loss"]


def test_each_worker_has_its_batch_size_and_its_weight(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={"inner_steps": 4, "equal_steps": True, "outer_steps": 2},
        model=SixOrTwo,
        default_root_dir=str(tmp_path),
    )
    rounds = read_rounds(tmp_path / "rounds.jsonl")
    assert [{w.worker: w.samples for w in one.workers} for one in rounds] == 2 * [{"worker0": 24, "worker1": 8}]
    assert [result.samples for result in results] == [48, 16]
    assert same_weights(results)
