"""Every rank takes up the same numbers before the same step."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_bytescheduler.collectives.number_exchange import AgreedValues
from tests.support.rank_pool import RankPool, join_default_group, let_go
from tests.support.waiting import WAIT


def exchange(rank: int, steps: list[int], intervals: dict[int, int]) -> list[Any]:
    """What came into force before which step, where rank 0 wants ``[10 × step, -step]``."""
    join_default_group(rank)
    values = AgreedValues(2, timeout=timedelta(seconds=WAIT))
    taken = []
    for step in steps:
        if rank:
            time.sleep(0.001)  # never in time with rank 0
            agreed = values.before_step(step)
        else:
            agreed = values.before_step(step, [10 * step, -step], interval=intervals.get(step, 1))
        taken.append((step, agreed))
    let_go()
    values.close()
    values.close()
    assert values.before_step(steps[-1] + 1) is None
    dist.destroy_process_group()
    return taken


def test_what_was_wanted_before_one_step_is_in_force_before_the_next(two_plain_ranks: RankPool) -> None:
    zero, one = two_plain_ranks.run(exchange, steps=[1, 2, 3, 4], intervals={})
    assert zero == one == [(1, None), (2, [10, -1]), (3, [20, -2]), (4, [30, -3])]


def test_several_forward_passes_of_one_step_are_one_exchange(two_plain_ranks: RankPool) -> None:
    zero, one = two_plain_ranks.run(exchange, steps=[1, 1, 2, 2, 2, 3], intervals={})
    assert zero == one == [(1, None), (1, None), (2, [10, -1]), (2, None), (2, None), (3, [20, -2])]


def test_exchanges_are_as_far_apart_as_rank_zero_wants(two_plain_ranks: RankPool) -> None:
    zero, one = two_plain_ranks.run(exchange, steps=list(range(1, 13)), intervals={3: 4, 4: 4, 8: 1})
    assert zero == one
    # What was posted before step 3 is read before 4, and says that the next exchange is before 8; so does that of 4.
    assert {step: agreed[0] for step, agreed in zero if agreed} == {2: 10, 3: 20, 4: 30, 8: 40, 12: 80}


def give_up(rank: int) -> tuple[float, bool]:
    join_default_group(rank)
    values = AgreedValues(1, timeout=timedelta(seconds=WAIT))
    values.before_step(1, [1])
    values.before_step(2, [2])
    if rank:
        values.before_step(3)  # a message that never comes: rank 0 has failed
    let_go()
    started = time.monotonic()
    values.close()
    took = time.monotonic() - started
    dist.barrier()  # the default group is as it was
    dist.destroy_process_group()
    return took, values.before_step(4) is None


def test_the_end_does_not_wait_for_a_rank_that_has_failed(two_plain_ranks: RankPool) -> None:
    (zero, _), (one, closed) = two_plain_ranks.run(give_up)
    assert closed
    assert max(zero, one) < WAIT / 2


def wait_in_vain(rank: int) -> str | None:
    join_default_group(rank)
    failures: list[BaseException] = []
    values = AgreedValues(1, timeout=timedelta(seconds=2 * WAIT), failure=lambda: failures[0] if failures else None)
    values.before_step(1, [1])
    error = None
    if rank:
        values.before_step(2)
        values.before_step(3)  # a message that never comes
        failures.append(ValueError("rank 0 is gone"))
        try:
            values.before_step(4)
        except ValueError as raised:
            error = str(raised)
    else:
        values.before_step(2, [2])
        let_go()
    values.close()
    dist.barrier()
    dist.destroy_process_group()
    return error


def test_a_wait_ends_when_another_rank_has_failed(two_plain_ranks: RankPool) -> None:
    assert two_plain_ranks.run(wait_in_vain) == [None, "rank 0 is gone"]
