"""An emulated accelerator: layers that take a measured time and leave the processor free, as a GPU would.

Gradients are real and travel over the real network. A layer reads its weights before it computes, so that the gates of
a strategy are real too; only the arithmetic is replaced by a sleep.

As on a GPU, work is queued ahead: while a layer computes in the forward pass, this process prepares the next one (waits
for its weights, steps them), which begins when both are done. In the backward pass, where a gradient has to be there
before it is sent, this process waits for the end of each layer. If it wakes up a little late, no layer becomes late.

An accelerator that does *not* run ahead is a plain sleep in each layer on the training thread, as if the processor
itself computed: that thread's other work, and its late waking, add to the time.

*Raw kernels* are layers whose weights only a custom ``torch.autograd.Function`` gets, which takes their memory as
extensions do: no PyTorch function touches them.

Layers with *statistics* have the buffers of so many batch normalizations, which change in each forward pass.
"""

from __future__ import annotations

import math
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_bytescheduler.predicting.profiles import LayerProfile, ModelProfile

__all__ = ["Accelerator", "EmulatedModel", "scaled"]

_BYTES = 4
_CHANNELS = 512  # of a batch normalization
_MATRIX = 4096  # layers with at least so many numbers have a matrix, as near to a square as can be


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
    """Keeps the time of a device that does one thing after the other; if it runs ahead, work is queued for it."""

    def __init__(self, *, runs_ahead: bool = True) -> None:
        self.runs_ahead = runs_ahead
        self._free_at = 0.0

    def begin(self, seconds: float) -> None:
        """Ask for ``seconds`` of work. Return when it has begun or, without running ahead, when it has ended."""
        begins = max(self._free_at, time.perf_counter()) if self.runs_ahead else time.perf_counter()
        self._free_at = begins + seconds
        self._sleep_until(begins if self.runs_ahead else self._free_at)

    def finish(self, seconds: float, *, asked_before: bool) -> None:
        """Return when ``seconds`` of work have ended, asked for now or, if ``asked_before``, queued earlier."""
        asked_before = asked_before and self.runs_ahead
        begins = self._free_at if asked_before else max(self._free_at, time.perf_counter())
        self._free_at = begins + seconds
        self._sleep_until(self._free_at)

    def _sleep_until(self, moment: float) -> None:
        left = moment - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        if layer.raw:
            with torch._C.DisableTorchFunctionSubclass():  # as a kernel that takes its memory
                first = weight.view(-1)[0]
        else:
            first = weight.view(-1)[0]  # here its gate opens
        layer.accelerator.begin(layer.forward_seconds)
        return value + first

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        layer.accelerator.finish(layer.backward_seconds, asked_before=not layer.last)
        if layer.gradient.dtype is not layer.weight.dtype:  # Lightning has converted the weights since
            layer.gradient = layer.gradient.to(layer.weight.dtype)
        return gradients[0], layer.gradient, None


class EmulatedLayer(nn.Module):
    """One layer of a profile."""

    def __init__(
        self, profile: LayerProfile, device: Accelerator, *, last: bool, raw: bool = False, statistics: int = 0
    ) -> None:
        super().__init__()
        for number in range(statistics):
            self.register_buffer(f"running_mean{number}", torch.zeros(_CHANNELS))
            self.register_buffer(f"running_var{number}", torch.ones(_CHANNELS))
            self.register_buffer(f"num_batches_tracked{number}", torch.tensor(0))
        self.raw = raw
        self.accelerator = device
        self.last = last
        count = profile.parameter_bytes // _BYTES
        rows = math.isqrt(count) if count >= _MATRIX else 1
        shape = (rows, count // rows) if rows > 1 else (count,)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.gradient = 1e-3 * torch.randn(shape)
        self.forward_seconds = profile.forward_seconds
        self.backward_seconds = profile.backward_seconds

    def forward(self, value: Tensor) -> Tensor:
        for buffer in self._buffers.values():
            if buffer is not None:
                buffer.add_(1)
        output: Tensor = _Compute.apply(value, self.weight, self)
        return output


class EmulatedModel(L.LightningModule):
    """A model of the profile's shape, trained by SGD with momentum."""

    def __init__(self, profile: ModelProfile, *, runs_ahead: bool = True, **kind: Any) -> None:
        super().__init__()
        self.accelerator = Accelerator(runs_ahead=runs_ahead)
        end = profile.layers[-1]
        layers = [EmulatedLayer(layer, self.accelerator, last=layer is end, **kind) for layer in profile.layers]
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0].requires_grad_()).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train_dataloader(self) -> Any:
        rows = torch.utils.data.TensorDataset(torch.zeros(4096, 4))
        return torch.utils.data.DataLoader(rows)
