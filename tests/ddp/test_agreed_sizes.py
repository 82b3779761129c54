"""Sizes are rank 0's on every rank, and larger where gradients are reduced in shards."""

from __future__ import annotations

from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.ddp import wire
from lightning_bytescheduler.ddp.wire import AgreedSizes, agree_on_sizes
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.tuning.sizes import LinkEstimate
from tests.support.rank_pool import RankPool, join_default_group, let_go
from tests.support.waiting import WAIT

LINK = LinkEstimate(alpha=2e-3, beta=1e-8)


FAR = LinkEstimate(alpha=0.12, beta=2e-8)


def _must_not_be_probed(*_: object) -> float:
    raise AssertionError("sizes and mode are given")


def agreed_over_long_ways(rank: int, world_size: int) -> list[AgreedSizes]:
    join_default_group(rank, world_size=world_size)
    groups = SchedulerGroups.create(timeout=timedelta(seconds=WAIT))
    found = []
    parameters = [torch.nn.Parameter(torch.zeros(8_000_000))]
    try:
        for link in (LINK, FAR):
            with (
                patch.object(wire, "probe_link", lambda *_, link=link, **__: link),
                patch.object(wire, "probe_start_up", lambda *_, link=link: link.alpha),
            ):
                for options in (SchedulerOptions(), SchedulerOptions(partition_size=1000, credit=5000)):
                    found.append(agree_on_sizes(groups, options, parameters, torch.device("cpu")))
        with (
            patch.object(wire, "probe_link", _must_not_be_probed),
            patch.object(wire, "probe_start_up", _must_not_be_probed),
        ):
            given = SchedulerOptions(partition_size=1000, credit=5000, mode="overlapped")
            assert not agree_on_sizes(groups, given, parameters, torch.device("cpu")).far
        served = agree_on_sizes(groups, options, parameters, torch.device("cpu"), architecture="ps")
        let_go()
    finally:
        groups.destroy(data_idle=True, control_idle=True)
        dist.destroy_process_group()
    return [*found, served]


def test_gradients_go_straight_over_long_ways(three_plain_ranks: RankPool) -> None:
    near, near_by_hand, far, far_by_hand, served = three_plain_ranks.run(agreed_over_long_ways, world_size=3)[0]
    assert not near.far
    assert not near_by_hand.far
    assert not served.far
    assert near.link == LINK
    assert far.far
    assert far_by_hand.far
    assert far.link == LinkEstimate(alpha=0.06, beta=2e-8), "two messages follow each other, not the ring's four"
    assert far.sizes.credit > 4 * far.sizes.partition_size, "several hide what each takes to start"


def agreed_on(rank: int) -> list[tuple[int, int, int]]:
    join_default_group(rank)
    groups = SchedulerGroups.create(timeout=timedelta(seconds=WAIT))
    found = []
    try:
        with patch.object(wire, "probe_link", lambda *_, **__: LINK):
            for in_shards, options in (
                (False, SchedulerOptions()),
                (rank == 0, SchedulerOptions()),  # rank 1 expects something else
                (True, SchedulerOptions(partition_size=1000 + rank, credit=5000)),
            ):
                parameters = [torch.nn.Parameter(torch.zeros(8_000_000))]
                agreed = agree_on_sizes(groups, options, parameters, torch.device("cpu"), in_shards=in_shards).sizes
                found.append((agreed.partition_size, agreed.credit, agreed.bucket_bytes))
        let_go()
    finally:
        groups.destroy(data_idle=True, control_idle=True)
        dist.destroy_process_group()
    return found


def test_sizes_are_those_of_rank_zero(two_plain_ranks: RankPool) -> None:
    first, second = two_plain_ranks.run(agreed_on)
    assert first == second
    whole, sharded, by_hand = first
    assert (whole[0], sharded[0]) == (150_000, 300_000), "each part is two operations where it is sharded"
    assert sharded[2] == 4 * 300_000, "a bucket is no smaller than a partition"
    assert by_hand[:2] == (1000, 5000)
