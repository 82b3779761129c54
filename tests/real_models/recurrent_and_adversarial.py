"""Recurrent networks, and two networks that train against each other, as tutorials have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Adam

from tests.support.models import Tokens, Trained

__all__ = ["GAN", "CarriesState", "Recurrent"]


class Recurrent(Tokens):
    """Two layers in two directions over packed sequences.

    Args:
        cell: ``"LSTM"`` or ``"GRU"``.
        arguments: See :class:`~tests.support.models.Trained`.
    """

    def __init__(self, *, cell: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embedding = nn.Embedding(16, 12)
        self.network = getattr(nn, cell)(12, 16, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
        self.last = nn.Linear(32, 3)

    def predict(self, inputs: Tensor) -> Tensor:
        lengths = 4 + inputs[:, 0] % 5
        packed = pack_padded_sequence(self.embedding(inputs), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.network(packed)[0], batch_first=True)
        return self.last(hidden.mean(1))


class CarriesState(Tokens):
    """A cell is called for each token, and the next batch begins with its last state."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embedding = nn.Embedding(16, 12)
        self.cell = nn.LSTMCell(12, 16)
        self.gate = nn.GRUCell(16, 16)
        self.last = nn.Linear(16, 3)
        self.state: tuple[Tensor, ...] | None = None

    def predict(self, inputs: Tensor) -> Tensor:
        if self.state is None or not self.training:
            self.state = tuple(torch.zeros(self.batch_size, 16) for _ in range(3))
        hidden, cell, upper = self.state
        for tokens in inputs.T:
            hidden, cell = self.cell(self.embedding(tokens), (hidden, cell))
            upper = self.gate(hidden, upper)
        self.state = (hidden.detach(), cell.detach(), upper.detach())
        return self.last(upper)


class GAN(Trained):
    """Generator and discriminator have an optimizer each, and take turns within a batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.LeakyReLU(), nn.Linear(24, 12))
        self.discriminator = nn.Sequential(
            nn.Linear(12, 24), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(24, 24), nn.LeakyReLU(), nn.Linear(24, 1)
        )

    def configure_optimizers(self) -> Any:
        rates = {"lr": 0.002, "betas": (0.5, 0.9)}
        return [Adam(self.generator.parameters(), **rates), Adam(self.discriminator.parameters(), **rates)], []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        noise = torch.randn(len(batch[0]), 6)

        self.toggle_optimizer(first)
        made = self.generator(noise)
        fooled = self._as_if(self.discriminator(made), real=True)
        self.manual_backward(fooled)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        told_apart = self._as_if(self.discriminator(batch[0]), real=True)
        told_apart = told_apart + self._as_if(self.discriminator(self.generator(noise).detach()), real=False)
        self.manual_backward(told_apart / 2)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

        self.losses += [fooled.item(), told_apart.item()]
        self.log_dict({"generator": fooled, "discriminator": told_apart})

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        made = self.generator(torch.ones(2, 6))
        self.notes.append(made)
        self.log("validation_loss", self.discriminator(made).mean(), sync_dist=True)

    @staticmethod
    def _as_if(judged: Tensor, *, real: bool) -> Tensor:
        return F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, float(real)))
