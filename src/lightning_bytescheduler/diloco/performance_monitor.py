"""Tells the batch scheduler about each step without waiting, and shows how the rounds of DiLoCo go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bytescheduler.checks import options_by_name, require_bool, require_whole
from lightning_bytescheduler.ddp.sample_weights import samples_in
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_warn
from lightning_bytescheduler.registration import require_same_package

_SHOWN = "round", "steps_left"


@options_by_name
class PerformanceMonitor(pl.Callback):
    """Measures each batch for the strategy ``diloco``, which adds this callback if there is none.

    Nothing here waits for another worker or for the network. On a GPU the loss of a step is read one step later, so
    that reading it does not wait for the step either.

    Worker 0 logs at Lightning's ``log_every_n_steps``: ``diloco/round``; ``diloco/steps_left``, its own steps until it
    sends, once they are known; and the means over the last round and all workers, ``diloco/loss`` and
    ``diloco/samples_per_second``. The first two are in the progress bar.

    Args:
        log_metrics: Whether to log.

    Raises:
        OptionError: If it is neither True nor False.
    """

    def __init__(self, *, log_metrics: bool = True) -> None:
        self._log_metrics = require_bool("log_metrics", log_metrics)
        self._last_loss: Tensor | None = None

    def batch_samples(self, batch: Any) -> int:
        """Return the samples of a batch: the common length of its tensors.

        Override it where that is not so, or to count tokens instead: rounds and weights are by tokens then.

        Raises:
            UnsupportedError: If there is no tensor in it, or their lengths differ.
        """
        try:
            return samples_in(batch)
        except ValueError as error:
            raise UnsupportedError(
                f"The samples of a batch of type {type(batch).__name__} cannot be counted: {error}. Derive a class "
                "from PerformanceMonitor whose batch_samples(batch) returns their number, and pass it to the Trainer."
            ) from error

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Warn where nothing is measured, and refuse to measure twice.

        Raises:
            UnsupportedError: If two monitors would each report every batch, or the Trainer is of the other package of
                Lightning.
        """
        require_same_package(trainer, "PerformanceMonitor")
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "report_batch"):  # as DiLoCoStrategy has
            rank_zero_warn(
                f"PerformanceMonitor measures for strategy 'diloco', and does nothing with "
                f"{type(trainer.strategy).__name__}: leave the callback out."
            )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if sum(isinstance(callback, PerformanceMonitor) for callback in callbacks) > 1:
            raise UnsupportedError(
                "The Trainer has more than one PerformanceMonitor among its callbacks, and each would report every "
                "batch: leave one of them."
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the batch, and log how the round goes.

        Raises:
            OptionError: If ``batch_samples`` returned something else than a whole number above 0.
        """
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "report_batch"):
            return
        strategy.report_batch(
            samples=_whole("batch_samples(batch)", self.batch_samples(batch)),
            loss=self._loss(outputs),
        )
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if self._log_metrics and not trainer.barebones and every and not trainer.global_step % every:
            shown = strategy.progress()
            for in_bar in (True, False):
                logged = {f"diloco/{name}": shown[name] for name in shown if (name in _SHOWN) == in_bar}
                pl_module.log_dict(logged, on_step=True, on_epoch=False, prog_bar=in_bar, rank_zero_only=False)

    def _loss(self, outputs: Any) -> float | None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return None
        loss = loss.detach()
        if loss.device.type == "cpu":
            return _finite(loss)
        before, self._last_loss = self._last_loss, loss
        return None if before is None else _finite(before)


def _whole(method: str, value: Any) -> int:
    """Return what ``method`` returned, perhaps as a NumPy number or a tensor of one element."""
    return require_whole(method, getattr(value, "item", lambda: value)(), 1)


def _finite(loss: Tensor) -> float | None:
    return float(loss) if bool(torch.isfinite(loss)) else None
