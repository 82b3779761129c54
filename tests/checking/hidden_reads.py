"""Models to check, one of which reads a weight in a way that no gate sees."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Tower

__all__ = ["ByAddress", "FailsWhenGated", "Sleeps", "Unrepeatable"]


class ByAddress(Tower):
    """From the fourth step on, the second layer's weight is read through its address before anything touches it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(depth=2, width=8, **arguments)
        self.address = 0
        self.passes = 0

    def predict(self, inputs: Tensor) -> Tensor:
        weight: Any = self.layers[1].weight
        self.passes += 1
        if self.passes == 1:
            self.address = weight.data_ptr()
        if self.passes < 4:
            return super().predict(inputs)
        memory = (ctypes.c_float * 64).from_address(self.address)
        read = torch.frombuffer(memory, dtype=torch.float32).sum()
        return super().predict(inputs) + read


class Unrepeatable(Tower):
    """Adds random numbers that no seed controls."""

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(inputs) + int.from_bytes(os.urandom(2), "big") / 2**16


class FailsWhenGated(Tower):
    """Fails if a parameter has another class."""

    def predict(self, inputs: Tensor) -> Tensor:
        if type(self.last.weight) is not nn.Parameter:
            raise TypeError("that is no parameter")
        return super().predict(inputs)


class Sleeps(Tower):
    """Never reaches its first step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        threading.Event().wait(600.0)
