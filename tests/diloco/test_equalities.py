"""Cases in which DiLoCo must equal a method that is known to be right."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD, AdamW

from lightning_bytescheduler import DiLoCoStrategy
from tests.diloco.fits import SixOrTwo, calm_tower, diloco_trainer, fit_diloco
from tests.support.fit import Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

PLAIN = {"inner_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
"""Averages after every step, and takes the mean as it is."""


class Neighbours(Callback):
    """Checks each step against the optimizer's own: notes how far off the weights are, in units of the last place."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.stepped: dict[str, Tensor] = {}
        self.worst = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.before:
            for name, value in pl_module.named_parameters():
                largest = torch.maximum(self.before[name].abs(), self.stepped[name].abs())
                unit = torch.nextafter(largest, torch.tensor(torch.inf)) - largest
                self.worst = max(self.worst, float(((value.detach() - self.stepped[name]).abs() / unit).max()))
        self.before = {name: value.detach().clone() for name, value in pl_module.named_parameters()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.stepped = {name: value.detach().clone() for name, value in pl_module.named_parameters()}


@pytest.mark.filterwarnings("ignore:The `srun` command")
def test_one_worker_that_averages_after_each_step_is_the_inner_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    look = Neighbours()
    trainer = diloco_trainer(
        0, DiLoCoStrategy(**PLAIN), callbacks=[look], max_steps=10, devices=1, default_root_dir=str(tmp_path)
    )
    trainer.fit(Tower(optimizer=partial(AdamW, lr=0.01)))
    assert trainer.strategy.statistics.rounds == 10
    assert look.worst <= 1.0


def test_equal_workers_that_average_after_each_step_are_ddp(
    diloco_ranks: RankPool, two_ranks: RankPool, tmp_path: Path
) -> None:
    recipe = Recipe(model=calm_tower, steps=10)
    expected = two_ranks.run(train, recipe=recipe, run=Run(strategy="ddp"))
    actual = diloco_ranks.run(
        fit_diloco, options=PLAIN, model=calm_tower, max_steps=10, default_root_dir=str(tmp_path), same_seed=True
    )
    for ddp, diloco in zip(expected, actual, strict=True):
        for name, value in ddp.weights.items():
            torch.testing.assert_close(diloco.weights[name], value, rtol=1e-5, atol=1e-6)


class Keeps(Callback):
    """The weights at the start of each round and after its last step, before they are merged."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def _keep(self, pl_module: LightningModule) -> None:
        self.seen.append({name: value.detach().clone() for name, value in pl_module.named_parameters()})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % 4 == 0:
            self._keep(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % 4 == 0:
            self._keep(pl_module)


def test_the_outer_step_is_torchs_nesterov_on_the_mean_by_samples(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={"inner_steps": 4, "equal_steps": True, "outer_steps": 2},
        model=SixOrTwo,
        callbacks=(Keeps,),
        default_root_dir=str(tmp_path),
    )
    first, second = (result.seen[0] for result in results)
    weights = {name: value.clone().requires_grad_() for name, value in first[0].items()}
    outer = SGD(weights.values(), lr=0.7, momentum=0.9, nesterov=True)
    for round in range(2):
        start, ends = first[2 * round], (first[2 * round + 1], second[2 * round + 1])
        for name, weight in weights.items():
            torch.testing.assert_close(start[name], weight.detach(), rtol=1e-6, atol=1e-7)
            weight.grad = start[name] - (3 * ends[0][name] + ends[1][name]) / 4
        outer.step()
    for name, weight in weights.items():
        torch.testing.assert_close(results[0].weights[name], weight.detach(), rtol=1e-6, atol=1e-7)
