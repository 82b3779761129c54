"""Trainers that are workers of a coordinator: the same training as that of ranks launched together."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_bytescheduler import DiLoCoStrategy
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from tests.diloco.coordinated_fits import OwnData, alone, coordinator_options, fit_coordinated, fit_together
from tests.diloco.fits import Result, diloco_trainer, fit_diloco, plain_sgd
from tests.support.rank_pool import RankPool, RanksFailed


def assert_equal(one: Result, other: Result) -> None:
    assert list(one.weights) == list(other.weights)
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"wire_dtype": "fp32"}, id="fp32"),
        pytest.param({"wire_dtype": "bf16", "overlap_steps": 1}, id="overlap", marks=pytest.mark.slow),
        pytest.param({"wire_dtype": "fp32", "fragments": 2}, id="fragments", marks=pytest.mark.slow),
        pytest.param({"wire_dtype": "bf16", "fragments": 3, "overlap_steps": 1}, id="overlapping-fragments"),
    ],
)
def test_it_has_the_bits_of_workers_launched_together(
    options: dict[str, Any], diloco_ranks: RankPool, tmp_path: Path
) -> None:
    options = {"inner_steps": 4, "equal_steps": True, "outer_steps": 4, **options}
    together = diloco_ranks.run(fit_together, options=options, default_root_dir=str(tmp_path))
    with CoordinatorServer(coordinator_options(rounds={"start_workers": 2}, **options)) as server:
        workers = diloco_ranks.run(fit_coordinated, url=server.url, default_root_dir=str(tmp_path))
        # Each other fragment is synchronised once more at the end, here in rounds without a step.
        assert server.status().weights_version == 4 + options.get("fragments", 1) - 1
    assert_equal(workers[0], workers[1])
    assert_equal(workers[0], together[0])
    assert [worker.global_step for worker in workers] == [one.global_step for one in together]
    assert [worker.losses for worker in workers] == [one.losses for one in together]


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_the_largest_changes_alone_may_travel(overlap_steps: int, diloco_ranks: RankPool, tmp_path: Path) -> None:
    sparse = {"wire_dtype": "sparse:0.1", "overlap_steps": overlap_steps}
    with CoordinatorServer(
        coordinator_options(inner_steps=4, outer_steps=3, rounds={"start_workers": 2}, **sparse)
    ) as server:
        workers = diloco_ranks.run(fit_coordinated, url=server.url, options=sparse, default_root_dir=str(tmp_path))
        assert server.status().weights_version == 3
    assert_equal(*workers)


class Notes(Callback):
    """What this worker did that is the leader's."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.validated: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated.append(float(sum(p.detach().double().sum() for p in pl_module.parameters())))

    @property
    def seen(self) -> tuple[list[float], list[str]]:
        files = sorted(str(path.relative_to(self.folder)) for path in Path(self.folder).rglob("*") if path.is_file())
        return self.validated, files


def fit_with_a_leader(rank: int, *, url: str, folder: str, inner: dict[str, Any] | None = None) -> Result:
    own = f"{folder}/{rank}"
    Path(own).mkdir()
    with alone():
        return fit_diloco(
            0,
            options={"coordinator": {"url": url, "name": f"w{rank}"}},
            model=partial(OwnData, rank, optimizer=plain_sgd, dropout=0.0, samples=32),
            callbacks=(
                partial(Notes, own),
                partial(ModelCheckpoint, dirpath=own, monitor="validation_loss", filename="best", save_top_k=1),
                partial(EarlyStopping, "validation_loss", patience=1, min_delta=1e9),  # after two validations
            ),
            logger=CSVLogger(own, name="", version=""),
            log_every_n_steps=1,
            limit_val_batches=2,
            enable_checkpointing=True,
            default_root_dir=own,
        )


