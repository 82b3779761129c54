"""Code that reads weights between steps is named in the plan, and in one line if it does so often."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_bytescheduler.ddp import reads as reads_module
from lightning_bytescheduler.ddp.reads import SeenReads
from tests.parity.checks import assert_overlapped, train_on
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


class Trainer:
    training = True
    global_step = 0


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


class Notes:
    """What a callback of that kind would do, without a fit."""

    def __init__(self, reads: SeenReads) -> None:
        self.reads = reads

    def note(self) -> None:
        self.reads.waited_early()


class Habit(Callback):
    def on_train_batch_end(self, reads: Any, *_: Any) -> None:
        Notes(reads).note()


@pytest.mark.parametrize(
    ("callback", "readers"),
    [
        (Reads, {"Reads.on_train_batch_end": 11}),
        (partial(Reads, 6), {"Reads.on_train_batch_end": 2}),
        (ReadsGradients, {"ReadsGradients.on_before_optimizer_step": 11}),
    ],
)
def test_readers_are_named(two_ranks: RankPool, callback: Any, readers: dict[str, int]) -> None:
    (ours,) = train_on(two_ranks, Recipe(model=Tower, steps=12, callbacks=(callback,)), Run(network="late"))
    for outcome in ours:
        assert outcome.plan is not None
        assert dict(outcome.plan.early_readers) == readers


def test_a_callback_that_reads_nothing_costs_nothing(two_ranks: RankPool) -> None:
    (ours,) = train_on(two_ranks, Recipe(model=Tower, callbacks=(ReadsNothing,)), Run(network="held"))
    assert_overlapped(ours)
    assert ours[0].plan is not None
    assert ours[0].plan.early_readers == {}


@pytest.mark.parametrize(("every", "lines"), [(1, 1), (3, 0)])
def test_a_habit_is_worth_one_line(every: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = Trainer()
    reads = SeenReads({}, trainer=trainer)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        for step in range(200):
            trainer.global_step = step
            if step % every == 0:
                Habit().on_train_batch_end(reads)
    said = [record.getMessage() for record in caplog.records if "between steps" in record.getMessage()]
    assert len(said) == lines
    assert all("Habit.on_train_batch_end looks at weights" in line for line in said)
    assert reads.steps == {"Habit.on_train_batch_end": len(range(0, 200, every))}


def test_validation_is_not_meant() -> None:
    trainer: Any = Trainer()
    trainer.training = False
    reads = SeenReads({}, trainer=trainer)
    Habit().on_train_batch_end(reads)
    assert reads.steps == {}
    assert reads_module._reader(None) is None
