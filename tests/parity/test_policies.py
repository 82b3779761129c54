"""Whatever the policy, the weights are DDP's; and each policy sends other pieces."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim import AdamW

from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

BUCKETS = {"bucket_cap_mb": SIZES["bucket_cap_mb"]}
tower = partial(Tower, optimizer=partial(AdamW, lr=0.01))


def test_the_weights_are_ddps(two_ranks: RankPool) -> None:
    recipe = Recipe(model=tower, steps=10)
    policies: dict[str, dict[str, Any]] = {
        "fifo": BUCKETS,
        "p3": {**BUCKETS, "partition_size": 150},
        "bytescheduler": dict(SIZES),
    }
    runs = [Run(options={**options, "policy": name}) for name, options in policies.items()]
    ddp, *ours = train_on(two_ranks, recipe, DDP, *runs)
    for outcomes in ours:
        assert_same(ddp, outcomes)
        assert_overlapped(outcomes)
    fifo, p3, own = (rank_0.statistics.sub_tasks for rank_0, _ in ours if rank_0.statistics)
    assert fifo < own < p3


def test_steps_that_wait_for_all_gradients_are_ordered_too(two_ranks: RankPool) -> None:
    options = {**BUCKETS, "cross_barrier": False, "policy": "p3"}
    assert_same(*train_on(two_ranks, Recipe(model=tower, steps=10), DDP, Run(options=options)))
