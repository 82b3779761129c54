"""What looks at the weights, or averages them, while these models train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor

__all__ = ["AveragesAsDiffusers", "NotesCheckpoints", "average"]


def average() -> Callback:
    """Lightning's own moving average."""
    return WeightAveraging(avg_fn=_moving)


def _moving(averaged: Tensor, current: Tensor, count: Any) -> Tensor:
    return averaged * 0.9 + current * 0.1


class AveragesAsDiffusers(Callback):
    """The moving average of diffusers' own training scripts; validation sees it instead of the weights."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.averaged = EMAModel(module.network.parameters(), decay=0.9)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.averaged.step(module.network.parameters())

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.averaged.store(module.network.parameters())
        self.averaged.copy_to(module.network.parameters())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.averaged.restore(module.network.parameters())

    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.notes.append([value.clone() for value in self.averaged.shadow_params])


class NotesCheckpoints(ModelCheckpoint):
    """Saves every third step, and notes at the end what is in the files.

    Args:
        folder: For the checkpoints, a folder for each strategy.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        assert self.dirpath is not None
        self.dirpath = str(Path(self.dirpath, type(trainer.strategy).__name__))
        super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        trainer.strategy.barrier()  # written by one rank, read by all
        for step in (3, 6):
            saved = torch.load(Path(str(self.dirpath), f"step={step}.ckpt"), weights_only=False)
            parts = ("state_dict", "optimizer_states", "lr_schedulers", "averaged", "averaging_state")
            pl_module.notes.append({part: saved[part] for part in parts if part in saved})
