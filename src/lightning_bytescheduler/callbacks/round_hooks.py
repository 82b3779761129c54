"""The strategy's own callback: first in line at the moments a strategy alone would come to too late."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING:
    from lightning_bytescheduler.strategies.diloco import DiLoCoStrategy

__all__ = ["CHECKPOINT_KEY", "RoundHooks"]

log = logging.getLogger(__name__)

CHECKPOINT_KEY = "lightning_bytescheduler.diloco"
"""Where a checkpoint keeps the outer state."""


class RoundHooks(pl.Callback):
    """Starts and ends the rounds of a training, publishes failures, and keeps the outer state in checkpoints.

    Args:
        strategy: Whose hooks these are.
    """

    def __init__(self, strategy: DiLoCoStrategy) -> None:
        self._strategy = strategy

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the other workers."""
        self._strategy.begin_rounds()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train on, if all ranks of the worker do.

        Raises:
            StopIteration: If another rank of it stops, and training is over.
        """
        if not self._strategy.begin_epoch():
            raise StopIteration

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go on after all workers stood still.

        Raises:
            StopIteration: If another worker stopped there, and training is over.
        """
        if not self._strategy.go_on():
            raise StopIteration

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See to it that the epoch ends for all."""
        self._strategy.end_epoch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring all workers to the global weights, before other callbacks look at them."""
        self._strategy.end_rounds()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the outer state."""
        state = self._strategy.outer_state_dict()
        if state is not None:
            checkpoint[CHECKPOINT_KEY] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Carry on from it; a checkpoint of another strategy has none."""
        self._strategy.load_outer_state_dict(checkpoint.get(CHECKPOINT_KEY))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish the failure before other callbacks or the teardown can block."""
        try:
            self._strategy.publish_failure(exception)
        except Exception:  # Lightning would skip the teardown, and hide what training failed with
            log.exception("The failure could not be published.")
