"""The strategy's own callback: first in line at the moments a strategy alone would come to too late.

``on_exception`` and ``on_train_end`` of callbacks run before the strategy's; being the first callback, this one
publishes a failure before anyone else may block on it, and lands what is pending before anyone else looks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_bytescheduler.gradients.statistics import SchedulerStatistics

if TYPE_CHECKING:
    from lightning_bytescheduler.strategies.byte_scheduler import ByteSchedulerStrategy

__all__ = ["SchedulerHooks"]

log = logging.getLogger(__name__)


class SchedulerHooks(pl.Callback):
    """Publishes failures, flushes at the end of training, logs the scheduler's metrics.

    Logged at Lightning's ``log_every_n_steps``, as means per step since the last time:
    ``bytescheduler/exposed_communication_ms`` (time the training thread waited for gradients),
    ``bytescheduler/gate_wait_ms`` (the part of it spent at gates in the forward pass),
    ``bytescheduler/megabytes_sent`` and ``bytescheduler/deferred_share`` (the mode: 1 when every update crossed the
    step boundary, 0 when the steps were synchronised).

    Args:
        strategy: Whose hooks these are.
        log_metrics: Whether to log.
    """

    def __init__(self, strategy: ByteSchedulerStrategy, *, log_metrics: bool) -> None:
        self._strategy = strategy
        self._log_metrics = log_metrics
        self._logged = SchedulerStatistics()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count batches anew."""
        self._strategy.count_epoch()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        self._strategy.count_batch()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what happened since the last time, when Lightning logs too."""
        statistics = self._strategy.statistics
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if (
            not self._log_metrics
            or statistics is None
            or trainer.barebones
            or not every
            or trainer.global_step % every
            or statistics.steps == self._logged.steps
        ):
            return
        now = statistics.copy()
        new = now.since(self._logged)
        self._logged = now
        pl_module.log_dict(
            {
                "bytescheduler/exposed_communication_ms": 1e3 * new.exposed_s / new.steps,
                "bytescheduler/gate_wait_ms": 1e3 * new.gate_wait_s / new.steps,
                "bytescheduler/megabytes_sent": new.bytes_sent / new.steps / 1e6,
                "bytescheduler/deferred_share": new.deferred_share,
            },
            on_step=True,
            on_epoch=False,
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Land everything before other callbacks look at the trained weights."""
        self._strategy.flush()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish the failure before other callbacks or the teardown can block."""
        try:
            self._strategy.publish_failure(exception)
        except Exception:  # Lightning would skip the teardown, and hide what training failed with
            log.exception("The failure could not be published.")
