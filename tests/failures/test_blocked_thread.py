"""What a thread waits in is read off its stack."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.failures.standstill import Blocked, blocked_in
from tests.support.rank_pool import RankPool


def _broadcast_sigterm_tensor() -> None:  # named as in Lightning's epoch loop
    dist.broadcast(torch.zeros(1), src=1)


def _places(rank: int) -> list[Blocked | None]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    alone = dist.new_group([0, 1])
    main, seen = threading.get_ident(), []
    calls: list[Callable[[], object]] = [
        dist.barrier,
        lambda: dist.all_reduce(torch.zeros(1)),
        lambda: dist.all_reduce(torch.zeros(1), group=dist.group.WORLD),
        lambda: dist.all_reduce(torch.zeros(1), group=alone),
        lambda: dist.broadcast_object_list([None], src=1),
        _broadcast_sigterm_tensor,
    ]
    for call in calls:
        dist.barrier()
        if rank == 0:
            look = threading.Timer(0.2, lambda: seen.append(blocked_in(main)))
            look.start()
            call()
            look.join()
        else:
            time.sleep(0.5)
            call()
    look = threading.Timer(0.1, lambda: seen.append(blocked_in(main)))
    look.start()
    time.sleep(0.3)  # not in a collective
    look.join()
    dist.destroy_process_group(alone)
    return seen


def test_only_collectives_of_the_default_group_count(two_plain_ranks: RankPool) -> None:
    seen, _ = two_plain_ranks.run(_leaving)
    reduces = Blocked("all_reduce", False)
    sends = Blocked("broadcast", False)
    assert seen == [Blocked("barrier", False), reduces, reduces, None, sends, Blocked("broadcast", True), None]


def _leaving(rank: int) -> list[Blocked | None]:
    try:
        return _places(rank)
    finally:
        time.sleep(0.1)
        dist.destroy_process_group()


@pytest.mark.parametrize("thread", [0, -1])
def test_a_thread_that_is_gone_waits_for_nothing(thread: int) -> None:
    assert blocked_in(thread) is None
