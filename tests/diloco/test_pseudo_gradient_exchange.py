"""The weighted mean over all workers: exact where it can be, the same bits on every worker always."""

from __future__ import annotations

import math
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.outer_optimizer import Contribution, Mean
from lightning_bytescheduler.diloco.process_groups import WorkerWorld
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import PseudoGradientExchange
from tests.support.plain_mean import PlainMean
from tests.support.rank_pool import RankPool


def pseudo_gradient_of(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)


def start(ends: PseudoGradientExchange, fragment: int, values: Tensor, *, weight: int, round: int = 0) -> Future[Mean]:
    update = Contribution(worker="w", round=round, fragment=fragment, pseudo_gradient=values, samples=weight)
    return ends.start(update).receipt


def exchange(rank: int, size: int, weights: list[int], wire_dtype: str, partition_size: int) -> tuple[Tensor, int]:
    world = WorkerWorld.join(rank=rank, size=len(weights), backend="gloo", timeout=None)
    heard: list[Contribution] = []
    ends = PseudoGradientExchange(
        world.leaders,
        wire=WireFormat(dtype=wire_dtype),
        partition_size=partition_size,
        credit=2 * partition_size,
        on_error=lambda error: error,
        arrived=heard.append,
    )
    first = start(ends, 0, pseudo_gradient_of(rank, size), weight=weights[rank])
    second = start(ends, 1, pseudo_gradient_of(rank, size), weight=weights[rank], round=3)
    assert ends.fetch_mean(3, "") is second
    second.result(60.0)
    mean = first.result(60.0)
    idle = ends.stop(60.0)
    dist.barrier()
    world.leave(idle=idle)
    assert [update.round for update in heard] == [3]  # the other one is of no round
    return mean.values, mean.total


def exact(size: int, weights: list[int]) -> Tensor:
    sums = PlainMean({"all": torch.zeros(size)})
    for rank, weight in enumerate(weights):
        if weight:
            sums.add_plain({"all": pseudo_gradient_of(rank, size)}, weight=weight)
    return sums.mean()["all"]


@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16", "int8", "int4", "sparse"])
def test_three_workers_hold_the_same_mean(wire_dtype: str, three_plain_ranks: RankPool) -> None:
    size, weights = 1001, [3, 0, 5]
    means = three_plain_ranks.run(exchange, size=size, weights=weights, wire_dtype=wire_dtype, partition_size=200)
    expected = exact(size, weights)
    for mean, total in means:
        assert total == 8
        assert torch.equal(mean, means[0][0])
    largest = max(float(pseudo_gradient_of(rank, size).abs().max()) for rank in range(3))
    if wire_dtype == "sparse":  # in six parts of three shards each, two of their 56 elements, of means three
        assert torch.count_nonzero(means[0][0]) <= 6 * 3 * 3
        assert means[0][0][expected.abs().argmax()] != 0
        return
    bound = {"fp32": 0.0, "bf16": 2.0**-6, "int8": 2 / 100, "int4": 2 / 7}[wire_dtype]
    assert float((means[0][0] - expected).abs().max()) <= bound * largest


def test_parts_smaller_than_the_number_of_workers(three_plain_ranks: RankPool) -> None:
    means = three_plain_ranks.run(exchange, size=5, weights=[1, 1, 1], wire_dtype="fp32", partition_size=2)
    for mean, total in means:
        assert total == 3
        assert torch.equal(mean, exact(5, [1, 1, 1]))


def test_no_worker_has_processed_anything(three_plain_ranks: RankPool) -> None:
    means = three_plain_ranks.run(exchange, size=5, weights=[0, 0, 0], wire_dtype="fp32", partition_size=5)
    for mean, total in means:
        assert total == 0
        assert torch.equal(mean, torch.zeros(5))


def exchanges(rank: int, size: int, wire: WireFormat, rounds: int, broken: int | None) -> tuple[Tensor, Tensor, dict]:
    """The sum of all means; that of what they should be; and what is not sent yet. New ends before round ``broken``."""
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    options = {"wire": wire, "partition_size": 200, "credit": 400, "on_error": lambda error: error}
    ends = PseudoGradientExchange(world.leaders, **options)
    received, wanted = torch.zeros(size), torch.zeros(size)
    for round in range(rounds):
        if round == broken:
            state = ends.state_dict()
            assert ends.stop(60.0)
            ends = PseudoGradientExchange(world.leaders, **options)
            ends.load_state_dict(state)
        for fragment in range(2):  # whose residuals are apart
            parts = [torch.randn(size, generator=torch.Generator().manual_seed(3 * round + r)) + 0.2 for r in range(3)]
            weights = [1, 0 if round == 1 else 2, 5]
            mean = start(ends, fragment, parts[rank], weight=weights[rank]).result(60.0).values
            if fragment == 0:
                received += mean
                wanted += sum(part * weight for part, weight in zip(parts, weights, strict=True)) / sum(weights)
    state = ends.state_dict()
    idle = ends.stop(60.0)
    dist.barrier()
    world.leave(idle=idle)
    return received, wanted, state


