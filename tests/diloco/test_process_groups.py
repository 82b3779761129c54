"""What the ranks of one worker sum up, hear and take over from their leader."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler import SchedulerTimeoutError, UnsupportedError
from lightning_bytescheduler.diloco.process_groups import JointCollectives, WorkerGroup, WorkerWorld
from tests.diloco.coordinated_workers import until
from tests.support.rank_pool import RankPool, let_go, threads_at_ends


def test_a_worker_of_one_rank_asks_no_other_rank() -> None:
    group = WorkerGroup()
    assert (group.size, group.leads) == (1, True)
    assert group.total([1, 2.5]) == [1, 2.5]
    assert group.any(True)
    assert not group.any(False)
    assert group.tell("end") == "end"


def three_together(rank: int) -> tuple[Any, ...]:
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None, inner_size=3)
    group = WorkerGroup(world.inside, timeout=60.0)
    total = group.total([rank, 0.5])
    anybody = group.any(rank == 2), group.any(False)
    heard = group.tell(f"from rank {rank} \u00e9"), group.tell("")
    tensors = [torch.full((2, 3), float(rank) / 3), torch.full((4,), float(rank) / 3, dtype=torch.bfloat16)]
    if rank == 0:
        tensors[0][0, 0] = torch.nan
    group.share(tensors)
    places = world.worker, world.workers, group.size, group.leads, world.leaders is None
    let_go()
    world.leave(idle=True)
    return total, anybody, heard, [tensor.tolist() for tensor in tensors], places


def test_ranks_hear_what_the_leader_says_and_take_over_its_weights(three_plain_ranks: RankPool) -> None:
    results = three_plain_ranks.run(three_together)
    for rank, (total, anybody, heard, tensors, places) in enumerate(results):
        assert total == [3.0, 1.5]
        assert anybody == (True, False)
        assert heard == ("from rank 0 \u00e9", "")
        assert str(tensors) == str(results[0][3])
        assert places == (0, 1, 3, rank == 0, rank != 0)


def rank_that_waits(rank: int, aborts: bool, folder: str) -> str:
    """The first rank says nothing for as long as the others wait."""
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None, inner_size=3)
    message = "came by"
    if rank:
        group = WorkerGroup(world.inside, timeout=60.0 if aborts else 0.1)
        if aborts:
            threading.Timer(0.2, group.abort, [ZeroDivisionError("elsewhere")]).start()
        try:
            group.tell()
        except (ZeroDivisionError, SchedulerTimeoutError) as error:
            message = str(error)
        Path(folder, str(rank)).touch()
    else:
        until(lambda: len(os.listdir(folder)) == 2, "the end of the others' waiting")
    world.leave(idle=False)
    return message


@pytest.mark.parametrize(("aborts", "says"), [(True, "elsewhere"), (False, "for the ranks that it trains with")])
def test_waiting_ends_without_the_leader(aborts: bool, says: str, three_plain_ranks: RankPool, tmp_path: Path) -> None:
    _, *others = three_plain_ranks.run(rank_that_waits, aborts=aborts, folder=str(tmp_path))
    assert all(says in message for message in others)


def join_twice(rank: int) -> str:
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    assert dist.get_world_size() == 1
    with pytest.raises(UnsupportedError) as twice:
        WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    world.leave(idle=True)
    return str(twice.value)


def test_a_world_is_joined_once(three_plain_ranks: RankPool) -> None:
    for twice in three_plain_ranks.run(join_twice):
        assert "destroy_process_group()" in twice


def training(rank: int) -> WorkerWorld:
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    JointCollectives(world.everyone).reduce(torch.ones(1))
    let_go()
    world.leave(idle=True)
    return world


def threads_of_trainings(rank: int) -> list[int]:
    return threads_at_ends(partial(training, rank))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted by what Linux says")
def test_a_training_ends_the_threads_of_those_before_it(three_plain_ranks: RankPool) -> None:
    for counts in three_plain_ranks.run(threads_of_trainings):
        assert len(set(counts)) == 1, counts
