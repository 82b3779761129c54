"""Fits on numbered samples, by a model that remembers which it was trained on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_bytescheduler import SliceDataModule

ROW = 8  # bytes


def make_rows(folder: Path, counts: Iterable[int]) -> str:
    """Files of rows, a slice each, that count on from 0; returns what is opened."""
    first = 0
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(counts):
        np.save(folder / f"rows-{number:03}.npy", np.arange(first, first + count, dtype=np.float64).reshape(-1, 1))
        first += count
    return f"{folder}/*.npy"


class Remembers(LightningModule):
    """One weight; ``batches`` are the samples of each step, and ``seen`` those of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[int]] = []
        self.seen: list[int] = []
        self.on_step: Callable[[int], None] = lambda step: None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.batches.append([int(number) for number in batch.flatten()])
        self.on_step(len(self.batches))
        return self.layer(batch.float() * 1e-4).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Decays(Remembers):
    """And halves its learning rate after each epoch; ``rates`` are those at the beginning of each."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Evaluates(Decays):
    """And has the other steps; by itself, as Lightning warns of one without data."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.seen += [int(number) for number in batch.flatten()]

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> list[int]:
        return [int(number) for number in batch.flatten()]


def trainer_for(callbacks: list[Callback] | None = None, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": callbacks or [],
            **options,
        }
    )


def fit(
    data: SliceDataModule,
    *,
    model: Remembers | None = None,
    resume: str | None = None,
    callbacks: list[Callback] | None = None,
    **options: Any,
) -> Remembers:
    """One process."""
    model = model or Remembers()
    trainer_for(callbacks, **options).fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    return model


class SaveEveryStep(Callback):
    """Saves at the end of each batch, as ``ModelCheckpoint(every_n_train_steps=1)`` does."""

    def __init__(self, folder: str, *, at: str = "on_train_batch_end") -> None:
        self.folder = folder
        self.saved: list[str] = []
        setattr(self, at, self._save)

    def _save(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.sanity_checking:
            return
        path = f"{self.folder}/{len(self.saved)}-step-{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append(path)


def fit_rank(
    rank: int,
    *,
    options: dict[str, Any],
    trainer: dict[str, Any],
    resume: str | None = None,
    save_to: str | None = None,
) -> tuple[list[list[int]], list[int], int]:
    """On a rank of a pool; returns the batches, what was validated, and the steps that Lightning expected."""
    rank_zero_only.rank = rank
    model = Evaluates() if "val" in options else Remembers()
    its = trainer_for(**{"devices": int(os.environ["LOCAL_WORLD_SIZE"]), **trainer})
    its.fit(model, datamodule=SliceDataModule(**options), ckpt_path=resume, weights_only=True)
    if save_to is not None:
        its.save_checkpoint(save_to)
    return model.batches, model.seen, int(its.num_training_batches)
