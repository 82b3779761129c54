"""Models with real compute: a transformer on real text, and a multi-layer perceptron."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from examples.demo.model import CharacterGPT
from examples.demo.size import GPTSize
from examples.demo.text import Windows, training_and_validation_text

__all__ = ["REAL_MODELS", "ManyLayers", "validation_windows"]

_STEPS = 10_000  # of the learning-rate schedule; no benchmark trains to its end


class TextTransformer(CharacterGPT):
    """The demo's transformer with its data: the Python library's source."""

    def __init__(self, size: GPTSize, batch_size: int) -> None:
        super().__init__(size, _STEPS)
        self.size = size
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        text, _ = training_and_validation_text()
        return DataLoader(Windows(text, self.size.context), batch_size=self.batch_size, drop_last=True)


class ManyLayers(L.LightningModule):
    """A perceptron of many equal layers."""

    def __init__(self, depth: int, width: int, batch_size: int, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.width = width
        self.batch_size = batch_size
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), activation())]
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    def train_dataloader(self) -> Any:
        rows = torch.randn(64 * self.batch_size, self.width)
        return DataLoader(TensorDataset(rows.repeat(64, 1)), batch_size=self.batch_size)


REAL_MODELS = {
    "text transformer": lambda: TextTransformer(GPTSize(layers=6, width=256, heads=4, context=64), batch_size=8),
    "perceptron": lambda: ManyLayers(depth=16, width=512, batch_size=64),
    "100 small layers": lambda: ManyLayers(depth=100, width=64, batch_size=256),
    "100 layers": lambda: ManyLayers(depth=100, width=256, batch_size=64, activation=nn.Tanh),
}
"""Models with real compute, by name."""


def validation_windows(windows: Windows, count: int) -> Dataset[Any]:
    """Some of the windows of a text, evenly spread."""
    apart = max(len(windows) // count, 1)
    return Subset(windows, range(0, apart * count, apart))
