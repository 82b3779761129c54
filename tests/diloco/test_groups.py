"""Workers of two ranks each: what they train, when they stop, and what becomes of their weights."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_bytescheduler.diloco.round_record import read_rounds
from tests.diloco.fits import Measured, Result, calm_tower, fit_diloco, plain_sgd
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.rank_pool import RankPool

GROUPS = {"inner": {"strategy": "ddp", "size": 2}}
SCHEDULED = {"inner": {"strategy": "bytescheduler", "size": 2, **SIZES, "mode": "overlapped"}}
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
SLOW_GROUP = {0: 0.01, 1: 0.01, 2: 0.05, 3: 0.05}
"""Seconds that a step takes on each rank: the second worker is slow."""

measured = partial(Measured, optimizer=plain_sgd, dropout=0.0)


def fit(ranks: RankPool, folder: Path, **arguments: Any) -> list[Result]:
    defaults: dict[str, Any] = {"model": calm_tower, "default_root_dir": str(folder)}
    return ranks.run(fit_diloco, **{**defaults, **arguments})


def same_weights(results: list[Result]) -> bool:
    first = results[0].weights
    return all(torch.equal(result.weights[name], value) for result in results for name, value in first.items())


def units_apart(start: dict[str, Tensor], expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    """How far off weights are, in units of the last place of the larger of what they were and what they should be."""
    worst = 0.0
    for name, before in start.items():
        largest = torch.maximum(before.abs(), expected[name].abs())
        unit = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
        worst = max(worst, float(((actual[name] - expected[name]).abs() / unit).max()))
    return worst


@pytest.fixture(scope="module")
def ddp_of_two(two_ranks: RankPool) -> tuple[Outcome, Outcome]:
    """Before the first step, and after ten."""
    recipes = [Recipe(model=calm_tower, steps=10, trainer={"limit_train_batches": limit}) for limit in (0, 1.0)]
    start, end = (two_ranks.run(train, recipe=recipe, run=Run(strategy="ddp"))[0] for recipe in recipes)
    return start, end


def test_groups_that_average_after_each_step_are_ddp_of_all(
    diloco_four_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    ddp_of_four: Outcome = four_ranks.run(train, recipe=Recipe(model=calm_tower, steps=12), run=Run(strategy="ddp"))[0]
    actual = fit(
        diloco_four_ranks, tmp_path, options={**PLAIN, **SCHEDULED, "inner_steps": 1}, max_steps=12, same_seed=True
    )
    assert same_weights(actual)
    assert [result.global_step for result in actual] == [12] * 4
    assert [result.samples for result in actual] == [2 * 12 * 4] * 4  # of a worker, in batches of 4 on each rank
    for name, value in ddp_of_four.weights.items():
        torch.testing.assert_close(actual[0].weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", [GROUPS, SCHEDULED], ids=["ddp", "bytescheduler"])
def test_one_worker_of_all_ranks_is_ddp(
    inner: dict[str, Any], diloco_ranks: RankPool, ddp_of_two: tuple[Outcome, Outcome], tmp_path: Path
) -> None:
    """In one round, so that the outer step rounds once: ``old - (old - new)`` is within a unit of ``new``."""
    start, expected = ddp_of_two
    actual = fit(diloco_ranks, tmp_path, options={**PLAIN, **inner, "inner_steps": 50}, max_steps=10)
    assert same_weights(actual)
    assert [result.rounds for result in actual] == [1, 1]
    assert units_apart(start.weights, expected.weights, actual[0].weights) <= 1.0


class NotesWeights(Callback):
    """The sum of all weights at the start of each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rounds = trainer.strategy.statistics.rounds
        self.seen.append((rounds, [value.detach().clone() for value in pl_module.parameters()]))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {**SCHEDULED, "inner_steps": 5, "fragments": 2, "overlap_steps": 2, "wire_dtype": "bf16"},
            id="bytescheduler",
        ),
        pytest.param(
            {**GROUPS, "inner_steps": 5, "fragments": 2, "overlap_steps": 2},
            id="ddp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_round_ends_at_the_same_step_on_all_ranks_of_a_worker(
    options: dict[str, Any], diloco_four_ranks: RankPool, tmp_path: Path
) -> None:
    results = fit(
        diloco_four_ranks, tmp_path, options=options, callbacks=(NotesWeights,), paces=SLOW_GROUP, max_epochs=2
    )
    assert same_weights(results)
    for leader, other in (results[:2], results[2:]):
        assert (leader.rounds, leader.samples, leader.global_step) == (other.rounds, other.samples, other.global_step)
        for (rounds, weights), (other_rounds, other_weights) in zip(leader.seen[0], other.seen[0], strict=True):
            assert rounds == other_rounds
            assert all(torch.equal(*both) for both in zip(weights, other_weights, strict=True))
    assert results[0].global_step == 2 * 8  # of 128 samples, in batches of 4 for each of four ranks
    assert results[2].global_step < 2 * 8
    rounds = read_rounds(tmp_path / "rounds.jsonl")
    assert {one.worker for round in rounds for one in round.workers} == {"worker0", "worker1"}
    samples = {name: sum(w.samples for r in rounds for w in r.workers if w.worker == name) for name in ("worker0",)}
    assert samples == {"worker0": results[0].samples}


