"""Gradients are tensors on their own, as with Lightning's ``"ddp"``, whatever they are used for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_bytescheduler.ddp.own_gradients import OwnGradients
from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.parity.own_gradients import OWN, HookKeeps, HookReads, HookReadsLater, HookWrites, SetGradients
from tests.support.cases import cases
from tests.support.fit import SIZES, Recipe, Run, differences
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


@contextmanager
def views_of_buckets(module: LightningModule) -> Iterator[None]:
    """Hand out DDP's own views, as gradient_as_bucket_view does."""
    with (
        patch.object(OwnGradients, "hand_over", lambda *_: None),
        patch.object(OwnGradients, "backward_pass", lambda _: nullcontext()),
    ):
        yield


@contextmanager
def means_stay_in_buckets(module: LightningModule) -> Iterator[None]:
    """Leave gradients that user code keeps as they were before the mean came."""
    end = OwnGradients._end

    def end_with_nothing_kept(gradients: OwnGradients) -> None:
        gradients._give_back()
        gradients._kept, gradients._copies = {}, {}
        end(gradients)

    with patch.object(OwnGradients, "_end", end_with_nothing_kept):
        yield


@pytest.mark.parametrize("model", cases(OWN, quick={"kept-list", "hook-writes", "hook-keeps"}))
def test_they_are_as_with_ddp(two_ranks: RankPool, model: Any) -> None:
    broken = Run(sabotage=means_stay_in_buckets if model is HookKeeps else views_of_buckets)
    ddp, ours, without = train_on(two_ranks, Recipe(model=model, steps=12), DDP, Run(), broken)
    assert_same(ddp, ours)
    assert any(differences(one, other) for one, other in zip(ddp, without, strict=True))
    if model in (HookReads, HookWrites):
        assert_overlapped(ours, share=0.9)


@pytest.mark.parametrize("options", [{"mode": "ddp"}, {"cross_barrier": False}], ids=str)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=name, marks=() if model in (HookKeeps, SetGradients) else pytest.mark.slow)
        for name, model in OWN.items()
    ],
)
def test_so_they_are_where_backward_passes_wait(two_ranks: RankPool, model: Any, options: dict[str, Any]) -> None:
    ddp, ours = train_on(two_ranks, Recipe(model=model, steps=12), DDP, Run(options={**SIZES, **options}))
    assert_same(ddp, ours)


def test_a_hook_that_begins_to_read_later_is_warned_of(two_ranks: RankPool) -> None:
    ddp, ours = train_on(two_ranks, Recipe(model=HookReadsLater, steps=12), DDP, Run())
    for one, other in zip(ddp, ours, strict=True):
        assert one.losses == other.losses
        assert one.notes[2:] == other.notes[2:], "all but the two looks of the first such pass"
    assert len(ours[0].notes) == 2 * (12 - 5)
    assert sum("looked at gradients of other layers" in warning for warning in ours[0].warnings) == 1


class SeesNoCopies(Callback):
    """Fails where gradients have got other memory, though none was kept."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        beside = {key: id(gradient) for key, (_, gradient) in own_of(strategy)._beside.items()}
        if trainer.global_step == 4:
            self.before = beside
        assert trainer.global_step < 4 or beside == self.before


def own_of(strategy: Any) -> OwnGradients:
    gradients: OwnGradients = strategy.fit.own_gradients
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("clipped", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_nothing_is_copied_where_they_are_not_kept(two_ranks: RankPool, clipped: dict[str, Any]) -> None:
    recipe = Recipe(model=Tower, steps=12, trainer=clipped, callbacks=(SeesNoCopies,))
    runs = [Run(), Run(options={**SIZES, "mode": "ddp"})]
    ours, _ = train_on(two_ranks, recipe, *runs)
    assert_overlapped(ours)
