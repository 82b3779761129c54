"""Optimizers that come neither with torch nor with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import schedulefree
import torch
from lightning.pytorch import Callback
from lion_pytorch import Lion
from prodigyopt import Prodigy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

__all__ = ["OPTIMIZERS", "SwitchesMode", "adamw", "one_cycle", "warm_up"]


def adamw(parameters: Iterable[Any]) -> Optimizer:
    """Without weight decay for what is not a matrix, as language models are trained."""
    trained = [p for p in parameters if p.requires_grad]
    return AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.003,
    )


def warm_up(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * 0.98**step)


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.01, total_steps=20)


def _schedule_free_adamw(parameters: Iterable[Any]) -> Optimizer:
    return schedulefree.AdamWScheduleFree(parameters, lr=0.01, warmup_steps=3)


def _schedule_free_sgd(parameters: Iterable[Any]) -> Optimizer:
    return schedulefree.SGDScheduleFree(parameters, lr=0.05)


def _lion(parameters: Iterable[Any]) -> Optimizer:
    return Lion(parameters, lr=0.001, weight_decay=0.01)


def _prodigy(parameters: Iterable[Any]) -> Optimizer:
    return Prodigy(parameters, lr=1.0, d0=1e-4, weight_decay=0.01)


def _muon(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)


OPTIMIZERS: Mapping[str, Callable[[Iterable[Any]], Optimizer]] = {
    "schedule-free AdamW": _schedule_free_adamw,
    "schedule-free SGD": _schedule_free_sgd,
    "Lion": _lion,
    "Prodigy": _prodigy,
    "Muon": _muon,
}


class SwitchesMode(Callback):
    """Tells a schedule-free optimizer which weights it is to show: those of training, or their average."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._switch(trainer, "train")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._switch(trainer, "eval")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._switch(trainer, "train")

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self._switch(trainer, "eval")
        checkpoint["averaged"] = {name: value.clone() for name, value in module.state_dict().items()}
        self._switch(trainer, "train")

    @staticmethod
    def _switch(trainer: Any, mode: str) -> None:
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, mode):
                getattr(optimizer, mode)()
