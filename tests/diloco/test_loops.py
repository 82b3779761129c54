"""What epochs, limits, validations, early stopping and checkpoints are for workers of unequal speed."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim.lr_scheduler import StepLR

from tests.diloco.fits import FAST_AND_SLOW, Measured, Result, calm_tower, fit_alone, fit_diloco, plain_sgd
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.waiting import until

ROUNDS = {"inner_steps": 4}


measured = partial(Measured, optimizer=plain_sgd, dropout=0.0)


def fit(ranks: RankPool, folder: Path, **arguments: Any) -> list[Result]:
    defaults: dict[str, Any] = {
        "options": ROUNDS,
        "model": calm_tower,
        "paces": FAST_AND_SLOW,
        "default_root_dir": str(folder),
    }
    return ranks.run(fit_diloco, **{**defaults, **arguments})


def same_weights(results: list[Result]) -> bool:
    first = results[0].weights
    return all(torch.equal(result.weights[name], value) for result in results for name, value in first.items())


def test_an_epoch_ends_for_all_when_the_first_is_through_its_share(diloco_ranks: RankPool, tmp_path: Path) -> None:
    model = partial(calm_tower, schedule=partial(StepLR, step_size=1, gamma=0.5))
    fast, slow = fit(diloco_ranks, tmp_path, model=model, max_epochs=3)
    assert (fast.epoch, slow.epoch) == (3, 3)
    assert fast.global_step == 3 * 16  # of 128 samples, in batches of 4 for each of two ranks
    assert 0 < slow.global_step < fast.global_step
    assert same_weights([fast, slow])


class LinesAndPlan(Callback):
    """Keeps the lines of the log, the strategy's plan, and the batches of each epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.handler = logging.Handler(logging.INFO)
        lines: list[str] = []
        self.handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        self.logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        self.level = self.logger.level
        self.logger.addHandler(self.handler)
        self.logger.setLevel(logging.INFO)
        self.seen[:] = [lines, None, []]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen[2].append(trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen[1] = trainer.strategy.plan
        self.logger.removeHandler(self.handler)
        self.logger.setLevel(self.level)


def test_what_an_epoch_leaves_out_is_said_and_kept_with_equal_steps(diloco_ranks: RankPool, tmp_path: Path) -> None:
    fast, slow = fit(diloco_ranks, tmp_path, max_epochs=2, callbacks=(LinesAndPlan,))
    lines, plan, _ = fast.seen[0]
    left = {0: [0, 16 - slow.seen[0][2][0]], 1: [0, 16 - slow.seen[0][2][1]]}
    assert all(0 < counts[1] < 16 for counts in left.values())
    assert dict(plan.left_out) == dict(slow.seen[0][1].left_out) == left
    said = [line for line in lines if "leaves out batches" in line]
    assert said == [f"diloco: epoch {one} leaves out batches: {left[one][1]} of worker 1." for one in (0, 1)]
    (start,) = (line for line in lines if "2 workers" in line)
    assert "rounds of 4 steps of the fastest" in start
    assert "equal_steps=True" in start
    assert len([line for line in lines if "samples of all workers" in line]) == 1


class LeavesItsEpoch(Tower):
    """One worker skips the rest of an epoch, as Lightning documents it, once another one has come to its end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        strategy, there = self.trainer.strategy, Path(self.trainer.default_root_dir, "at batch 8")
        if strategy.worker == 1 and batch_idx == 15:
            until(there.exists)
        if strategy.worker == 0 and batch_idx == 8:
            there.touch()
            until(lambda: strategy.progress().get("steps_left", 100.0) < 50.0)  # the other one has ended the round
            return -1
        return None


def test_a_worker_may_skip_the_rest_of_an_epoch_that_ends_for_another(diloco_ranks: RankPool, tmp_path: Path) -> None:
    model = partial(LeavesItsEpoch, optimizer=plain_sgd)
    results = fit(
        diloco_ranks,
        tmp_path,
        options={"inner_steps": 100},
        model=model,
        paces=None,
        max_epochs=1,
        callbacks=(LinesAndPlan,),
    )
    assert [result.global_step for result in results] == [8, 16]
    for result in results:
        assert dict(result.seen[0][1].left_out) == {0: [7, 0]}


def test_with_equal_steps_every_worker_trains_on_all_of_its_share(diloco_ranks: RankPool, tmp_path: Path) -> None:
    options = {"inner_steps": 5, "equal_steps": True}
    results = fit(
        diloco_ranks,
        tmp_path,
        options=options,
        paces=None,
        pauses={1: 0.005},
        max_epochs=2,
        callbacks=(LinesAndPlan,),
    )
    assert [result.global_step for result in results] == [32, 32]
    for result in results:
        lines, plan, _ = result.seen[0]
        assert not plan.left_out
        assert not [line for line in lines if "leaves out batches" in line]


def test_the_first_worker_at_max_steps_ends_the_training(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = fit(diloco_ranks, tmp_path, max_steps=10, paces={0: 0.012, 1: 0.002}, min_steps=10)
    assert results[1].global_step == 10
    assert results[0].global_step < 10
    assert same_weights(results)


class StopsRankOne(Callback):
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 5:
            trainer.should_stop = True


class StopsRankZeroAfterValidation(Callback):
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            trainer.should_stop = True


@pytest.mark.parametrize("stops", [pytest.param(StopsRankOne, marks=pytest.mark.slow), StopsRankZeroAfterValidation])
def test_one_worker_that_stops_stops_all(stops: Any, diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = fit(diloco_ranks, tmp_path, max_steps=500, callbacks=(stops,), limit_val_batches=1, val_check_interval=8)
    assert max(result.global_step for result in results) < 100
    assert same_weights(results)


def test_all_validate_the_global_weights_together(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = fit(
        diloco_ranks,
        tmp_path,
        model=measured,
        max_epochs=2,
        limit_val_batches=1.0,
        val_check_interval=8,
        options=ROUNDS,
    )
    assert results[0].notes == results[1].notes  # the sums of all weights, at each validation batch
    assert len(results[0].notes) == 2 * 2 * 2  # two epochs, two validations in each, two batches
    for result in results:
        assert result.metrics["of_metric"] == pytest.approx(1.5)
        assert result.metrics["of_number"] == pytest.approx(1.5)
    assert results[0].metrics["validation_loss"] == results[1].metrics["validation_loss"]


def impatient() -> EarlyStopping:
    return EarlyStopping("validation_loss", patience=1, min_delta=1e9)


@pytest.mark.parametrize("interval", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_early_stopping_is_of_all_at_once(interval: float, diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = fit(
        diloco_ranks,
        tmp_path,
        model=measured,
        max_epochs=50,
        callbacks=(impatient,),
        limit_val_batches=1.0,
        val_check_interval=interval,
    )
    assert results[0].epoch == results[1].epoch < 4
    assert same_weights(results)


class KeepsOwnWeights(Callback):
    """Notes the global weights' checkpoint, and whether this rank's own weights were put back."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 6 and trainer.global_rank == 0:
            before = {name: value.clone() for name, value in pl_module.state_dict().items()}
            saved = trainer.strategy.lightning_module_state_dict()
            after = pl_module.state_dict()
            self.seen.append(all(torch.equal(before[name], after[name]) for name in before))
            self.seen.append(all(torch.equal(saved[name], after[name]) for name in before))


def test_a_checkpoint_amid_a_round_has_the_global_weights(diloco_ranks: RankPool, tmp_path: Path) -> None:
    fast, _ = fit(diloco_ranks, tmp_path, max_steps=8, callbacks=(KeepsOwnWeights,))
    assert fast.seen[0] == [True, False]


def keeper(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)


def test_training_goes_on_from_a_checkpoint(diloco_ranks: RankPool, tmp_path: Path) -> None:
    """With equal workers and equal steps there is only one way to go on, if all of the state is kept."""
    folder = str(tmp_path / "kept")
    arguments: dict[str, Any] = {
        "options": {"inner_steps": 4, "equal_steps": True},
        "paces": None,
        "enable_checkpointing": True,
        "callbacks": (partial(keeper, folder),),
    }
    whole = fit(diloco_ranks, tmp_path / "a", max_epochs=2, **arguments)
    path = f"{folder}/epoch=0.ckpt"
    rest = fit(diloco_ranks, tmp_path / "b", max_epochs=2, ckpt_path=path, **arguments)
    kept = torch.load(path, weights_only=True)["lightning_bytescheduler.diloco"]
    assert kept["rounds"]["round"] == 4
    assert [result.rounds for result in [*whole, *rest]] == [8, 8, 4, 4]
    assert same_weights([*whole, *rest])


def test_training_goes_on_with_another_number_of_workers(diloco_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    arguments: dict[str, Any] = {"enable_checkpointing": True, "callbacks": (partial(keeper, folder),)}
    fit(diloco_ranks, tmp_path / "a", max_epochs=1, **arguments)
    more: dict[str, Any] = {"options": ROUNDS, "model": calm_tower, "default_root_dir": str(tmp_path / "b")}
    alone, _ = diloco_ranks.run(fit_alone, max_epochs=2, ckpt_path=f"{folder}/epoch=0.ckpt", **arguments, **more)
    assert alone.epoch == 2
    assert alone.rounds >= 4
