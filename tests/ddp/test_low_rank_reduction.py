"""Gradients as factors of two thin matrices, on two ranks with no training around them, beside the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.groups import leave
from lightning_bytescheduler.collectives.launch_order import order_of
from lightning_bytescheduler.collectives.route import AllReduce
from lightning_bytescheduler.compression import PowerSGD
from lightning_bytescheduler.ddp import compressed_reduction
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.fit_report import Record
from lightning_bytescheduler.ddp.reduction import GradientBucket, Reduction
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.core import ByteCore
from tests.support.rank_pool import RankPool, join_default_group, let_go
from tests.support.waiting import WAIT

_SHAPES = {"bias": (30,), "weight": (40, 24), "other": (24, 40), "last": (50, 20)}
_RANK = 4
_STEPS = 5  # one more than what ranks count goes through
_CODECS = {"other": None, "*": "powersgd:4"}


def gradient(step: int, rank: int, name: str) -> torch.Tensor:
    generator = np.random.default_rng([step, rank, len(name)])
    return torch.from_numpy(generator.standard_normal(_SHAPES[name]).astype(np.float32))


@dataclass
class Result:
    means: list[dict[str, Any]] = field(default_factory=list)
    residuals: dict[str, Any] = field(default_factory=dict)


class Counts:
    """What a rank counts in a step, known from the start; nothing in some of them."""

    def __init__(self, step: int, rank: int) -> None:
        first = (0.25, 1.0, 0.6, 0.0)[step % 4]
        self.factor = 1.0 - first if rank else first

    def when_known(self, then: Callable[[], None]) -> None:
        then()


def reduce_steps(
    rank: int,
    spoil_at: int | None,
    dtype: torch.dtype,
    steps: int = _STEPS,
    weighted: bool = False,
    ranks: int = 2,
) -> Result:
    torch.set_num_threads(1)
    join_default_group(rank, world_size=ranks)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT))
    parameters = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in _SHAPES.items()}
    rules = CompressionRules.resolve(_CODECS, 100)
    assert rules is not None
    known = GradientCompression(rules, parameters, record=Record())
    residuals = known.residuals
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT))

    def failed(error: BaseException) -> BaseException:
        core.abort(error)
        return error

    order = order_of(control, failed, direct=False)
    core = ByteCore(partition_size=100, credit=200, order=order)
    order.start(core.update_order)
    route = AllReduce(group, failed)
    result = Result()
    try:
        for step in range(1, steps + 1):
            known.begin_step()
            parts = [gradient(step, rank, name) for name in _SHAPES]
            if step == spoil_at and rank == 1:
                parts[1][3, 3] = torch.inf
            buffer = torch.cat([part.reshape(-1) for part in parts]).to(dtype)
            bucket = GradientBucket(0, list(parameters.values()), buffer, priority=0)
            weight: Any = Counts(step, rank) if weighted else StepWeight(ranks)
            if not weight.factor:
                buffer.fill_(torch.nan)  # the mean over no sample
            task = Reduction(core, route, step, weight, codec=known).reduce(bucket)
            task.wait(WAIT)
            assert len(task.sub_tasks) > 1, "factors are cut into parts as any other tensor is"
            whole = buffer.float().split([part.numel() for part in parts])
            result.means.append({n: part.view(_SHAPES[n]).numpy() for n, part in zip(_SHAPES, whole, strict=True)})
    finally:
        core.shutdown(timeout=WAIT)
        order.end(WAIT)
        route.stop_encoding(WAIT)
        route.stop(WAIT)
        let_go()
        leave(group, idle=True)
        leave(control, idle=True)
        dist.destroy_process_group()
    sizes = {name: parameters[name].numel() for name in ("weight", "last")}
    result.residuals = {name: residuals.of(name, size).numpy() for name, size in sizes.items()}
    return result


def reduce_all(rank: int) -> dict[str, Result]:
    return {
        "plain": reduce_steps(rank, None, torch.float32),
        "weighted": reduce_steps(rank, None, torch.float32, weighted=True),
        "half": reduce_steps(rank, None, torch.bfloat16),
        "spoiled": reduce_steps(rank, 3, torch.float32, steps=3),
        "before": reduce_steps(rank, None, torch.float32, steps=2),
    }


@pytest.fixture(scope="module")
def results(two_plain_ranks: RankPool) -> list[dict[str, Result]]:
    return two_plain_ranks.run(reduce_all)


def by_the_paper(name: str, ranks: int = 2) -> list[torch.Tensor]:
    """Algorithms 1 and 2, in double precision: means by step."""
    rows, columns = _SHAPES[name]
    residual = torch.zeros(rows, columns, dtype=torch.float64)  # of all ranks
    right = PowerSGD(_RANK).first_right(name, columns).double()
    means = []
    for step in range(1, _STEPS + 1):
        whole = residual + sum(gradient(step, rank, name).double() / ranks for rank in range(ranks))
        left = torch.linalg.qr(whole @ torch.linalg.qr(right).Q).Q
        right = whole.t() @ left
        means.append(left @ right.t())
        residual = whole - means[-1]
    return means


@pytest.mark.parametrize("name", ["weight", "last"])
def test_it_is_the_published_algorithm(results: list[dict[str, Result]], name: str) -> None:
    for step, expected in enumerate(by_the_paper(name)):
        first, second = (ofs["plain"].means[step][name] for ofs in results)
        assert np.array_equal(first, second), "ranks drift apart"
        assert np.allclose(first, expected, rtol=1e-4, atol=1e-4)
        assert np.linalg.matrix_rank(first, tol=1e-3) <= _RANK


def reduce_among_three(rank: int, direct_bytes: int) -> tuple[Result, set[str]]:
    """Also which ways sums went."""
    ways = set()

    def noted(way: str) -> Any:
        original = getattr(compressed_reduction, way)

        def call(*arguments: Any) -> Any:
            ways.add(way)
            return original(*arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed_reduction, "_DIRECT", direct_bytes)
        for way in ("all_reduce_direct", "all_reduce_in_shards"):
            patch.setattr(compressed_reduction, way, noted(way))
        return reduce_steps(rank, None, torch.float32, ranks=3), ways


@pytest.mark.parametrize(("direct_bytes", "way"), [(1 << 15, "all_reduce_direct"), (0, "all_reduce_in_shards")])
def test_more_ranks_add_up_small_factors_in_one_round_of_messages_and_large_ones_in_two(
    three_plain_ranks: RankPool, direct_bytes: int, way: str
) -> None:
    answers = three_plain_ranks.run(reduce_among_three, direct_bytes=direct_bytes)
    assert [ways for _, ways in answers] == [{way}] * 3
    for name in ("weight", "last"):
        for step, expected in enumerate(by_the_paper(name, ranks=3)):
            first, *others = (result.means[step][name] for result, _ in answers)
            assert all(np.array_equal(first, other) for other in others), "ranks drift apart"
            assert np.allclose(first, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "bound"), [("plain", 1e-4), ("weighted", 1e-4), ("half", 0.2)])
def test_what_was_applied_and_what_is_left_add_up_to_the_gradients(
    results: list[dict[str, Result]], kind: str, bound: float
) -> None:
    for name in ("weight", "last"):
        applied = sum(mean[name] for mean in results[0][kind].means).ravel()
        left = sum(ofs[kind].residuals[name] for ofs in results)
        counts = {
            (s, r): Counts(s, r).factor if kind == "weighted" else 0.5 for s in range(1, _STEPS + 1) for r in (0, 1)
        }
        gradients = sum(count * gradient(*at, name) for at, count in counts.items()).numpy().ravel()  # type: ignore[union-attr]
        assert np.allclose(applied + left, gradients, atol=bound)
        assert np.abs(left).max() > 0.01


def test_what_is_no_matrix_travels_as_it_is(results: list[dict[str, Result]]) -> None:
    for step, mean in enumerate(results[0]["plain"].means, 1):
        for name in ("bias", "other"):
            exact = gradient(step, 0, name) / 2 + gradient(step, 1, name) / 2
            assert np.array_equal(mean[name], exact.numpy())


def test_what_is_not_finite_reaches_all_and_leaves_no_trace(results: list[dict[str, Result]]) -> None:
    for ofs in results:
        spoiled = ofs["spoiled"].means[-1]
        assert np.isnan(spoiled["weight"]).all()
        assert np.isfinite(spoiled["last"]).all()
        assert np.allclose(ofs["spoiled"].residuals["weight"], ofs["before"].residuals["weight"], atol=1e-6)
