"""Small modules with their data, the same in every run and on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["MeanOfAll", "Tokens", "Tower", "Trained", "sgd"]

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
Schedule = Callable[[Optimizer], Any]


def sgd(parameters: Iterable[Any]) -> Optimizer:
    """Momentum and weight decay: what is stepped twice, never or with the wrong gradient shows from then on."""
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


class MeanOfAll(torch.autograd.Function):
    """As a SyncBatchNorm, which is for GPUs: a collective in the forward pass, and one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        mean = value.mean(0)
        dist.all_reduce(mean)
        return value - mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        mean = gradients[0].mean(0)
        work = dist.all_reduce(mean, async_op=True)
        gradient = gradients[0].clone()
        work.wait()
        return gradient - mean / dist.get_world_size()


class Trained(LightningModule):
    """Brings its data along and remembers every loss; subclasses say what the loss is.

    Args:
        optimizer: Makes the optimizer of the parameters.
        schedule: Makes a learning-rate schedule that steps with every step of the optimizer.
        samples: Length of the training set, over all ranks.
        batch_size: Of each rank.
    """

    def __init__(
        self,
        *,
        optimizer: OptimizerFactory = sgd,
        schedule: Schedule | None = None,
        samples: int = 128,
        batch_size: int = 4,
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.make_schedule = schedule
        self.samples = samples
        self.batch_size = batch_size
        self.losses: list[float] = []
        self.notes: list[Any] = []  # what callbacks saw

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, 12, generator=generator)

    def predict(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        return self.predict(inputs)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = F.mse_loss(self.predict(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.mse_loss(self.predict(batch[0]), batch[1])
        self.notes.append(("validation", loss.item()))
        self.log("validation_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_schedule(optimizer), "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._data(self.samples, seed=1), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._data(16, seed=2), batch_size=self.batch_size)

    def _data(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs(count, generator)
        return TensorDataset(inputs, torch.randn(count, 3, generator=generator))


class Tower(Trained):
    """Linear layers with dropout between them.

    Args:
        depth: Number of layers between the first and the last.
        width: Of the layers.
        bias: Whether the layers have biases.
        dropout: Probability; draws from the same random stream as everything else does.
        arguments: See :class:`Trained`.
    """

    def __init__(
        self, *, depth: int = 4, width: int = 24, bias: bool = True, dropout: float = 0.1, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.first = nn.Linear(12, width, bias=bias)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, 3, bias=bias)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        return self.last(hidden)


class Tokens(Trained):
    """For models that read sequences of eight tokens out of sixteen; a target is what the mean output is near."""

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(16, (count, 8), generator=generator)
