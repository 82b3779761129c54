from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_bytescheduler import SliceDataModule
from lightning_bytescheduler.slices.data_module import SliceSteps
from lightning_bytescheduler.slices.make import make_slices
from tests.slices.fits import Remembers, fit, make_rows, trainer_for

NAMES = {"slices/wait_ms", "slices/stall_ms", "slices/megabytes_fetched", "slices/cache_hit_share"}


class Watches(Callback):
    """The order of callbacks in a fit, and what is logged."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.first = trainer.callbacks[0]
        self.reload = trainer.reload_dataloaders_every_n_epochs
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_it_is_added_for_a_fit_and_taken_away_again(tmp_path: Path) -> None:
    watches = Watches()
    trainer = trainer_for([watches], log_every_n_steps=2, reload_dataloaders_every_n_epochs=3)
    trainer.fit(Remembers(), datamodule=SliceDataModule(make_rows(tmp_path, [8]), batch_size=2))
    assert isinstance(watches.first, SliceSteps)
    assert watches.reload == 1
    assert watches.metrics.keys() == NAMES
    assert trainer.callbacks == [watches]
    assert trainer.reload_dataloaders_every_n_epochs == 3


class Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("boom")


def test_a_fit_that_fails_leaves_the_trainer_as_it_was_and_the_next_one_is_as_the_first(tmp_path: Path) -> None:
    data = SliceDataModule(make_rows(tmp_path, [8]), batch_size=2)
    failing = trainer_for([Fails()], reload_dataloaders_every_n_epochs=3)
    with pytest.raises(ValueError, match="boom"):
        failing.fit(Remembers(), datamodule=data)
    assert not any(isinstance(callback, SliceSteps) for callback in failing.callbacks)
    assert failing.reload_dataloaders_every_n_epochs == 3
    watches = Watches()
    trainer_for([watches]).fit(Remembers(), datamodule=data)
    assert watches.reload == 1


def test_what_is_logged(tmp_path: Path) -> None:
    make_slices(make_rows(tmp_path / "rows", [1000] * 4), "memory://logged", overwrite=True)
    data = SliceDataModule("memory://logged", batch_size=500, cache=str(tmp_path / "cache"))
    logger = CSVLogger(str(tmp_path))
    fit(data, max_epochs=2, logger=logger, log_every_n_steps=8)
    logger.save()
    rows = [line.split(",") for line in Path(logger.log_dir, "metrics.csv").read_text().splitlines()]
    logged = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [float(row["slices/megabytes_fetched"]) for row in logged] == [pytest.approx(0.032 / 8, rel=0.2), 0.0]
    assert float(logged[-1]["slices/cache_hit_share"]) >= 0.5
    assert all(float(row["slices/wait_ms"]) >= float(row["slices/stall_ms"]) >= 0 for row in logged)
