"""Callbacks that time a rank's steps and its link, without a say in the training."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed

from examples.demo.report import ReportWriter

_LINK_TRIALS = 3


class StepTimes(Callback):
    """Times every step from the end of the one before, so that nothing falls between two steps.

    Args:
        report: Where each step is announced; None for a rank whose steps are not shown.

    Attributes:
        seconds: The durations; one less than there were steps.
    """

    def __init__(self, report: ReportWriter | None) -> None:
        self._report = report
        self._last_end: float | None = None
        self.seconds: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            self.seconds.append(now - self._last_end)
        self._last_end = now
        if self._report is not None:
            self._report.step(batch_idx + 1, float(outputs["loss"]))


class LinkTime(Callback):
    """Before training, times an all-reduce of as many bytes as the gradients have, with nothing else going on.

    Attributes:
        seconds: The median of a few trials; None where the rank trains alone.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size == 1:
            return
        buffer = torch.zeros(sum(parameter.numel() for parameter in pl_module.parameters()))
        trials = []
        for _ in range(_LINK_TRIALS):
            distributed.barrier()
            started = time.perf_counter()
            distributed.all_reduce(buffer)
            trials.append(time.perf_counter() - started)
        self.seconds = statistics.median(trials)
