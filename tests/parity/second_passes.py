"""User code that adds to gradients, or changes them, while those of a backward pass still travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import Tower, Trained

__all__ = ["ADDS", "AddsPenalty", "PenalisedInBackward", "Smallest", "TwoLosses", "penalty"]


def penalty(module: nn.Module) -> Tensor:
    return 0.1 * torch.stack([p.pow(2).sum() for p in module.parameters()]).sum()


class Smallest(Trained):
    """Three layers, and a penalty that has a backward pass of its own."""

    def __init__(self, *, wide: int = 256, **arguments: Any) -> None:
        super().__init__(samples=64, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), **arguments)
        self.net = nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 4))

    def predict(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 4, generator=generator))
        return DataLoader(data, batch_size=self.batch_size)

    def on_after_backward(self) -> None:
        (0.1 * sum(p.pow(2).sum() for p in self.parameters())).backward()


class BeforeTheStep(Tower):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        penalty(self).backward()


class PenalisedInBackward(Tower):
    """As elastic weight consolidation is often written."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        penalty(self).backward()


class TwoLosses(Tower):
    """Two passes over one graph."""

    unsynchronised = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        predicted = self.predict(batch[0])
        self.parts = F.mse_loss(predicted, batch[1]), predicted.abs().mean()
        self.losses.append(self.parts[0].item())
        return self.parts[0] + self.parts[1]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        first, second = self.parts
        model: Any = self.trainer.model
        with model.no_sync() if self.unsynchronised else torch.enable_grad():
            first.backward(retain_graph=True)
        second.backward()


class TwoLossesOneUnsynchronised(TwoLosses):
    unsynchronised = True


class NamedInputs(Tower):
    """Two passes that name what they are for."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(inputs=list(self.parameters()))
        penalty(self).backward(inputs=list(self.first.parameters()))


class ThroughTheEngine(Tower):
    """A pass for gradients that are added by hand: only the adding is a write."""

    def on_after_backward(self) -> None:
        weights = list(self.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(penalty(self), weights), strict=True):
            weight.grad.add_(gradient)


class AddsPenalty(Callback):
    """In a callback, for a few layers only."""

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        penalty(module.layers if hasattr(module, "layers") else module).backward()


ADDS: Mapping[str, Callable[..., Trained]] = {
    "after-backward": Smallest,
    "before-step": BeforeTheStep,
    "in-backward": PenalisedInBackward,
    "two-losses": TwoLosses,
    "first-unsynchronised": TwoLossesOneUnsynchronised,
    "named-inputs": NamedInputs,
    "added-by-hand": ThroughTheEngine,
}
