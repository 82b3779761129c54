from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_bytescheduler import OptionError, SliceCoordinator, SliceDataModule, UnsupportedError
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
    assert isinstance(watches.first, SliceCoordinator)
    assert watches.reload == 1
    assert watches.metrics.keys() == NAMES
    assert trainer.callbacks == [watches]
    assert trainer.reload_dataloaders_every_n_epochs == 3


def test_one_that_is_given_is_used_and_stays(tmp_path: Path) -> None:
    watches, own = Watches(), SliceCoordinator(log_metrics=False)
    trainer = trainer_for([watches, own], log_every_n_steps=2)
    trainer.fit(Remembers(), datamodule=SliceDataModule(make_rows(tmp_path, [8]), batch_size=2))
    assert watches.first is own
    assert watches.metrics == {}
    assert set(trainer.callbacks) == {watches, own}


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


def test_another_data_module_or_none_is_said_clearly() -> None:
    loader: Any = DataLoader(torch.zeros(4, 1))
    with pytest.raises(UnsupportedError, match=r"pass one to trainer.fit\(datamodule=...\)"):
        trainer_for([SliceCoordinator()]).fit(Remembers(), loader)


def test_misuse() -> None:
    with pytest.raises(OptionError, match="log_metrics"):
        SliceCoordinator(log_metrics="yes")
