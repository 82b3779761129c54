"""Steps as DDP's, in place of overlapped ones or between them, leave every bit."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch.optim import AdamW

from lightning_bytescheduler.gradients.merged_buckets import MergedBuckets
from lightning_bytescheduler.gradients.mode_trial import ModeTrial
from lightning_bytescheduler.strategies import scheduled_gradients
from tests.parity.checks import DDP, assert_same, train_on
from tests.parity.test_training import MixedTypes
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.01)


def run_with_trial(rank: int, recipe: Recipe, prefers_ddp: bool, **trial: int) -> Outcome:
    """A fit whose trial is short, and ends as it is told to on rank 0 and otherwise on the others."""
    make = partial(ModeTrial, **trial)
    with (
        patch.object(scheduled_gradients, "ModeTrial", make),
        patch.object(ModeTrial, "prefers_ddp", lambda _: prefers_ddp == (rank == 0)),
    ):
        return train(rank, recipe, Run(options={**SIZES, "mode": "auto"}))


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=partial(Tower, optimizer=adamw)),
        Recipe(model=partial(MixedTypes, optimizer=adamw)),
        Recipe(model=Tower, trainer={"accumulate_grad_batches": 2}),
        Recipe(model=Tower, trainer={"gradient_clip_val": 0.05}),
        Recipe(model=Tower, ddp={"find_unused_parameters": True}),
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
    send = MergedBuckets._send

    def counted(self: MergedBuckets) -> None:
        counts.append(len(self._waiting))
        send(self)

    with patch.object(MergedBuckets, "_send", counted):
        train(rank, recipe, Run(options={**SIZES, "mode": "ddp", **ddp}))
    return counts


def test_buckets_of_a_size_that_was_chosen_are_not_merged(two_ranks: RankPool) -> None:
    counts = two_ranks.run(sent_together, recipe=Recipe(model=Tower), bucket_cap_mb=1e-4)[0]
    assert len(counts) > 100
    assert set(counts) == {1}


@pytest.mark.parametrize("prefers_ddp", [False, True])
def test_ranks_agree_on_what_rank_zero_found(two_ranks: RankPool, prefers_ddp: bool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=40)
    short: dict[str, Any] = {"warm_up": 4, "turn": 2, "turns": 4, "again_after": 12}
    ours = two_ranks.run(run_with_trial, recipe=recipe, prefers_ddp=prefers_ddp, **short)
    (ddp,) = train_on(two_ranks, recipe, DDP)
    assert_same(ddp, ours)
    # Steps 1 to 12 and 25 to 32 are the same in both cases: of these, 2 to 6, 9, 10, 25, 26, 29 and 30 overlap.
    expected = 11 + (0 if prefers_ddp else 20)
    for outcome in ours:
        assert outcome.statistics is not None
        assert outcome.statistics.overlapped_steps == expected
        assert outcome.plan is not None
        assert outcome.plan.as_ddp == prefers_ddp
