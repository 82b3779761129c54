"""An emulated accelerator: layers that take a measured time and leave the processor free, as a GPU would.

Gradients are real and travel over the real network. A layer reads its weights before it computes, so that the gates of
a strategy are real too; what sleeps is only the arithmetic.

As on a GPU, whose work is queued ahead, a layer begins when the one before it has ended, even if this process wakes up
a little late; it begins later only where it had to: at the start of a pass, and after weights it had to wait for.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_bytescheduler.simulation import LayerProfile, ModelProfile

__all__ = ["Accelerator", "EmulatedModel", "scaled"]

_BYTES = 4
_PLAIN_READ_S = 5e-5  # reading a weight takes longer only if its gate was closed


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


class Accelerator:
    """Keeps the time of a device that does one thing after the other."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait_for_host(self) -> None:
        """What is computed next could not be queued before now."""
        self._free_at = max(self._free_at, time.perf_counter())

    def compute(self, seconds: float) -> None:
        """Return when ``seconds`` of work have ended that begin as soon as the device is free."""
        self._free_at += seconds
        left = self._free_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        asked = time.perf_counter()
        first = weight[0]  # here its gate opens
        if layer.first or time.perf_counter() - asked > _PLAIN_READ_S:
            layer.accelerator.wait_for_host()
        layer.accelerator.compute(layer.forward_seconds)
        return value + first

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        if layer.last:
            layer.accelerator.wait_for_host()
        layer.accelerator.compute(layer.backward_seconds)
        return gradients[0], layer.gradient, None


class EmulatedLayer(nn.Module):
    """One layer of a profile."""

    def __init__(self, profile: LayerProfile, accelerator: Accelerator, *, first: bool, last: bool) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.first = first
        self.last = last
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
        accelerator, end = Accelerator(), len(profile.layers) - 1
        self.layers = nn.Sequential(
            *(
                EmulatedLayer(layer, accelerator, first=position == 0, last=position == end)
                for position, layer in enumerate(profile.layers)
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0].requires_grad_()).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train_dataloader(self) -> Any:
        rows = torch.utils.data.TensorDataset(torch.zeros(4096, 4))
        return torch.utils.data.DataLoader(rows)
