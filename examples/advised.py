"""What `lightning-bytescheduler predict` is pointed at: a function that returns a model and its data.

From the repository's folder, with a network of your own in numbers:

    lightning-bytescheduler predict examples/advised.py:make --workers 4 --bandwidth 1gbit --latency 0.1ms

Run as a command, it does that.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bytescheduler import LinkModel, predict


class Classifier(LightningModule):
    """Nine layers, 2.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(7) for layer in (nn.Linear(512, 512), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), *hidden, nn.Linear(512, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def make() -> tuple[LightningModule, DataLoader[tuple[Tensor, ...]]]:
    """A model and data for it."""
    images, labels = torch.randn(2048, 784), torch.randint(10, (2048,))
    return Classifier(), DataLoader(TensorDataset(images, labels), batch_size=128)


if __name__ == "__main__":
    print(predict(*make(), link=LinkModel(workers=4, bandwidth="1Gbit/s", latency="0.1ms")))
