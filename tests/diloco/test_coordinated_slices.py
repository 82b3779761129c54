"""Slices that the coordinator of the rounds hands out, too."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler import DiLoCoStrategy, SliceDataModule
from lightning_bytescheduler.coordinator.server import CoordinatorServer
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.slices.options import TrackerOptions
from tests.diloco.coordinated_fits import alone, coordinator_options
from tests.diloco.fits import Pause, diloco_trainer
from tests.slices.fits import Remembers, make_rows
from tests.support.rank_pool import RankPool, RanksFailed

COUNTS = [5, 7, 3, 9, 1, 6, 8, 2]
SAMPLES = sum(COUNTS)


def fit_slices(rank: int, *, url: str, rows: str, folder: str, **options: Any) -> list[list[int]]:
    module = Remembers()
    with alone():
        trainer = diloco_trainer(
            0,
            DiLoCoStrategy(coordinator=url, worker_name=f"w{rank}", **options),
            callbacks=[Pause(rank, {0: 0.002, 1: 0.03})],
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=SliceDataModule(rows, batch_size=2))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    return module.batches


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return make_rows(tmp_path / "rows", COUNTS)


def test_each_epoch_is_shared_and_goes_on_by_itself(diloco_ranks: RankPool, tmp_path: Path, rows: str) -> None:
    slices = SliceRoutes([rows], TrackerOptions())
    options = coordinator_options(inner_steps=4, outer_steps=12, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server:
        batches = diloco_ranks.run(fit_slices, url=server.url, rows=rows, folder=str(tmp_path), timeout=60.0)
        status = server.status().slices
    assert status is not None
    trained = Counter(number for worker in batches for batch in worker for number in batch)
    assert set(trained) == set(range(SAMPLES))  # at least one epoch was gone through
    assert max(trained.values()) - min(trained.values()) <= 1  # each once in each
    assert status.epoch == max(trained.values()) - 1
    assert all(batches)
    assert len(batches[0]) > len(batches[1])  # slices go to whoever gets through them


def fit_in_a_group(rank: int, *, url: str, rows: str) -> None:
    trainer = diloco_trainer(rank, DiLoCoStrategy(coordinator=url, inner="ddp"))
    trainer.fit(Remembers(), datamodule=SliceDataModule(rows, batch_size=2))


def test_a_worker_of_several_processes_is_told_what_to_do(diloco_ranks: RankPool, rows: str) -> None:
    with pytest.raises(RanksFailed, match=r"takes slices from the coordinator for workers of one process"):
        diloco_ranks.run(fit_in_a_group, url="http://127.0.0.1:1", rows=rows)
