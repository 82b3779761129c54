"""An emulated accelerator: layers that take a measured time and leave the processor free, as a GPU would.

Gradients are real and travel over the real network. A layer reads its weights before it computes, so that the gates of
a strategy are real too; what sleeps is only the arithmetic.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_bytescheduler.simulation import LayerProfile, ModelProfile

__all__ = ["EmulatedModel", "scaled"]

_BYTES = 4


def scaled(profile: ModelProfile, *, parameter_bytes: int, compute_seconds: float) -> ModelProfile:
    """The shape of ``profile`` with other totals; layers keep their shares of bytes and times."""
    share = parameter_bytes / profile.parameter_bytes
    layers = tuple(
        LayerProfile(
            name=layer.name,
            parameter_bytes=max(_BYTES, round(layer.parameter_bytes * share / _BYTES) * _BYTES),
            forward_seconds=layer.forward_seconds,
            backward_seconds=layer.backward_seconds,
        )
        for layer in profile.layers
    )
    return ModelProfile(name=profile.name, layers=layers).scaled_to(compute_seconds)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        first = weight[0]  # here its gate opens
        time.sleep(layer.forward_seconds)
        return value + first

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.layer.backward_seconds)
        return gradients[0], ctx.layer.gradient, None


class EmulatedLayer(nn.Module):
    """One layer of a profile."""

    def __init__(self, profile: LayerProfile) -> None:
        super().__init__()
        count = profile.parameter_bytes // _BYTES
        self.weight = nn.Parameter(torch.zeros(count))
        self.gradient = torch.full((count,), 1e-3)
        self.forward_seconds = profile.forward_seconds
        self.backward_seconds = profile.backward_seconds

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = _Compute.apply(value, self.weight, self)
        return output


class EmulatedModel(L.LightningModule):
    """A model of the profile's shape, trained by SGD with momentum."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(EmulatedLayer(layer) for layer in profile.layers))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0].requires_grad_()).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train_dataloader(self) -> Any:
        rows = torch.utils.data.TensorDataset(torch.zeros(4096, 4))
        return torch.utils.data.DataLoader(rows)
