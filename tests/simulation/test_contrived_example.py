"""The example with which ByteScheduler was published: "a 44% speedup ... with tensor partitioning" (seed 000)."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.simulation import Schedule, lower_bound, simulate
from tests.simulation.profiles import CONTRIVED, plain_link

PUSH_PULL = plain_link(architecture="ps")


@pytest.mark.parametrize("barrier", [False, True])
def test_fifo_takes_26(barrier: bool) -> None:
    run = simulate(CONTRIVED, PUSH_PULL, Schedule(order="fifo", barrier=barrier))
    assert run.step_seconds == 26
    assert [launch.layer for launch in run.launches] == [2, 1, 0]


def test_priority_and_partitions_take_18_which_is_44_percent_faster() -> None:
    run = simulate(CONTRIVED, PUSH_PULL, Schedule.scheduled(partition_bytes=1, credit_bytes=2))
    assert run.step_seconds == 18
    assert [launch.layer for launch in run.launches] == [2, 2, 1, 1, 0, 0, 0, 1, 1, 1, 1, 2]  # as drawn there
    assert f"{26 / run.step_seconds - 1:.0%}" == "44%"


def test_only_the_last_partition_s_pull_lies_between_that_and_the_bound() -> None:
    assert lower_bound(CONTRIVED, PUSH_PULL) == 17
    assert simulate(CONTRIVED, plain_link(), Schedule.scheduled(partition_bytes=1)).step_seconds == 17