@pytest.mark.parametrize(
    ("wire_dtype", "rounds", "bound"), [("int4", 6, 0.5), pytest.param("sparse", 12, 0.0, marks=pytest.mark.slow)]
)
def test_what_is_lost_in_a_round_is_sent_in_a_later_one(
    wire_dtype: str, rounds: int, bound: float, three_plain_ranks: RankPool
) -> None:
    """Means and what is left add up to what was to be sent; also where the ends were saved and made anew."""
    wire = WireFormat(dtype=wire_dtype, density=0.2 if wire_dtype == "sparse" else None)
    size = 501
    for broken in (None, rounds // 2):
        found = three_plain_ranks.run(exchanges, size=size, wire=wire, rounds=rounds, broken=broken)
        received, wanted, _ = found[0]
        assert all(torch.equal(received, other) for other, _, _ in found)
        mean = sum(state["mean"]["fragment 0"] for _, _, state in found)  # each shard has one owner
        own = (
            sum(state["own"]["fragment 0"] * weight for weight, (_, _, state) in zip((1, 2, 5), found, strict=True)) / 8
        )
        # Round 1 had other weights, so that residuals of before count a little differently there.
        error = received + mean + own - wanted
        assert error.abs().mean() < 0.1 * wanted.abs().mean()
        if bound:
            assert (received - wanted).abs().max() < bound  # of one round alone, not of six


def changed_apart(rank: int) -> Tensor:
    """The mean of three updates, each with one large change of its own in every 28 elements."""
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    options = {"partition_size": 84, "credit": 84, "on_error": lambda error: error}
    ends = PseudoGradientExchange(world.leaders, wire=WireFormat(dtype="sparse", density=1 / 28), **options)
    own = torch.full((84,), 0.01)
    if rank < 2:
        own[rank::28] = 7.0
    mean = start(ends, 0, own, weight=1).result(60.0).values
    idle = ends.stop(60.0)
    dist.barrier()
    world.leave(idle=idle)
    return mean


def test_what_two_workers_send_of_different_elements_all_goes_back(three_plain_ranks: RankPool) -> None:
    for mean in three_plain_ranks.run(changed_apart):
        for rank in range(2):
            assert torch.count_nonzero(mean[rank::28]) == 3


def test_a_state_goes_to_the_worker_it_is_of(three_plain_ranks: RankPool) -> None:
    assert three_plain_ranks.run(loads) == [(1.0, 2.0), (0.0, 0.0), (0.0, 0.0)]


def loads(rank: int) -> tuple[float, ...]:
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    ends = PseudoGradientExchange(
        world.leaders, wire=WireFormat(dtype="int4"), partition_size=8, credit=8, on_error=lambda error: error
    )
    state = {"workers": 3, "rank": 0, "own": {"a": torch.ones(4)}, "mean": {"a": torch.full((4,), 2.0)}}
    ends.load_state_dict(state)
    found = ends.state_dict()
    ends.load_state_dict({**state, "workers": 2})  # shards have other owners
    if rank == 0:
        assert float(ends.state_dict()["mean"]["a"].sum()) == 0.0
    ends.stop(60.0)
    dist.barrier()
    world.leave(idle=True)
    return tuple(float(found[kind]["a"][0]) if found[kind] else 0.0 for kind in ("own", "mean"))


def diverged(rank: int) -> str:
    world = WorkerWorld.join(rank=rank, size=3, backend="gloo", timeout=None)
    ends = PseudoGradientExchange(
        world.leaders, wire=WireFormat(), partition_size=8, credit=8, on_error=lambda error: error
    )
    pseudo_gradient = torch.tensor([math.nan])
    with pytest.raises(ValueError, match="infinities or NaN") as caught:
        start(ends, 0, pseudo_gradient, weight=1).result(60.0)
    ends.stop(60.0)
    dist.barrier()
    world.leave(idle=True)
    return str(caught.value)


def test_what_has_diverged_is_not_sent(three_plain_ranks: RankPool) -> None:
    assert len(set(three_plain_ranks.run(diverged))) == 1
