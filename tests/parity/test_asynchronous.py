"""``staleness``: not exact, and as far from it as it says."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD

from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.exceptions import OptionError
from tests.parity.checks import DDP, train_on
from tests.support.fit import Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.servers import started_servers

STALE: dict[str, Any] = {"architecture": "ps", "servers": 1, "mode": "auto"}


class Slow(Callback):
    """The second rank is; both note when they take a step."""

    taken: list[float]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        Slow.taken = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank:
            time.sleep(0.05)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        Slow.taken.append(time.time())
        if batch_idx == 4:
            with tempfile.TemporaryDirectory() as folder:
                trainer.save_checkpoint(os.path.join(folder, "one.ckpt"))
            everybodys = module.all_gather(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
            assert torch.equal(*everybodys), "all meet where a checkpoint is made"


class Fails(Callback):
    """The second rank does, in a step."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank and batch_idx == 3:
            raise ValueError("the second rank has had enough")


class Thaws(Callback):
    """A layer that is not alike on the ranks at first, is frozen as the fit begins, and trained later on."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        parameter = next(module.parameters()).requires_grad_(False)
        parameter.fill_(trainer.global_rank + 3.0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        parameter = next(module.parameters())
        if batch_idx == 0:
            assert (parameter == 3.0).all(), "the first rank's, as with DDP"
        parameter.requires_grad_(batch_idx == 2)


def train_asynchronously(
    rank: int, recipe: Recipe, staleness: int, fails: bool, failing: type[Callback] = Fails
) -> Any:
    with started_servers(1 if rank == 0 else 0):
        callbacks = (Slow, failing) if fails else (Slow,)
        try:
            outcome = train(
                rank,
                replace(recipe, callbacks=callbacks),
                Run(options={**STALE, "staleness": staleness}, network="plain"),
            )
        except Exception as error:
            if not fails:
                raise
            return f"{type(error).__name__}: {error}"
    return outcome, list(Slow.taken)


def furthest_ahead(fast: list[float], slow: list[float]) -> int:
    """By how many steps the fast one was ahead."""
    return max(step - sum(time < now for time in slow) for step, now in enumerate(fast, 1))


def test_without_staleness_steps_are_those_of_summed_gradients_and_with_it_the_faster_goes_ahead(
    two_ranks: RankPool,
) -> None:
    # Both ranks' steps count in full: DDP's mean of gradients at twice the rate.
    twice = Recipe(model=partial(Tower, optimizer=partial(SGD, lr=0.02)), steps=8)
    once = replace(twice, model=partial(Tower, optimizer=partial(SGD, lr=0.01)))
    (expected,) = train_on(two_ranks, twice, DDP)
    exact = two_ranks.run(train_asynchronously, recipe=once, staleness=0, fails=False)
    for outcome, _ in exact:
        for name, weight in outcome.weights.items():
            assert torch.allclose(weight, expected[0].weights[name], atol=1e-5), name
        assert "NOT exact" in repr(outcome.plan)
        assert outcome.plan.staleness == 0
    stale = two_ranks.run(train_asynchronously, recipe=once, staleness=3, fails=False)
    weights = [outcome.weights for outcome, _ in stale]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), "all meet at the end"
        assert not torch.isnan(weight).any()
    assert furthest_ahead(*(taken for _, taken in exact)) <= 1
    assert 2 <= furthest_ahead(*(taken for _, taken in stale)) <= 4


def test_a_rank_that_fails_is_named_on_the_other(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, steps=8)
    first, second = two_ranks.run(train_asynchronously, recipe=recipe, staleness=1, fails=True)
    assert "Rank 1" in first
    assert "the second rank has had enough" in first
    assert second.startswith("ValueError")


def test_what_is_thawed_later_is_refused_as_each_rank_would_train_its_own(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, steps=8)
    for error in two_ranks.run(train_asynchronously, recipe=recipe, staleness=1, fails=True, failing=Thaws):
        assert "requires gradients now" in error


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"architecture": "allreduce", "servers": 0}, "staleness=2"),
        ({"servers": 0}, "servers=0"),
        ({"staleness": -1}, "staleness=-1"),
        ({"compression": "int8"}, "compression='int8'"),
        ({"mode": "ddp"}, "mode='ddp'"),
        ({"weighting": "samples"}, "weighting='samples'"),
        ({"partition_size": 1000}, "partition_size=1000"),
        ({"placement": "djb2"}, "placement='djb2'"),
        ({"group": "node"}, "group='node'"),
    ],
)
def test_what_says_how_gradients_are_averaged_does_not_go_with_it(given: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        ByteSchedulerStrategy(**{"architecture": "ps", "servers": 1, "staleness": 2, **given})
