"""Every operation against what its name says, for parts of any size, and messages without an answer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives import operations
from lightning_bytescheduler.collectives.completion import CompletionThread
from lightning_bytescheduler.collectives.operations import shard_of, shards_over
from tests.collectives.sub_tasks import Part
from tests.support.rank_pool import RankPool, join_default_group, let_go
from tests.support.waiting import WAIT, until

SIZES = (1, 3, 8, 1000)
KINDS = (torch.float32, torch.float64, torch.bfloat16)


def contribution(rank: int, size: int, kind: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(kind)


def run_operations(rank: int, world_size: int) -> list[str]:
    """Describe each operation whose result is wrong."""
    join_default_group(rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    thread = CompletionThread(lambda error: error, group)
    wrong: list[str] = []
    number = 0

    def run(operation: Any, part: torch.Tensor, *factor: float) -> None:
        nonlocal number
        number += 1
        sub_task: Any = Part()
        thread.watch(operation(group, part, number, *factor), sub_task)
        assert sub_task.ended.wait(WAIT)
        assert sub_task.error is None, sub_task.error

    try:
        for kind in KINDS:
            for size in SIZES:
                parts = [contribution(r, size, kind) for r in range(world_size)]
                scaled = [part * (1.0 / world_size) for part in parts]
                mean = torch.stack([part.double() for part in scaled]).sum(0)
                near = 2e-2 if kind is torch.bfloat16 else 1e-6
                whole, sharded = parts[rank].clone(), parts[rank].clone()
                run(operations.all_reduce, whole, 1.0 / world_size)
                straight = parts[rank].clone()
                run(operations.reduce_scatter, sharded, 1.0 / world_size)
                run(operations.all_reduce_in_shards, straight, 1.0 / world_size)
                first, end = shard_of(size, rank, world_size)
                if not torch.allclose(whole.double(), mean, rtol=near, atol=near):
                    wrong.append(f"all-reduce of {size} {kind}")
                if not torch.allclose(sharded[first:end].double(), mean[first:end], rtol=near, atol=near):
                    wrong.append(f"reduce-scatter of {size} {kind}")
                if world_size == 2 and not torch.equal(sharded[first:end], whole[first:end]):
                    wrong.append(f"reduce-scatter of {size} {kind} has other bits than all-reduce")
                direct, in_order = parts[rank].clone(), scaled[0].clone()
                run(operations.all_reduce_direct, direct, 1.0 / world_size)
                for part in scaled[1:]:
                    in_order += part
                if not torch.equal(direct, in_order):
                    wrong.append(f"direct all-reduce of {size} {kind} is not the sum in the order of ranks")
                run(operations.all_gather, sharded)
                if not torch.allclose(sharded.double(), mean, rtol=near, atol=near):
                    wrong.append(f"all-gather of {size} {kind}")
                if not torch.equal(straight, sharded):
                    wrong.append(f"all-reduce in shards of {size} {kind} is not its two halves")
                everywhere = [torch.empty_like(sharded) for _ in range(world_size)]
                dist.all_gather(everywhere, sharded)
                if not all(torch.equal(each, sharded) for each in everywhere):
                    wrong.append(f"ranks differ after all-gather of {size} {kind}")
        rows = torch.zeros(world_size, 3)
        rows[rank] = rank + 1.0
        run(operations.exchange, rows)
        if not torch.equal(rows, torch.arange(1.0, world_size + 1)[:, None].expand(-1, 3)):
            wrong.append("exchange")
    finally:
        assert thread.stop(WAIT)
        let_go()
        dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize(
    "ranks", ["two_plain_ranks", "three_plain_ranks", pytest.param("four_plain_ranks", marks=pytest.mark.slow)]
)
def test_operations(ranks: str, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    answers = pool.run(run_operations, world_size=int({"two": 2, "three": 3, "four": 4}[ranks.split("_")[0]]))
    assert answers == [[] for _ in answers]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_shards_cover_a_part_once(world_size: int) -> None:
    for size in range(1, 40):
        shards = [shard_of(size, rank, world_size) for rank in range(world_size)]
        assert [i for first, end in shards for i in range(first, end)] == list(range(size))
        assert max(end - first for first, end in shards) == -(-size // world_size)


def await_what_never_comes(rank: int) -> None:
    """Rank 0 waits for a message that rank 1, which is alive, never sends."""
    join_default_group(rank)
    group = dist.new_group(timeout=timedelta(seconds=10 * WAIT), backend="gloo")
    dist.all_reduce(torch.zeros(1), group=group)
    if rank == 0:
        thread = CompletionThread(lambda error: error, group)
        sub_task: Any = Part()
        thread.watch(operations.reduce_scatter(group, torch.zeros(10), 1, 0.5), sub_task)
        until(lambda: thread._awaited is not None)
        assert thread.stop(WAIT)
        assert not sub_task.ended.is_set()
    dist.barrier()
    dist.destroy_process_group()


def test_the_thread_ends_although_a_message_never_comes() -> None:
    # In processes of its own, as the group's connections are broken then.
    with RankPool(2) as pool:
        pool.run(await_what_never_comes)


def backends(rank: int) -> tuple[bool, bool]:
    join_default_group(rank)
    try:
        group = dist.group.WORLD
        assert group is not None
        answer = shards_over(group, torch.device("cpu")), shards_over(group, torch.device("cuda"))
        dist.barrier()  # the other rank may still connect
        return answer
    finally:
        dist.destroy_process_group()


def test_gloo_shards_what_is_on_a_cpu(two_plain_ranks: RankPool) -> None:
    assert two_plain_ranks.run(backends) == [(True, False), (True, False)]
