"""Ranks that start anew with the store of their predecessors take nothing of it for their own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.failures.incarnation import name_incarnation


@pytest.mark.parametrize("late", [0, 1])
def test_each_start_has_a_name_of_its_own(late: int) -> None:
    """Whoever comes last: ranks that come before the first one find the name of the start before."""
    store = dist.HashStore()

    def join(rank: int, world_size: int) -> str:
        time.sleep(0.1 if rank == late else 0.0)
        return name_incarnation(store, rank=rank, world_size=world_size, timeout=10.0)

    names = []
    for size in (3, 2, 4, 1, 3):
        with ThreadPoolExecutor(size) as pool:
            (name,) = set(pool.map(join, range(size), [size] * size))
        names.append(name)
    assert len(set(names)) == 5


def test_ranks_do_not_go_on_with_the_name_of_a_start_that_is_gone() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: name_incarnation(store, rank=rank, world_size=2, timeout=10.0), range(2)))
    with pytest.raises(SchedulerTimeoutError, match=r"Rank 1 of 2 has waited 0 s at torchrun's store for rank 0\."):
        name_incarnation(store, rank=1, world_size=2, timeout=0.1)
    with pytest.raises(SchedulerTimeoutError, match=r"Rank 0 of 4 has waited 0 s at torchrun's store for rank 1, 2, 3"):
        name_incarnation(store, rank=0, world_size=4, timeout=0.1)


def test_who_will_not_come_is_not_waited_for() -> None:
    with pytest.raises(ValueError, match="it runs something else"):
        name_incarnation(
            dist.HashStore(), rank=0, world_size=2, timeout=60.0, failure=lambda: ValueError("it runs something else")
        )