def test_all_ranks_validate_together(diloco_four_ranks: RankPool, tmp_path: Path) -> None:
    results = fit(
        diloco_four_ranks,
        tmp_path,
        options={**GROUPS, "inner_steps": 4},
        model=measured,
        paces=SLOW_GROUP,
        max_epochs=1,
        limit_val_batches=1.0,
        val_check_interval=4,
    )
    for result in results:
        assert result.notes == results[0].notes  # the sums of all weights, at each validation batch
        assert result.metrics["of_metric"] == result.metrics["of_number"] == pytest.approx(2.5)
        assert result.metrics["validation_loss"] == results[0].metrics["validation_loss"]
    assert len(results[0].notes) == 2  # each rank's share is one batch, and the second validation is at the epoch's end


class StopsOneRank(Callback):
    """Sets ``should_stop`` on one rank only, at the place that ``when`` names."""

    def __init__(self, when: str) -> None:
        self.when = when

    def _stop(self, trainer: Trainer, when: str) -> None:
        if trainer.global_rank == 3 and self.when == when:
            trainer.should_stop = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 3:
            self._stop(trainer, "batch")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer, "epoch")


@pytest.mark.parametrize(
    "when", ["batch", *(pytest.param(one, marks=pytest.mark.slow) for one in ("validation", "epoch"))]
)
def test_a_rank_that_stops_takes_its_worker_along(when: str, diloco_four_ranks: RankPool, tmp_path: Path) -> None:
    results = fit(
        diloco_four_ranks,
        tmp_path,
        options={**GROUPS, "inner_steps": 4},
        callbacks=(partial(StopsOneRank, when),),
        max_epochs=20,
        limit_val_batches=1,
    )
    assert max(result.global_step for result in results) <= 8
    assert same_weights(results)


def keeper(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)


def fit_in_groups_or_not(rank: int, *, groups: bool, **arguments: Any) -> Result:
    options = {"inner_steps": 4, **(GROUPS if groups else {})}
    return fit_diloco(rank, options=options, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [True, False])
def test_training_goes_on_with_and_without_groups(groups: bool, diloco_four_ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "kept")
    arguments: dict[str, Any] = {
        "model": calm_tower,
        "enable_checkpointing": True,
        "callbacks": (partial(keeper, folder),),
        "default_root_dir": str(tmp_path),
    }
    run = partial(diloco_four_ranks.run, fit_in_groups_or_not, **arguments)
    first = run(groups=groups, max_epochs=1)
    path = f"{folder}/epoch=0.ckpt"
    kept = torch.load(path, weights_only=True)
    assert all(torch.equal(kept["state_dict"][name], value) for name, value in first[0].weights.items())
    rest = run(groups=not groups, max_epochs=2, ckpt_path=path)
    assert [result.epoch for result in rest] == [2] * 4
    assert sorted(os.listdir(folder)) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert same_weights(rest)


def test_a_machine_is_a_worker(diloco_four_ranks: RankPool, tmp_path: Path) -> None:
    results = fit(
        diloco_four_ranks,
        tmp_path,
        options={"inner": {"strategy": "ddp", "size": "node"}, "inner_steps": 4},
        max_steps=8,
    )
    assert same_weights(results)
    assert results[3].samples == 4 * 8 * 4
