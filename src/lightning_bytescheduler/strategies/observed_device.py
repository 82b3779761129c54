"""A single device whose steps are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bytescheduler.advice.step_recorder import StepRecorder

__all__ = ["EnoughSteps", "ObservedDevice"]


class EnoughSteps(Exception):
    """Ends a fit whose steps have been recorded, before the epoch ends and what belongs to that happens."""


class ObservedDevice(SingleDeviceStrategy):
    """Tells a recorder where in a step training is.

    Args:
        device: Where to train.
        recorder: Is told.

    Attributes:
        batch_size: Samples in the first batch, or ``None`` if it does not show them.
    """

    def __init__(self, device: torch.device, recorder: StepRecorder) -> None:
        super().__init__(device=device)
        self._recorder = recorder
        self._begun = False
        self.batch_size: int | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """See Strategy.

        Raises:
            EnoughSteps: If the recorder has all it wants.
        """
        if not self._begun:
            self._begun = True
            with contextlib.suppress(MisconfigurationException, RecursionError):
                self.batch_size = extract_batch_size(args[0])
        self._recorder.begin_forward()
        if self._recorder.complete:
            raise EnoughSteps
        output = super().training_step(*args, **kwargs)
        self._recorder.end_forward()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """See Strategy."""
        self._recorder.begin_backward()
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._recorder.end_backward()
        return loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """See Strategy."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._recorder.end_update()
        return output
