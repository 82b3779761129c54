from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.launch_order import order_of
from tests.faults.ranks import quiet_environment
from tests.scheduler.test_threads import SHORT, needs_support, turn
from tests.support.rank_pool import RankPool, free_port, join_default_group, let_go, threads_at_ends
from tests.support.waiting import WAIT


def own_groups(rank: int) -> tuple[list[float], int]:
    """Both groups work, and leave nothing behind."""
    join_default_group(rank)
    try:
        groups = SchedulerGroups.create(timeout=timedelta(seconds=WAIT))
        groups.warm_up(torch.device("cpu"))
        data = torch.tensor([float(rank + 1)])
        dist.all_reduce(data, group=groups.data)
        control = torch.tensor([float(rank + 5)])
        dist.broadcast(control, src=0, group=groups.control)
        assert (groups.rank, groups.world_size) == (rank, 2)
        let_go()
        groups.destroy()
        return [data.item(), control.item()], len(dist.distributed_c10d._world.pg_map)
    finally:
        dist.destroy_process_group()


def test_groups_work_and_leave_nothing_behind(two_plain_ranks: RankPool) -> None:
    assert two_plain_ranks.run(own_groups) == [([3.0, 5.0], 1), ([3.0, 5.0], 1)]


def die_while_groups_are_made(rank: int) -> str:
    """Rank 1 is gone before it makes the second group."""
    join_default_group(rank)
    make = dist.new_group
    made: list[dist.ProcessGroup] = []

    def new_group(**options: Any) -> dist.ProcessGroup:
        if rank and made:
            raise KeyboardInterrupt
        made.append(make(**options))
        return made[-1]

    try:
        with patch.object(dist, "new_group", new_group):
            SchedulerGroups.create(timeout=timedelta(seconds=3))
    except (RuntimeError, KeyboardInterrupt) as error:
        return type(error).__name__
    finally:
        dist.destroy_process_group()
    return "made"


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "set_timeout"), reason="this torch keeps the time of connecting")
def test_the_wait_for_a_rank_that_dies_while_groups_are_made_ends_at_the_timeout() -> None:
    with RankPool(2) as pool:
        first, second = pool.run(die_while_groups_are_made)
    assert first != "made"
    assert second == "KeyboardInterrupt"


def hear_late(rank: int, *, direct: bool) -> tuple[bool, list[str]]:
    """Rank 0 decides later than the timeout; whether the other hears of it, and what went wrong."""
    join_default_group(rank)
    groups = SchedulerGroups.create(timeout=timedelta(seconds=3))
    errors: list[str] = []

    def failed(error: BaseException) -> BaseException:
        errors.append(str(error))
        return error

    order = order_of(groups.control, failed, direct=direct)
    order.start(lambda change: change())
    if rank == 0:
        time.sleep(4)
    ended = order.end(WAIT)
    let_go()
    groups.destroy()
    dist.destroy_process_group()
    return ended, errors


@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decisions_may_come_later_than_the_timeout(direct: bool, two_plain_ranks: RankPool) -> None:
    """As after a validation: the timeout is for connections and gradients."""
    assert two_plain_ranks.run(hear_late, direct=direct) == [(True, []), (True, [])]


def training() -> SchedulerGroups:
    groups = SchedulerGroups.create(timeout=timedelta(seconds=WAIT))
    groups.warm_up(torch.device("cpu"))
    let_go()
    groups.destroy()
    return groups


def threads_of_trainings(rank: int) -> list[int]:
    join_default_group(rank)
    try:
        return threads_at_ends(training)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by what Linux says")
def test_a_training_ends_the_threads_of_those_before_it(two_plain_ranks: RankPool) -> None:
    """All of them, without Python having found what refers to each other by itself."""
    for counts in two_plain_ranks.run(threads_of_trainings):
        assert len(set(counts)) == 1, counts


def leave_early(rank: int) -> float:
    """Leave while something is under way that no other rank will join; returns how long that took, in seconds."""
    join_default_group(rank)
    groups = SchedulerGroups.create(timeout=timedelta(seconds=WAIT))
    groups.warm_up(torch.device("cpu"))
    if rank == 0:
        dist.barrier()  # alive, and does not come
    else:
        groups.data.allreduce([torch.zeros(4)])
        groups.control.broadcast([torch.zeros(4)], dist.BroadcastOptions())
    gc.freeze()  # only the groups are to be collected
    start = time.monotonic()
    groups.destroy(data_idle=rank == 0, control_idle=rank == 0)
    del groups
    gc.collect()
    took = time.monotonic() - start
    if rank == 1:
        dist.barrier()
    dist.destroy_process_group()
    return took


def test_leaving_does_not_wait_for_what_no_rank_will_join() -> None:
    # In processes of its own: what was abandoned stays for as long as they live.
    with RankPool(2) as pool:
        assert max(pool.run(leave_early)) < WAIT / 2


def test_leaving_after_the_default_group_is_quiet(two_plain_ranks: RankPool) -> None:
    two_plain_ranks.run(leave_late)


def leave_late(rank: int) -> None:
    join_default_group(rank)
    groups = SchedulerGroups.create(timeout=None)
    dist.destroy_process_group()
    groups.destroy()
    assert os.environ["LOCAL_RANK"] == str(rank)


def turns_of_new_threads(rank: int) -> set[int]:
    """How long the turns are of threads that the groups have brought, in nanoseconds."""
    join_default_group(rank)
    try:
        before = set(os.listdir("/proc/self/task"))
        groups = SchedulerGroups.create(timeout=timedelta(seconds=WAIT))
        groups.warm_up(torch.device("cpu"))
        found = {turn(int(thread)) for thread in set(os.listdir("/proc/self/task")) - before}
        time.sleep(0.1)  # gloo of torch 2.6 deadlocks where a group goes in the instant its last collective ends
        groups.destroy()
        return found
    finally:
        dist.destroy_process_group()


@needs_support
def test_threads_of_the_groups_have_short_turns(two_plain_ranks: RankPool) -> None:
    assert two_plain_ranks.run(turns_of_new_threads) == [{SHORT}, {SHORT}]


@pytest.mark.slow
def test_what_is_under_way_does_not_abort_an_interpreter_that_ends() -> None:
    port = free_port()
    script = str(Path(__file__).with_name("ends_under_way.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port)],
            env={**os.environ, **quiet_environment()},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=4 * WAIT)[1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 0, said
