"""Steps as DDP's, in place of overlapped ones or between them, leave every bit."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch.optim import AdamW

from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.steps import MergedStep
from lightning_bytescheduler.tuning import credit_tuner
from lightning_bytescheduler.tuning.search import CreditTuning
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP
from tests.parity.checks import DDP, assert_same, train_on
from tests.parity.test_training import MixedTypes
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.01)


class Restless(CreditTuning):
    """Changes the mode every few steps, however long they take."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._every = itertools.cycle([1, 2, 3])
        self._left = 1

    @property
    def is_settled(self) -> bool:
        return False

    def step_took(self, step: int, seconds: float, *, hideable: float | None = None) -> None:
        self._left -= 1
        if not self._left:
            self._left = next(self._every)
            self._current = self._start if self._current.is_plain_ddp else PLAIN_DDP


def run_restlessly(rank: int, recipe: Recipe) -> tuple[Outcome, list[bool]]:
    """A fit whose mode changes as rank 0 wants, and the mode of each step."""
    modes: list[bool] = []
    begin_step = Fit._begin_step

    def watched(fit: Fit) -> None:
        modes.append(fit.mode.ddp_mode)
        begin_step(fit)

    with (
        patch.object(credit_tuner, "CreditTuning", Restless),
        patch.object(Fit, "_begin_step", watched),
    ):
        outcome = train(rank, recipe, Run(options={**SIZES, "mode": "auto", "tuning": False}))
    return outcome, modes


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=partial(Tower, optimizer=adamw)),
        Recipe(model=partial(MixedTypes, optimizer=adamw)),
        Recipe(model=Tower, trainer={"accumulate_grad_batches": 2}),
        Recipe(model=Tower, trainer={"gradient_clip_val": 0.05}),
        pytest.param(Recipe(model=Tower, ddp={"find_unused_parameters": True}), marks=pytest.mark.slow),
    ],
)
def test_steps_as_ddps(two_ranks: RankPool, recipe: Recipe) -> None:
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(options={**SIZES, "mode": "ddp"}))
    assert_same(ddp, ours)
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_updates == 0
    assert ours[0].statistics.bytes_sent > 0
    assert ours[0].plan is not None
    assert ours[0].plan.as_ddp


def test_synchronised_steps_are_ddps_too(two_ranks: RankPool) -> None:
    run = Run(options={**SIZES, "mode": "ddp", "cross_barrier": False})
    ddp, ours = train_on(two_ranks, Recipe(model=Tower), DDP, run)
    assert_same(ddp, ours)
    assert ours[0].plan is not None
    assert ours[0].statistics is not None
    assert ours[0].plan.as_ddp
    assert not ours[0].plan.overlapped
    (scheduled,) = train_on(two_ranks, Recipe(model=Tower), Run(options={**SIZES, "cross_barrier": False}))
    assert scheduled[0].plan is not None
    assert scheduled[0].statistics is not None
    assert not scheduled[0].plan.as_ddp
    assert ours[0].statistics.sub_tasks < scheduled[0].statistics.sub_tasks / 2, "only the first step's are cut"


def sent_together(rank: int, recipe: Recipe, **ddp: Any) -> list[int]:
    """How many buckets each message of some steps as DDP's had."""
    counts: list[int] = []
    send = MergedStep._send_waiting

    def counted(self: MergedStep) -> None:
        counts.append(len(self._waiting))
        send(self)

    with patch.object(MergedStep, "_send_waiting", counted):
        train(rank, recipe, Run(options={**SIZES, "mode": "ddp", **ddp}))
    return counts


def test_buckets_of_a_size_that_was_chosen_are_not_merged(two_ranks: RankPool) -> None:
    counts = two_ranks.run(sent_together, recipe=Recipe(model=Tower, steps=20), bucket_cap_mb=1e-4)[0]
    assert len(counts) > 100
    assert set(counts) == {1}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(model=partial(MixedTypes, optimizer=adamw), steps=20), marks=pytest.mark.slow),
        Recipe(model=Tower, trainer={"accumulate_grad_batches": 2}, steps=20),
        pytest.param(
            Recipe(model=Tower, trainer={"limit_val_batches": 2, "val_check_interval": 3}, steps=20),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_change_together_as_rank_zero_wants(two_ranks: RankPool, recipe: Recipe) -> None:
    results = two_ranks.run(run_restlessly, recipe=recipe)
    ours = [outcome for outcome, _ in results]
    (ddp,) = train_on(two_ranks, recipe, DDP)
    assert_same(ddp, ours)
    (_, zero), (_, one) = results
    assert zero == one, "the same on both ranks in every step"
    assert sum(a != b for a, b in itertools.pairwise(zero)) >= len(zero) // 5
    assert ours[0].statistics is not None
    assert ours[0].statistics.overlapped_steps == zero[1:].count(False), "the first is synchronised"


def test_a_fit_begins_as_ddp_and_says_why(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=24)
    run = Run(options={**SIZES, "mode": "auto", "tuning": False}, network="plain")
    ddp, ours = train_on(two_ranks, recipe, DDP, run)
    assert_same(ddp, ours)
    for outcome in ours:
        assert outcome.plan is not None
        assert outcome.plan.pace
        assert f"because {outcome.plan.pace}" in repr(outcome.plan)
        if outcome.plan.as_ddp:  # unless this machine is so busy that overlap was tried
            assert outcome.plan.summary() == f"steps are taken as DDP takes them, because {outcome.plan.pace}."


def test_steps_that_cannot_overlap_are_ddps_unless_parts_were_asked_for(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, ddp={"gradient_as_bucket_view": False}, steps=8)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(options={**SIZES, "mode": "auto"}))
    assert_same(ddp, ours)
    assert ours[0].plan is not None
    assert not ours[0].plan.overlapped
    assert ours[0].plan.as_ddp
    assert ours[0].plan.summary().startswith("steps are synchronised, and taken as DDP takes them, because grad")