def test_the_leader_alone_validates_saves_and_logs_and_its_early_stopping_ends_all(
    diloco_ranks: RankPool, tmp_path: Path
) -> None:
    with CoordinatorServer(coordinator_options(inner_steps=4, rounds={"start_workers": 2})) as server:
        results = diloco_ranks.run(fit_with_a_leader, url=server.url, folder=str(tmp_path))
        status = server.status()
    assert status.phase == "finished"  # though it has no last round of its own
    assert status.weights_version == status.round
    assert sorted("validation_loss" in result.metrics for result in results) == [False, True]
    assert_equal(*results)
    notes = [next(note for note in result.seen if isinstance(note, tuple)) for result in results]
    (led, files), (idle, no_files) = sorted(notes, key=lambda note: -len(note[0]))
    assert len(set(led)) == len(led) == 2  # each time other global weights
    assert "best.ckpt" in files
    assert "metrics.csv" in files
    assert (idle, no_files) == ([], [])

    # A run without a coordinator goes on from its checkpoint, with the outer state.
    saved = next(tmp_path.rglob("best.ckpt"))
    kept = torch.load(saved, weights_only=True)
    version = kept["lightning_bytescheduler.diloco"]["rounds"]["round"]
    assert 1 <= version <= status.weights_version
    assert kept["lightning_bytescheduler.diloco"]["outer"]["optimizer"]["state"]
    again = diloco_ranks.run(
        fit_together,
        options={"inner_steps": 4, "outer_steps": version + 2},
        model={"samples": 32},
        ckpt_path=str(saved),
        default_root_dir=str(tmp_path / "0"),
    )
    assert [result.rounds for result in again] == [2, 2]


def test_a_worker_ends_by_itself(diloco_ranks: RankPool, tmp_path: Path) -> None:
    options = coordinator_options(inner_steps=3, equal_steps=True, outer_steps=5, rounds={"start_workers": 2})
    with CoordinatorServer(options) as server:
        first, second = diloco_ranks.run(
            fit_limited, url=server.url, folder=str(tmp_path), limits={0: {"max_epochs": 1}, 1: {}}
        )
        samples = server.call(lambda: server.service.run.samples)
    assert (first.global_step, first.epoch) == (8, 1)
    assert second.rounds == 5
    assert samples == first.samples + second.samples  # the last ones of both are in it


def fit_limited(rank: int, *, url: str, folder: str, limits: dict[int, dict[str, Any]]) -> Result:
    return fit_coordinated(rank, url=url, model={"samples": 32}, default_root_dir=folder, **limits[rank])


class Terminates(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_terminated(rank: int, *, url: str, folder: str) -> int:
    """Rank 1 gets a SIGTERM after seven steps."""
    if rank == 0:
        return fit_coordinated(rank, url=url, default_root_dir=folder).samples
    before = signal.getsignal(signal.SIGTERM)
    try:
        with alone():
            module = OwnData(1, optimizer=plain_sgd, dropout=0.0)
            strategy = DiLoCoStrategy(coordinator={"url": url, "name": "w1"})
            trainer = diloco_trainer(0, strategy, callbacks=[Terminates()], default_root_dir=folder)
            with pytest.raises(SystemExit):
                trainer.fit(module)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    return 28


def test_a_signal_ends_a_worker_whose_samples_count(diloco_ranks: RankPool, tmp_path: Path) -> None:
    options = coordinator_options(inner_steps=5, equal_steps=True, outer_steps=3, rounds={"start_workers": 2})
    with CoordinatorServer(options) as server:
        samples = diloco_ranks.run(fit_terminated, url=server.url, folder=str(tmp_path))
        assert server.call(lambda: server.service.run.samples) == sum(samples)
        assert server.status().counters.get("left") == 2


def fit_group(rank: int, *, url: str, folder: str, inner: str) -> Result:
    return fit_diloco(
        rank,
        options={"coordinator": url, "inner": inner},
        model=partial(OwnData, rank, optimizer=plain_sgd, dropout=0.0),
        default_root_dir=folder,
        limit_val_batches=2,
        val_check_interval=4,
    )


@pytest.mark.parametrize("inner", ["ddp", "bytescheduler"])
def test_the_processes_of_a_trainer_are_one_worker(inner: str, diloco_ranks: RankPool, tmp_path: Path) -> None:
    with CoordinatorServer(coordinator_options(inner_steps=4, outer_steps=3)) as server:
        results = diloco_ranks.run(fit_group, url=server.url, folder=str(tmp_path), inner=inner)
        assert [worker.ranks for worker in server.status().workers] in ([2], [])
        assert server.call(lambda: server.service.run.samples) == results[0].samples
    assert_equal(*results)
    assert [result.rounds for result in results] == [3, 3]
    assert [result.global_step for result in results] == [12, 12]
    assert results[0].samples == 12 * 2 * 4  # of both ranks
    assert all(result.notes for result in results)  # both validated


def fit_in_two(rank: int, *, url: str) -> None:
    fit_diloco(rank, options={"coordinator": url})


def test_several_processes_need_to_know_how_they_train_together(diloco_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"devices=2 is not allowed.*inner='ddp'"):
        diloco_ranks.run(fit_in_two, url="http://127.0.0.1:1")
