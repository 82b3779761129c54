"""Named tensors are added up over all ranks; what does not fit is refused by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_bytescheduler import PushPullStore
from lightning_bytescheduler.exceptions import (
    OptionError,
    RanksDifferError,
    SchedulerClosedError,
    ServerFailedError,
    TaskStateError,
    UnsupportedError,
)
from tests.support.rank_pool import RankPool, join_default_group, let_go
from tests.support.servers import started_servers
from tests.support.waiting import WAIT

SIZES: dict[str, Any] = {"partition_size": 300, "credit": 600, "timeout": timedelta(seconds=WAIT)}


def pushed_by(rank: int, key: str, round: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round + 10 * len(key) + rank)
    return torch.randn(1000 if key == "bias" else (40, 30), generator=generator, dtype=torch.float64)


def use_a_store(rank: int, ranks: int, servers: int, *, kill: bool = False) -> str:
    """Rounds in which ranks push and pull in different orders."""
    error = ""
    join_default_group(rank, world_size=ranks)
    with started_servers(servers if rank == 0 else 0) as processes:
        with PushPullStore(servers=servers, **SIZES) as store:
            for key in ("bias", "weight"):
                value = pushed_by(rank, key, 0)
                store.init(key, value)
                assert torch.equal(value, pushed_by(0, key, 0)), "not rank 0's"
                assert torch.equal(store.pull(key).wait(), value)
            for round in range(1, 4):
                keys = ["bias", "weight"] if (rank + round) % 2 else ["weight", "bias"]
                for key in keys:
                    store.push(key, pushed_by(rank, key, round), priority=len(key))
                pulled = {key: store.pull(key) for key in reversed(keys)}
                for key in keys:
                    last = store.pull(key).wait()
                    expected = pushed_by(0, key, round)
                    for other in range(1, ranks):
                        expected += pushed_by(other, key, round)
                    assert torch.equal(pulled[key].wait(), expected), f"{key} in round {round}"
                    assert torch.equal(last, expected), "what comes last is kept"
            assert all(store.placement.bytes_per_server)
            assert sum(store.placement.bytes_per_server) == 3 * 8 * 2200
            dist.barrier()
            if kill:
                for process in processes:
                    process.kill()
                    process.wait()
                dist.barrier()
                try:
                    for _ in range(3):  # one may go to a colocated server
                        store.push_pull("bias", pushed_by(rank, "bias", 1)).wait()
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
        if not kill:
            with pytest.raises(SchedulerClosedError, match="has been closed"):
                store.pull("bias")
        let_go()
        dist.destroy_process_group()
    for thread in threading.enumerate():
        if thread.name.startswith("bytescheduler"):
            thread.join(WAIT)  # of a group whose connections were broken
            assert not thread.is_alive(), thread.name
    return error


def test_sums_do_not_depend_on_the_order_in_which_ranks_pull(two_plain_ranks: RankPool) -> None:
    two_plain_ranks.run(use_a_store, ranks=2, servers=0)


def test_a_server_of_its_own_adds_up_and_its_death_is_named(two_plain_ranks: RankPool) -> None:
    for error in two_plain_ranks.run(use_a_store, ranks=2, servers=1, kill=True):
        assert error.startswith(ServerFailedError.__name__)
        assert re.search(r"arameter server \d+ \(process", error)


def initialise_unlike(rank: int) -> None:
    join_default_group(rank)
    with PushPullStore(**SIZES) as store:
        value = torch.full((3 + rank,), 7.0)
        with pytest.raises(RanksDifferError, match=rf"here 'x', shape \({3 + rank},\), torch.float32"):
            store.init("x", value)
        store.init("x", torch.full((2,), float(rank)))  # nothing was half done
        assert torch.equal(store.pull("x").wait(), torch.zeros(2))
    let_go()
    dist.destroy_process_group()


def test_ranks_that_initialise_unlike_tensors_are_told(two_plain_ranks: RankPool) -> None:
    two_plain_ranks.run(initialise_unlike)


@pytest.fixture
def alone() -> Iterator[PushPullStore]:
    """Use a store in one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with PushPullStore(partition_size=10, credit=10) as store:
            store.init("bias", torch.zeros(10))
            store.init("weight", torch.zeros(10, 5))
            yield store
    finally:
        let_go()
        dist.destroy_process_group()


def test_what_does_not_fit_is_refused_by_name(alone: PushPullStore) -> None:
    with pytest.raises(OptionError, match=r"key='wieght' .* Did you mean 'weight'\?"):
        alone.push("wieght", torch.zeros(10, 5))
    for wrong in (torch.zeros(5, 10), torch.zeros(10, 5, dtype=torch.float64)):
        with pytest.raises(OptionError, match=r"tensor for 'weight'=.* is not allowed.* of shape \(10, 5\)"):
            alone.push("weight", wrong)
        with pytest.raises(OptionError, match="tensor for 'weight'"):
            alone.push_pull("weight", torch.zeros(10, 5), wrong)
    for no_tensor in ([1.0, 2.0], None):
        with pytest.raises(OptionError, match=r"tensor for 'weight'='a (list|NoneType)' is not .* of shape \(10, 5\)"):
            alone.push("weight", no_tensor)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="tensor for 'weight'='a list'"):
        alone.pull("weight", [1.0])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"value=\[1.0\] .* a torch.Tensor"):
        alone.init("another", [1.0])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="out of 'weight'"):
        alone.pull("weight", torch.zeros(5, 10).t())
    with pytest.raises(OptionError, match="priority='high'"):
        alone.push("bias", torch.zeros(10), "high")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="key='bias'"):
        alone.init("bias", torch.zeros(10))
    with pytest.raises(UnsupportedError, match=r"'steps' has 1 elements of torch.int64"):
        alone.init("steps", torch.zeros(1, dtype=torch.int64))
    alone.push("bias", torch.ones(10))
    with pytest.raises(TaskStateError, match="'bias' was pushed and not pulled"):
        alone.push("bias", torch.ones(10))
    assert torch.equal(alone.pull("bias").wait(), torch.ones(10))


def test_a_push_is_sent_with_its_pull_and_by_priority(alone: PushPullStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go, order = threading.Event(), threading.Event(), []
    reduce = alone._push_pull.reduce

    def held(group: Any, part: torch.Tensor, number: int, factor: float) -> Any:
        order.append(part[0].item())
        started.set()
        assert go.wait(WAIT)
        return reduce(group, part, number, factor)

    monkeypatch.setattr(alone._push_pull, "reduce", held)
    alone.push("weight", torch.full((10, 5), 1.0), priority=5)
    assert not any(alone.placement.bytes_per_server)
    late = alone.pull("weight")
    assert started.wait(WAIT)
    urgent = alone.push_pull("bias", torch.full((10,), 2.0), priority=1)
    go.set()
    assert torch.equal(urgent.wait(), torch.full((10,), 2.0))
    assert torch.equal(late.wait(), torch.ones(10, 5))
    assert order == [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_it_needs_a_process_group() -> None:
    with pytest.raises(UnsupportedError, match="init_process_group"):
        PushPullStore()
    with pytest.raises(OptionError, match="servers=-1"):
        PushPullStore(servers=-1)
