"""Compressed gradients on two ranks, with no training around them: what is applied, what is kept, who agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.groups import leave
from lightning_bytescheduler.collectives.launch_order import order_of
from lightning_bytescheduler.collectives.route import AllReduce
from lightning_bytescheduler.ddp.compressed_reduction import (
    GradientCompression,
)
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.fit_report import Record, SchedulerStatistics
from lightning_bytescheduler.ddp.reduction import GradientBucket, Reduction, ShardedReduction
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.scheduler.core import ByteCore
from tests.support.rank_pool import RankPool, join_default_group, let_go
from tests.support.waiting import WAIT

Array = npt.NDArray[np.float32]

_SIZES = {"a": 700, "b": 30, "c": 513}  # "b" is too small
_MIN_SIZE = 100
_PARTITION = 400
_BLOCK = 256


def gradient(step: int, rank: int) -> Array:
    generator = np.random.default_rng([step, rank])
    numbers = generator.standard_normal(sum(_SIZES.values())) * np.exp(generator.standard_normal())
    return numbers.astype(np.float32)


@dataclass
class Result:
    means: list[Array]  # by step
    residuals: dict[str, Array]
    norms: list[float]
    statistics: SchedulerStatistics


def reduce_all(rank: int, jobs: list[dict[str, Any]]) -> list[Result]:
    """One after the other, on a group of their own: torch's store tells apart no two default groups in a row."""
    torch.set_num_threads(1)
    join_default_group(rank)
    group, control = (dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT)) for _ in range(2))
    try:
        return [reduce_steps(rank, group, control, **job) for job in jobs]
    finally:
        let_go()
        leave(group, idle=True)
        leave(control, idle=True)
        dist.destroy_process_group()


class Counts:
    """What a rank counts in a step, known from the start; nothing in some of them."""

    def __init__(self, step: int, rank: int) -> None:
        first = (0.25, 1.0, 0.6, 0.0)[step % 4]
        self.factor = 1.0 - first if rank else first

    def when_known(self, then: Callable[[], None]) -> None:
        then()

    def wait(self, failure: Callable[[], BaseException | None]) -> None:
        pass


def reduce_steps(
    rank: int,
    group: dist.ProcessGroup,
    control: dist.ProcessGroup,
    steps: int,
    compression: Any,
    sharded: bool = False,
    spoil: dict[int, float] | None = None,
    min_size: int = _MIN_SIZE,
    weighted: bool = False,
) -> Result:
    """Average some buckets, of gradients that only step and rank tell, and return all of it."""
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in _SIZES.items()}
    record = Record()
    rules = CompressionRules.resolve(compression, min_size)
    assert rules is not None
    known = GradientCompression(rules, parameters, record=record)
    residuals = known.residuals

    def failed(error: BaseException) -> BaseException:
        core.abort(error)
        return error

    # Norms and gathers become ready in another order on each rank: one rank decides, as in a fit.
    order = order_of(control, failed, direct=False)
    core = ByteCore(partition_size=_PARTITION, credit=2 * _PARTITION, order=order)
    order.start(core.update_order)

    route = AllReduce(group, failed)
    result = Result([], {}, [], record.statistics)
    try:
        for step in range(1, steps + 1):
            known.begin_step()
            buffer = torch.from_numpy(gradient(step, rank).copy())
            if spoil and step in spoil and rank == 1:
                buffer[5] = spoil[step]
            bucket = GradientBucket(0, list(parameters.values()), buffer, priority=0)
            weight: Any = Counts(step, rank) if weighted else StepWeight(2)
            if not weight.factor:
                buffer.fill_(torch.nan)  # the mean over no sample
            kind = ShardedReduction if sharded else Reduction
            reduction = kind(core, route, step, weight, codec=known)
            task = reduction.reduce(bucket)
            reduction.close()
            task.wait(WAIT)
            if isinstance(reduction, ShardedReduction) and reduction.norms is not None:
                reduction.norms.wait(WAIT)
                result.norms.append(reduction.norm())
            result.means.append(buffer.numpy())
    finally:
        core.shutdown(timeout=WAIT)
        order.end(WAIT)
        route.stop_encoding(WAIT)
        route.stop(WAIT)
    result.residuals = {name: residuals.of(name, _SIZES[name]).numpy() for name in ("a", "c")}
    return result


def int8(values: Array) -> Array:
    """Blocks of 256, each with a scale, to nearest.

    Multiplied by the reciprocal, as the package does it: where a number is next to halfway between two levels, the last
    digit decides about a whole one, here in some of 250,000 numbers.
    """
    decoded = np.empty_like(values)
    for first in range(0, len(values), _BLOCK):
        block = values[first : first + _BLOCK]
        scale = np.float32(np.abs(block).max() / np.float32(127))
        whole = np.zeros_like(block) if scale == 0 else np.rint(block * (np.float32(1) / scale))
        decoded[first : first + _BLOCK] = whole * scale
    return decoded


