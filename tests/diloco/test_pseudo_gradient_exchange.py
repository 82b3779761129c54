"""The weighted mean over all workers: exact where it can be, the same bits on every worker always."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.process_groups import WorkerWorld
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import PseudoGradientExchange
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean
from tests.support.rank_pool import RankPool


def pseudo_gradient_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)


def exchange(rank: int, size: int, weights: list[int], wire_dtype: str, partition_size: int) -> tuple[Tensor, int]:
    world = WorkerWorld.join(rank=rank, size=len(weights), backend="gloo", timeout=None)
    ends = PseudoGradientExchange(
        world.leaders,
        wire=WireFormat(dtype=wire_dtype),
        partition_size=partition_size,
        credit=2 * partition_size,
        on_error=lambda error: error,
    )
    heard: list[BaseException | None] = []
    first = ends.start("a", pseudo_gradient_of(rank, size), weight=weights[rank], on_end=heard.append)
    second = ends.start("b", pseudo_gradient_of(rank, size), weight=weights[rank], on_end=heard.append)
    second.wait(20.0)
    mean, total = first.wait(20.0)
    idle = ends.stop(5.0)
    dist.barrier()
    world.leave(idle=idle)
    assert heard == [None, None]
    return mean, total


def exact(size: int, weights: list[int]) -> Tensor:
    sums = WeightedMean({"all": torch.zeros(size)})
    for rank, weight in enumerate(weights):
        if weight:
            sums.add({"all": pseudo_gradient_of(rank, size)}, weight=weight)
    return sums.mean()["all"]


@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16", "int8", "int4"])
def test_three_workers_hold_the_same_mean(wire_dtype: str, three_plain_ranks: RankPool) -> None:
    size, weights = 1001, [3, 0, 5]
    means = three_plain_ranks.run(exchange, size=size, weights=weights, wire_dtype=wire_dtype, partition_size=200)
    expected = exact(size, weights)
    for mean, total in means:
        assert total == 8
        assert torch.equal(mean, means[0][0])
    largest = max(float(pseudo_gradient_of(rank, size).abs().max()) for rank in range(3))
    bound = {"fp32": 0.0, "bf16": 2.0**-6, "int8": 2 / 100, "int4": 2 / 7}[wire_dtype]
    assert float((means[0][0] - expected).abs().max()) <= bound * largest


def test_parts_smaller_than_the_number_of_workers(three_plain_ranks: RankPool) -> None:
    means = three_plain_ranks.run(exchange, size=5, weights=[1, 1, 1], wire_dtype="fp32", partition_size=2)
    for mean, total in means:
        assert total == 3
        assert torch.equal(mean, exact(5, [1, 1, 1]))


def test_nobody_has_done_anything(three_plain_ranks: RankPool) -> None:
    means = three_plain_ranks.run(exchange, size=5, weights=[0, 0, 0], wire_dtype="fp32", partition_size=5)
    for mean, total in means:
        assert total == 0
        assert torch.equal(mean, torch.zeros(5))


def diverged(rank: int) -> str:
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    ends = PseudoGradientExchange(
        world.leaders, wire=WireFormat(), partition_size=8, credit=8, on_error=lambda error: error
    )
    pseudo_gradient = torch.tensor([math.nan])
    with pytest.raises(ValueError, match="infinities or NaN") as caught:
        ends.start("a", pseudo_gradient, weight=1, on_end=lambda error: None).wait(10.0)
    ends.stop(5.0)
    dist.barrier()
    world.leave(idle=True)
    return str(caught.value)


def test_what_has_diverged_is_not_sent(three_plain_ranks: RankPool) -> None:
    assert len(set(three_plain_ranks.run(diverged))) == 1
