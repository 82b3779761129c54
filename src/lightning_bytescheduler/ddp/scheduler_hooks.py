"""The callback of ``ByteSchedulerStrategy``.

``on_exception`` and ``on_train_end`` of callbacks run before the strategy's; being the first callback, this one
publishes a failure before anyone else may block on it, and lands what is pending before anyone else looks.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning_bytescheduler.ddp.rank_strategy import COMPRESSION, OUTER_STATE
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.lightning_api import pl, rank_zero_info

__all__ = ["SchedulerHooks"]

log = logging.getLogger(__name__)


class SchedulerHooks(pl.Callback):
    """Publishes failures, flushes at the end of training, logs the scheduler's metrics.

    Logged at Lightning's ``log_every_n_steps``, as means per step since the last time:
    ``bytescheduler/exposed_communication_ms`` (how long the training waited for gradients),
    ``bytescheduler/gate_wait_ms`` (the part of it spent at gates in the forward pass),
    ``bytescheduler/megabytes_sent`` and ``bytescheduler/deferred_share`` (the mode: 1 when every update crossed the
    step boundary, 0 when the steps were synchronised). Where gradients are compressed, also
    ``bytescheduler/compression_ratio`` (how many times fewer bytes were sent), ``bytescheduler/codec_ms``,
    ``bytescheduler/residual_norm`` (of what was left out of a step, to be sent in the next) and
    ``bytescheduler/compressed_share`` (of the gradients' bytes, those that travelled compressed). Where batches are
    balanced, also ``bytescheduler/share_of_rank_<k>`` (samples) and ``bytescheduler/waiting_saved_ms`` (how much longer
    a step would take with equal shares).

    Args:
        strategy: The ``ByteSchedulerStrategy`` whose hooks these are; it imports this module.
        log_metrics: Whether to log.
    """

    def __init__(self, strategy: Any, *, log_metrics: bool) -> None:
        self._strategy = strategy
        self._log_metrics = log_metrics
        self._logged = SchedulerStatistics()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training data that is loaded from here on takes the place of what was."""
        self._strategy.loaders_are_made()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training data that is loaded from here on takes the place of what was."""
        self._strategy.loaders_are_made()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count batches anew."""
        self._strategy.count_epoch()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        self._strategy.count_batch()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End here if a SIGTERM ends all."""
        self._strategy.begin_evaluation_batch()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

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
        compressed = {
            "bytescheduler/compression_ratio": new.compression_ratio,
            "bytescheduler/codec_ms": 1e3 * new.codec_s / new.steps,
            "bytescheduler/residual_norm": new.residual_norm,
            "bytescheduler/compressed_share": new.compressed_share,
        }
        pl_module.log_dict(
            {
                "bytescheduler/exposed_communication_ms": new.exposed_ms,
                "bytescheduler/gate_wait_ms": 1e3 * new.gate_wait_s / new.steps,
                "bytescheduler/megabytes_sent": new.bytes_sent / new.steps / 1e6,
                "bytescheduler/deferred_share": new.deferred_share,
                **(compressed if self._strategy.compresses else {}),
                **self._strategy.share_metrics(),
            },
            on_step=True,
            on_epoch=False,
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Land everything before other callbacks look at the trained weights."""
        self._strategy.flush()
        self._strategy.end_training()
        self._strategy.say_end()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what error feedback has left to be sent; on all ranks at once."""
        state = self._strategy.compression_state()
        if state is not None:
            checkpoint[COMPRESSION] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on with what error feedback had left to be sent; say what of the checkpoint is left out."""
        self._strategy.load_compression_state(checkpoint.get(COMPRESSION))
        if OUTER_STATE in checkpoint:
            rank_zero_info(
                "bytescheduler: the checkpoint is of strategy 'diloco': weights, optimizers and progress go on, and "
                "its outer optimizer is left out."
            )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish the failure before other callbacks or the teardown can block."""
        try:
            self._strategy.publish_failure(exception)
        except Exception:  # Lightning would skip the teardown, and hide what training failed with
            log.exception("The failure could not be published.")
