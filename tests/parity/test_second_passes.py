"""A backward pass that comes after the one whose gradients are under way adds to what DDP would add to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import LightningModule

from lightning_bytescheduler.ddp.fit import Fit
from tests.parity.checks import DDP, assert_same, assert_same_as_ddp, train_on
from tests.parity.sabotage import blind_to_gradients
from tests.parity.second_passes import ADDS, AddsPenalty, Smallest
from tests.support.cases import cases
from tests.support.fit import SIZES, Recipe, Run, differences
from tests.support.models import Tower
from tests.support.rank_pool import RankPool


@contextmanager
def passes_meet_nothing(module: LightningModule) -> Iterator[None]:
    """Let every backward pass add to whatever is under way."""
    with patch.object(Fit, "backward_pass", lambda _: nullcontext()):
        yield


@pytest.mark.parametrize("model", cases(ADDS, quick={"after-backward", "two-losses", "added-by-hand"}))
def test_what_it_adds_to_is_the_mean(two_ranks: RankPool, model: Any) -> None:
    broken = {"added-by-hand": blind_to_gradients}.get(next(k for k, v in ADDS.items() if v is model))
    recipe = Recipe(model=model, steps=12)
    sizes = {} if model is Smallest else dict(SIZES)
    runs = [
        DDP,
        Run(options={**sizes, "mode": "overlapped"}),
        Run(options={**sizes, "mode": "overlapped"}, sabotage=broken or passes_meet_nothing),
    ]
    ddp, ours, without = train_on(two_ranks, recipe, *runs)
    assert_same(ddp, ours)
    assert any(differences(one, other) for one, other in zip(ddp, without, strict=True))


@pytest.mark.parametrize("options", [{"mode": "ddp"}, {"cross_barrier": False}], ids=str)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=name, marks=() if name in ("before-step", "two-losses") else pytest.mark.slow)
        for name, model in ADDS.items()
    ],
)
def test_so_it_is_where_backward_passes_wait(two_ranks: RankPool, model: Any, options: dict[str, Any]) -> None:
    sizes = {} if model is Smallest else dict(SIZES)
    ddp, ours = train_on(two_ranks, Recipe(model=model, steps=12), DDP, Run(options={**sizes, **options}))
    assert_same(ddp, ours)


def test_it_is_said(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, steps=12, callbacks=(AddsPenalty,))
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=passes_meet_nothing)
    assert ours[0].plan is not None
    assert ours[0].plan.opened_for == {"another backward pass": 11}
    assert {why.split()[0]: steps for why, steps in ours[0].plan.waits.items()} == {"on_after_backward": 11}
