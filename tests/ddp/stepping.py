"""A model that computes on a clock of its own: what a step takes is known to the last digit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bytescheduler.predicting import predict as predict_module

__all__ = ["Batches", "Clock", "Stepping"]


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(predict_module, "_moment", lambda device: self.now)
        monkeypatch.setattr(predict_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __deepcopy__(self, memo: Any) -> Clock:
        return self


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        clock.now += forward
        ctx.clock, ctx.seconds = clock, backward
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return gradient, None, None, None


class Stepping(LightningModule):
    """Layers ``a``, ``b``, ``c`` of 2, 6 and 12 parameters.

    They take 1, 2 and 3 seconds forward, 10, 20 and 30 backward; an update takes 5.
    """

    order: tuple[str, ...] = ("a", "b", "c")
    seconds: ClassVar = {"a": (1.0, 10.0), "b": (2.0, 20.0), "c": (3.0, 30.0)}

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.c = nn.Linear(3, 3)
        self.b = nn.Linear(1, 3)
        self.a = nn.Linear(1, 1)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        for name in self.order:
            hidden = self.apply_layer(name, hidden)
        return hidden

    def apply_layer(self, name: str, hidden: Tensor) -> Tensor:
        return _Takes.apply(getattr(self, name)(hidden), self.clock, *self.seconds[name])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clock.now += 5.0


class Batches:
    """Each batch of four samples takes 0.5 seconds to come."""

    def __init__(self, clock: Clock, count: int = 3) -> None:
        self.clock = clock
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            self.clock.now += 0.5
            yield torch.ones(4, 1)
