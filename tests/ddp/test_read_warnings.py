"""The hook that looks at weights between steps is named, in the plan and, if it is a habit, in one line."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_bytescheduler.ddp.reads import SeenReads
from tests.parity.checks import assert_overlapped, train_on
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


class Reads(Callback):
    """Reads in one step out of ``every``."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._look(pl_module)

    def _look(self, pl_module: Any) -> None:
        pl_module.notes.append(float(pl_module.first.weight.sum()))


class ReadsGradients(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.notes.append(float(pl_module.first.weight.grad.sum()))


class ReadsNothing(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.notes.append(pl_module.first.weight.shape[0])


@pytest.mark.parametrize(
    ("callback", "readers"),
    [
        (Reads, {"on_train_batch_end": 11}),
        (partial(Reads, 6), {"on_train_batch_end": 2}),
        (ReadsGradients, {"on_before_optimizer_step": 11}),
    ],
)
def test_readers_are_named(two_ranks: RankPool, callback: Any, readers: dict[str, int]) -> None:
    (ours,) = train_on(two_ranks, Recipe(model=Tower, steps=12, callbacks=(callback,)), Run(network="late"))
    for outcome in ours:
        assert outcome.plan is not None
        assert {why.split()[0]: steps for why, steps in outcome.plan.waits.items()} == readers


def test_a_callback_that_reads_nothing_costs_nothing(two_ranks: RankPool) -> None:
    (ours,) = train_on(two_ranks, Recipe(model=Tower, callbacks=(ReadsNothing,)), Run(network="held"))
    assert_overlapped(ours)
    assert ours[0].plan is not None
    assert ours[0].plan.waits == {}


@pytest.mark.parametrize(("steps", "lines"), [(19, 0), (50, 1)])
def test_a_habit_is_worth_one_line(steps: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    module = Tower()
    module._current_fx_name = "on_train_batch_end"
    reads = SeenReads(module)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        for _ in range(steps):
            reads.waited_early()
    said = [record.getMessage() for record in caplog.records if "between steps" in record.getMessage()]
    assert len(said) == lines
    assert all("because on_train_batch_end looks at weights" in line for line in said)
    assert list(reads.waits.values()) == [steps]


def test_validation_is_not_meant() -> None:
    reads = SeenReads(Tower().eval())
    reads.waited_early()
    assert not reads.waits


def test_a_parameter_that_has_left_the_module_is_warned_of_too() -> None:
    module, left = Tower(), nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match=r"read 'first\.weight', 'a parameter that the module no longer has', for"):
        SeenReads(module).read_unseen([next(module.first.parameters()), left], 3)
