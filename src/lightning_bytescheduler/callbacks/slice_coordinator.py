"""``SliceCoordinator``: tells a run's slices what was trained on, and the log what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from lightning_bytescheduler.data.statistics import SliceStatistics
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

if TYPE_CHECKING:
    from lightning_bytescheduler.data_modules.slices import SliceDataModule

__all__ = ["SliceCoordinator"]


class SliceCoordinator(pl.Callback):
    """Counts each step that is trained, moves the data module from epoch to epoch, and logs.

    :class:`SliceDataModule` adds one by itself; give one to the Trainer to set its options. It is put before all other
    callbacks, so that whoever saves a checkpoint after a step saves a position that has the step.

    Logged at Lightning's ``log_every_n_steps``: ``slices/stall_ms`` (per step since the last time, how long readers
    waited for bytes), ``slices/megabytes_fetched`` (per step), ``slices/cache_hit_share`` (of all slices so far that
    are not files of this machine). They are rank 0's, with its workers'.

    Args:
        log_metrics: Whether to log.

    Raises:
        OptionError: If ``log_metrics`` is neither True nor False.
    """

    def __init__(self, *, log_metrics: bool = True) -> None:
        if not isinstance(log_metrics, bool):
            raise OptionError("log_metrics", log_metrics, "True or False")
        self._log_metrics = log_metrics
        self._is_added = False  # by the data module
        self._reload_epochs: int | None = None
        self._logged, self._steps = SliceStatistics(), 0
        self._epoch_ends = False

    @classmethod
    def bind(cls, trainer: pl.Trainer) -> None:
        """Put the run's coordinator before all other callbacks, a new one if there is none."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        own = next((callback for callback in callbacks if isinstance(callback, cls)), None)
        if own is None:
            own = cls()
            own._is_added = True
        else:
            callbacks.remove(own)
        callbacks.insert(0, own)
        # An epoch that is resumed in the middle, or whose slices were quarantined, has another number of steps than the
        # next one: Lightning asks for it with each new loader. A loader costs nothing until its first batch.
        own._reload_epochs = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]

    @classmethod
    def release(cls, trainer: pl.Trainer) -> None:
        """Undo what ``bind`` did."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for own in [callback for callback in callbacks if isinstance(callback, cls)]:
            if own._reload_epochs is not None:
                trainer.reload_dataloaders_every_n_epochs = own._reload_epochs  # type: ignore[attr-defined]
                own._reload_epochs = None
            if own._is_added:
                callbacks.remove(own)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Require the data module that this is for.

        Raises:
            UnsupportedError: If the Trainer has another one, or none.
        """
        if stage == "fit":
            self._data(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        data = self._data(trainer)
        data.plan.trained()
        self._steps += 1
        self._epoch_ends = batch_idx + 1 >= trainer.num_training_batches
        if self._epoch_ends:
            self._finish_epoch(trainer, data)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._log_metrics and every and trainer.global_step % every == 0 and not trainer.barebones:
            self._log(pl_module, data)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave an epoch that was cut short, unless the whole training was: that is to be resumed where it stands."""
        data = self._data(trainer)
        is_stopped = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if not self._epoch_ends and not is_stopped and data.plan.begun:
            self._finish_epoch(trainer, data)
        if not self._epoch_ends and is_stopped and trainer.max_steps < 0:
            data.plan.counted = 0  # Lightning counts the rest as a new epoch when it is resumed
        self._epoch_ends = False

    def _finish_epoch(self, trainer: pl.Trainer, data: SliceDataModule) -> None:
        data.end_epoch(_agreed(trainer, data))

    def _log(self, pl_module: pl.LightningModule, data: SliceDataModule) -> None:
        now, before, steps = data.statistics, self._logged, self._steps
        self._logged, self._steps = now, 0
        asked = now.cache_hits + now.cache_misses
        pl_module.log_dict(
            {
                "slices/stall_ms": 1e3 * (now.stall_seconds - before.stall_seconds) / steps,
                "slices/megabytes_fetched": (now.bytes_fetched - before.bytes_fetched) / steps / 1e6,
                "slices/cache_hit_share": now.cache_hits / asked if asked else 1.0,
            },
            on_step=True,
            on_epoch=False,
        )

    def _data(self, trainer: pl.Trainer) -> SliceDataModule:
        from lightning_bytescheduler.data_modules.slices import SliceDataModule  # which imports this

        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, SliceDataModule):
            raise UnsupportedError(
                "SliceCoordinator needs the data to be a SliceDataModule: pass one to trainer.fit(datamodule=...), or "
                "leave the callback out."
            )
        return data


def _agreed(trainer: pl.Trainer, data: SliceDataModule) -> dict[str, str]:
    """The slices that any rank has found to be corrupt: every rank has to leave out the same."""
    found = data.corrupt
    if trainer.world_size == 1 or not trainer.strategy.reduce_boolean_decision(bool(found), all=False):
        return found
    catalogue = data.plan.catalogue
    marks = torch.zeros(len(catalogue), dtype=torch.int32, device=trainer.strategy.root_device)
    for key in found:
        index = catalogue.find(key)
        if index is not None:
            marks[index] = 1
    marked = trainer.strategy.reduce(marks, reduce_op="sum").cpu()  # type: ignore[union-attr]
    keys = [catalogue.key(int(index)) for index in marked.nonzero().flatten()]
    return {key: found.get(key, "Another rank found it to be corrupt.") for key in keys}