def pieces() -> list[tuple[int, int, int, bool]]:
    """(first, end, owner, whether it is compressed) of all pieces of all shards."""
    edges = np.cumsum([0, *_SIZES.values()])
    size = int(edges[-1])
    part = -(-size // -(-size // _PARTITION))
    found = []
    for start in range(0, size, part):
        length = min(part, size - start)
        shard = -(-length // 2)
        for owner in range(2):
            low, high = start + owner * shard, start + min((owner + 1) * shard, length)
            for name, first, end in zip(_SIZES, edges[:-1], edges[1:], strict=True):
                if max(low, first) < min(high, end):
                    found.append((int(max(low, first)), int(min(high, end)), owner, _SIZES[name] >= _MIN_SIZE))
    return found


def by_numpy(steps: int) -> tuple[list[Array], list[Array]]:
    """Means by step, and both ranks' residuals at the end: the algorithm, written down once more."""
    residuals = [np.zeros(sum(_SIZES.values()), np.float32) for _ in range(2)]
    means = []
    for step in range(1, steps + 1):
        halves = [gradient(step, rank) * np.float32(0.5) for rank in range(2)]
        mean = np.empty_like(halves[0])
        for first, end, owner, compressed in pieces():
            here, other = slice(first, end), 1 - owner
            if not compressed:
                mean[here] = halves[0][here] + halves[1][here]
                continue
            share = halves[other][here] + residuals[other][here]
            sent = int8(share)
            residuals[other][here] = share - sent
            total = residuals[owner][here] + (halves[owner][here] + sent)
            mean[here] = int8(total)
            residuals[owner][here] = total - mean[here]
        means.append(mean)
    return means, residuals


_STEPS = 5  # one more than what ranks count goes through
_LONG = 8
_MIXED: list[Any] = ["bf16", "onebit", "topk:0.05", {"a": "int8:stochastic", "c": "int4"}]
_SPOILED = {2: float("inf"), 3: float("nan")}


@pytest.fixture(scope="module")
def results(two_plain_ranks: RankPool) -> dict[str, list[Result]]:
    """Of both ranks, by name of the job."""
    jobs = {
        "numpy": {"steps": _LONG, "compression": "int8"},
        **{str(mixed): {"steps": _STEPS, "compression": mixed} for mixed in _MIXED},
        "spoiled": {"steps": 3, "compression": "int8", "sharded": True, "spoil": _SPOILED},
        "sharded": {"steps": 1, "compression": "int8", "sharded": True},
        "weighted": {"steps": _STEPS, "compression": "int4", "weighted": True},
        "weighted, in shards": {"steps": _STEPS, "compression": "topk:0.05", "weighted": True, "sharded": True},
    }
    by_rank = two_plain_ranks.run(reduce_all, jobs=list(jobs.values()))
    return {name: [ofs[index] for ofs in by_rank] for index, name in enumerate(jobs)}


def test_it_is_the_algorithm_as_numpy_has_it(results: dict[str, list[Result]]) -> None:
    first, second = results["numpy"]
    means, residuals = by_numpy(_LONG)
    for step, mean in enumerate(means):
        assert first.means[step].tobytes() == second.means[step].tobytes(), "not even the sign of a zero may differ"
        assert np.allclose(first.means[step], mean, rtol=1e-5, atol=1e-5)
    for rank, result in enumerate((first, second)):
        assert np.allclose(result.residuals["a"], residuals[rank][:700], rtol=1e-5, atol=1e-4)
        assert np.allclose(result.residuals["c"], residuals[rank][730:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compression", _MIXED)
def test_what_was_applied_and_what_is_left_add_up_to_the_gradients(
    results: dict[str, list[Result]], compression: Any
) -> None:
    ours = results[str(compression)]
    applied = np.sum([mean.astype(np.float64) for mean in ours[0].means], axis=0)
    gradients = np.sum([gradient(step, rank) / 2 for step in range(1, _STEPS + 1) for rank in range(2)], axis=0)
    for name, here in (("a", slice(0, 700)), ("c", slice(730, None))):
        left = ours[0].residuals[name].astype(np.float64) + ours[1].residuals[name]
        assert np.allclose(applied[here] + left, gradients[here], rtol=1e-5, atol=1e-5)
        assert np.abs(left).max() > 0
    exact = gradient(_STEPS, 0) / 2 + gradient(_STEPS, 1) / 2
    assert np.array_equal(ours[0].means[-1][700:730], exact[700:730])


@pytest.mark.parametrize("job", ["weighted", "weighted, in shards"])
def test_what_ranks_count_is_counted_once(results: dict[str, list[Result]], job: str) -> None:
    """A step's residual has that step's weight, not the weight of the step that it travels with."""
    ours = results[job]
    applied = np.sum([mean.astype(np.float64) for mean in ours[0].means], axis=0)
    gradients = np.sum(
        [Counts(step, rank).factor * gradient(step, rank) for step in range(1, _STEPS + 1) for rank in range(2)], axis=0
    )
    for name, here in (("a", slice(0, 700)), ("c", slice(730, None))):
        left = ours[0].residuals[name].astype(np.float64) + ours[1].residuals[name]
        assert np.allclose(applied[here] + left, gradients[here], rtol=1e-5, atol=1e-5)
        assert np.abs(left).max() > 0
    assert all(np.array_equal(first, second) for first, second in zip(ours[0].means, ours[1].means, strict=True))


def test_what_is_not_finite_is_seen_and_the_residuals_stay(results: dict[str, list[Result]]) -> None:
    for result, before in zip(results["spoiled"], results["sharded"], strict=True):
        assert np.isfinite(result.norms[0])
        assert not np.isfinite(result.norms[1:]).any()
        assert np.isfinite(result.residuals["a"]).all()
        assert np.isfinite(result.residuals["c"]).all()
        # Where the infinity was, nothing could be told of what was left out.
        assert np.array_equal(result.residuals["a"][:64], before.residuals["a"][:64])


def test_norms_are_those_of_what_is_applied(results: dict[str, list[Result]]) -> None:
    first, second = results["sharded"]
    assert first.norms == second.norms
    assert np.allclose(first.norms, [np.linalg.norm(first.means[0])], rtol=1e-5)
    assert first.statistics.codec_s > 0
