"""Credit, partition size and mode change every few steps, and every bit is DDP's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch.optim import AdamW

from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.tuning import credit_tuner
from lightning_bytescheduler.tuning.search import CreditTuning
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, TuningPoint
from tests.parity.checks import DDP, assert_same, train_on
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.01)

_POINTS = [
    TuningPoint(credit=100, partition_size=100),
    TuningPoint(credit=5000, partition_size=70),
    PLAIN_DDP,
    TuningPoint(credit=900, partition_size=900),
    TuningPoint(credit=301, partition_size=17),
]


class Restless(CreditTuning):
    """Goes on to another point every few steps, whatever they take, and says now and then that it has settled."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._points = itertools.cycle(_POINTS)
        self._every = itertools.cycle([1, 2, 3])
        self._left = 1
        self._calls = 0

    @property
    def is_settled(self) -> bool:
        return self._calls % 40 >= 30

    def step_took(self, step: int, seconds: float, *, hideable: float | None = None) -> None:
        assert seconds > 0
        self._calls += 1
        self._left -= 1
        if not self._left:
            self._left = next(self._every)
            self._current = next(self._points)
            self.in_force_from = step + 2


def run_restlessly(rank: int, recipe: Recipe, options: dict[str, Any]) -> tuple[Outcome, list[tuple[int, int]]]:
    """Also returns the sizes in force at each forward pass; credit 0 where it is as DDP's."""
    seen: list[tuple[int, int]] = []
    begin_forward = Fit.begin_forward

    def watched(fit: Fit, *batch: Any) -> None:
        begin_forward(fit, *batch)
        core = fit.wire.core
        seen.append((0, 0) if fit.mode.ddp_mode else (core.credit, core.partition_size))

    with (
        patch.object(credit_tuner, "CreditTuning", Restless),
        patch.object(Fit, "begin_forward", watched),
    ):
        tuned = {**SIZES, "mode": "auto", "tuning": "both", **options}
        recipe = replace(recipe, callbacks=(credit_tuner.CreditTuner,))
        return train(rank, recipe, Run(options=tuned)), seen


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param(Recipe(model=partial(Tower, optimizer=adamw), steps=36), {}, marks=pytest.mark.slow),
        (Recipe(model=partial(Tower, optimizer=adamw), steps=24), {"servers": 0}),
        pytest.param(Recipe(model=Tower, trainer={"accumulate_grad_batches": 2}, steps=24), {}, marks=pytest.mark.slow),
        # Reduce-scatter, and nothing is really clipped.
        pytest.param(Recipe(model=Tower, trainer={"gradient_clip_val": 1e6}, steps=24), {}, marks=pytest.mark.slow),
    ],
)
def test_every_bit_is_ddps_while_everything_changes(
    two_ranks: RankPool, recipe: Recipe, options: dict[str, Any]
) -> None:
    results = two_ranks.run(run_restlessly, recipe=recipe, options=options)
    ours = [outcome for outcome, _ in results]
    (ddp,) = train_on(two_ranks, recipe, DDP)
    assert_same(ddp, ours)
    (_, zero), (_, one) = results
    assert zero == one, "the same on both ranks in every step"
    assert set(zero) >= set(_POINTS)
    changes = sum(a != b for a, b in itertools.pairwise(zero))
    assert changes >= len(zero) // 8
    assert ours[0].statistics is not None
    assert 0 < ours[0].statistics.overlapped_steps < recipe.steps - 5, "some steps overlapped, some were DDP's"
