"""The example with which ByteScheduler was published: "a 44% speedup ... with tensor partitioning" (seed 000)."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.simulation.simulator import Schedule, lower_bound, simulate
from tests.simulation.profiles import CONTRIVED, plain_link

PUSH_PULL = plain_link(servers=0)


@pytest.mark.parametrize("barrier", [False, True])
def test_fifo_takes_26(barrier: bool) -> None:
    assert simulate(CONTRIVED, PUSH_PULL, Schedule(barrier=barrier)) == 26


def test_priority_and_partitions_take_18_which_is_44_percent_faster() -> None:
    took = simulate(CONTRIVED, PUSH_PULL, Schedule(partition_bytes=1, credit_bytes=2))
    assert took == 18
    assert f"{26 / took - 1:.0%}" == "44%"


def test_only_the_last_partition_s_pull_lies_between_that_and_the_bound() -> None:
    assert lower_bound(CONTRIVED, PUSH_PULL) == 17
    assert simulate(CONTRIVED, plain_link(), Schedule(partition_bytes=1, credit_bytes=1)) == 17
