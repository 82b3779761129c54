"""``SliceCoordinator``: tells a run's slices what was trained on, and the log what they cost."""

from __future__ import annotations

from typing import Any

from lightning_bytescheduler.checks import options_by_name, require_bool
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl
from lightning_bytescheduler.registration import require_same_package
from lightning_bytescheduler.slices.fetch import SliceStatistics
from lightning_bytescheduler.slices.training import CoordinatedDataModule

__all__ = ["SliceCoordinator"]


@options_by_name
class SliceCoordinator(pl.Callback):
    """Reports each step that is trained, to the plan that ranks share or to the run's tracker, and logs.

    :class:`SliceDataModule` adds one by itself; give one to the Trainer to set its options. It is put before all other
    callbacks, so that whoever saves a checkpoint after a step saves a position that has the step.

    Logged at Lightning's ``log_every_n_steps``, per step since the last time: ``slices/wait_ms`` (how long the training
    waited for its batch, whatever for), ``slices/stall_ms`` (how long readers waited for bytes) and
    ``slices/megabytes_fetched``; and ``slices/cache_hit_share``, of all slices so far that are not files of this
    machine. They are rank 0's, with its DataLoader workers'.

    Args:
        log_metrics: Whether to log.

    Raises:
        OptionError: If ``log_metrics`` is neither True nor False.
    """

    def __init__(self, *, log_metrics: bool = True) -> None:
        self._log_metrics = require_bool("log_metrics", log_metrics)
        self._is_added = False  # by the data module
        self._reload_epochs: int | None = None
        self._logged, self._waited, self._steps = SliceStatistics(), 0.0, 0

    @classmethod
    def bind(cls, trainer: pl.Trainer, *, has_length: bool) -> None:
        """Put the run's coordinator before all other callbacks, a new one if there is none.

        Args:
            trainer: Whose fit begins.
            has_length: Whether the loader knows its steps, so that each epoch needs a new one.

        Raises:
            OptionError: If there are several, which would count each step as often.
        """
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        found = [callback for callback in callbacks if isinstance(callback, cls)]
        if len(found) > 1:
            given = f"{len(found)} of SliceCoordinator"
            raise OptionError("callbacks", given, "a list with one SliceCoordinator, or none")
        own = found[0] if found else None
        if own is None:
            own = cls()
            own._is_added = True
        else:
            callbacks.remove(own)
        callbacks.insert(0, own)
        if has_length:
            # An epoch that is resumed in the middle, or whose slices were quarantined, has another number of steps than
            # the next one: Lightning asks each new loader. One costs nothing until its first batch.
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
            UnsupportedError: If the Trainer has another one, or none, or is of the other package of Lightning.
        """
        require_same_package(trainer, "SliceCoordinator")
        if stage == "fit":
            data = self._data(trainer)
            self._logged, self._waited, self._steps = data.statistics, data.waited, 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the step."""
        data = self._data(trainer)
        data.training.trained()
        self._steps += 1
        if batch_idx + 1 >= trainer.num_training_batches:
            data.training.finish_epoch(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._log_metrics and every and trainer.global_step % every == 0 and not trainer.barebones:
            self._log(pl_module, data)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Keep the lease of what is held."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._data(trainer).training.keep_alive()

    def _log(self, pl_module: pl.LightningModule, data: CoordinatedDataModule) -> None:
        now, before, steps = data.statistics, self._logged, self._steps
        waited = data.waited - self._waited
        self._logged, self._waited, self._steps = now, data.waited, 0
        asked = now.cache_hits + now.cache_misses
        pl_module.log_dict(
            {
                "slices/wait_ms": 1e3 * waited / steps,
                "slices/stall_ms": 1e3 * (now.stall_seconds - before.stall_seconds) / steps,
                "slices/megabytes_fetched": (now.bytes_fetched - before.bytes_fetched) / steps / 1e6,
                "slices/cache_hit_share": now.cache_hits / asked if asked else 1.0,
            },
            on_step=True,
            on_epoch=False,
        )

    def _data(self, trainer: pl.Trainer) -> CoordinatedDataModule:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, CoordinatedDataModule):
            raise UnsupportedError(
                "SliceCoordinator needs the data to be a SliceDataModule: pass one to trainer.fit(datamodule=...), or "
                "leave the callback out."
            )
        return data
