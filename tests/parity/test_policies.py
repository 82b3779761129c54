"""Whatever the policy, the weights are DDP's; and each policy sends other pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from lightning_bytescheduler.scheduler.policies import Arrangement, BucketFacts, LinkCost, SchedulingPolicy
from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

BUCKETS = {"bucket_cap_mb": SIZES["bucket_cap_mb"]}
tower = partial(Tower, optimizer=partial(AdamW, lr=0.01))


def largest_first(bucket: BucketFacts) -> int:
    return -bucket.size


class Ragged(SchedulingPolicy):
    """Pieces of other sizes in each step, in an order that changes, and wanted otherwise by each rank."""

    name = "ragged"
    observes = True
    is_tuned = False
    plans = 0

    def arrange(self, buckets: Sequence[BucketFacts], link: LinkCost | None) -> Mapping[int, Arrangement]:
        assert link is not None
        assert all(bucket.ready is not None and bucket.needed is not None for bucket in buckets)
        self.plans += 1
        return {bucket.index: self.piece(bucket, self.plans) for bucket in buckets}

    def arranged(self, bucket: BucketFacts) -> Arrangement:
        return self.piece(bucket, 3)

    @staticmethod
    def piece(bucket: BucketFacts, plans: int) -> Arrangement:
        first = min(17 * plans, bucket.size - 1)
        return Arrangement((bucket.index * 7) % 5, (first, bucket.size - first) if first else None)


def test_the_weights_are_ddps(two_ranks: RankPool) -> None:
    recipe = Recipe(model=tower, steps=10)
    policies: dict[str, dict[str, Any]] = {
        "fifo": BUCKETS,
        "p3": {**BUCKETS, "partition_size": 150},
        "tictac": BUCKETS,
        "us-byte": dict(SIZES),
    }
    runs = [Run(options={**options, "policy": name}) for name, options in policies.items()]
    runs += [Run(options={**SIZES, "policy": largest_first}), Run(options={**SIZES, "policy": Ragged()})]
    ddp, *ours = train_on(two_ranks, recipe, DDP, *runs)
    for outcomes in ours:
        assert_same(ddp, outcomes)
        assert_overlapped(outcomes)
    fifo, p3, tictac, *_, ragged = (rank_0.statistics.sub_tasks for rank_0, _ in ours if rank_0.statistics)
    assert fifo == tictac < ragged < p3


def test_halves_of_a_bucket_are_cut_alike(two_ranks: RankPool) -> None:
    recipe = Recipe(model=tower, trainer={"gradient_clip_val": 0.05}, steps=10)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(options={**SIZES, "policy": Ragged()}))
    assert_overlapped(ours)
    for name, weight in ddp[0].weights.items():
        assert torch.equal(ours[0].weights[name], ours[1].weights[name])
        torch.testing.assert_close(ours[0].weights[name], weight, rtol=1e-5, atol=1e-6)  # norms are rounded otherwise


def test_steps_that_wait_for_all_gradients_are_ordered_too(two_ranks: RankPool) -> None:
    options = {**BUCKETS, "cross_barrier": False, "policy": "p3"}
    assert_same(*train_on(two_ranks, Recipe(model=tower, steps=10), DDP, Run(options=options)))
