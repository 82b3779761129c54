"""Validation without training, parameters that are unfrozen, epoch-wise schedules, logged progress."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from tests.diloco.fits import FAST_AND_SLOW, Measured, calm_tower, diloco_trainer, fit_diloco, plain_sgd
from tests.support.models import Tower
from tests.support.rank_pool import RankPool, RanksFailed


def validate(rank: int, folder: str) -> dict[str, float]:
    trainer = diloco_trainer(rank, limit_val_batches=1.0, default_root_dir=folder)
    trainer.validate(Measured(optimizer=plain_sgd), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_validation_alone_is_over_all_workers(diloco_ranks: RankPool, tmp_path: Path) -> None:
    first, second = diloco_ranks.run(validate, folder=str(tmp_path))
    assert first["of_metric"] == second["of_metric"] == pytest.approx(1.5)
    assert first["of_number"] == second["of_number"] == pytest.approx(1.5)


class Unfreezes(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            pl_module.first.weight.requires_grad_(True)


class Frozen(Tower):
    def __init__(self) -> None:
        super().__init__(optimizer=plain_sgd)
        self.first.weight.requires_grad_(False)


def test_what_is_unfrozen_later_is_refused(diloco_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"'first\.weight' requires gradients now"):
        diloco_ranks.run(
            fit_diloco,
            options={"inner_steps": 4},
            model=Frozen,
            callbacks=(Unfreezes,),
            max_steps=12,
            default_root_dir=str(tmp_path),
        )


class Other(Tower):
    def __init__(self) -> None:
        import os

        super().__init__(optimizer=plain_sgd, depth=2 + int(os.environ["RANK"]))


def test_workers_need_the_same_model(diloco_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"trained model is .* on rank 0 .*, but .* on rank 1"):
        diloco_ranks.run(
            fit_diloco, options={"inner_steps": 4}, model=Other, max_steps=4, default_root_dir=str(tmp_path)
        )


class EpochSchedule(Tower):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": StepLR(optimizer, step_size=1, gamma=0.5), "interval": "epoch"}]

    def on_train_end(self) -> None:
        self.notes.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_schedules_by_epochs_agree(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={"inner_steps": 4},
        model=EpochSchedule,
        pauses=FAST_AND_SLOW,
        max_epochs=3,
        accumulate_grad_batches=3,
        default_root_dir=str(tmp_path),
    )
    assert [result.notes for result in results] == [[0.01 / 8], [0.01 / 8]]
    for name, value in results[0].weights.items():
        assert torch.equal(value, results[1].weights[name])


def test_progress_is_logged(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={"inner_steps": 4, "equal_steps": True, "outer_steps": 4},
        model=partial(calm_tower, samples=256),
        pauses=FAST_AND_SLOW,
        log_every_n_steps=2,
        default_root_dir=str(tmp_path),
    )
    for result in results:
        assert result.metrics["diloco/round"] == 4
        assert result.metrics["diloco/loss"] > 0
        assert result.metrics["diloco/samples_per_second"] > 0
