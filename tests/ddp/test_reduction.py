"""Norms of shards: whatever way parameters, parts and shards overlap, they add up to the norm of all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.ddp.reduction import norm_of_shards, total_norm
from lightning_bytescheduler.scheduler.task import CommTask


def cut(size: int, partition: int) -> CommTask:
    task = CommTask("bucket 0 scatter", size, launch=lambda _: None)
    task.partition(partition)
    return task


@given(size=st.integers(1, 70), partition=st.integers(1, 40), world_size=st.integers(1, 5))
def test_norms_of_all_ranks_shards_add_up(size: int, partition: int, world_size: int) -> None:
    buffer = torch.randn(size, generator=torch.Generator().manual_seed(size))
    task = cut(size, partition)
    found = total_norm(norm_of_shards(buffer, task, rank, world_size) for rank in range(world_size))
    assert found == pytest.approx(float(buffer.double().norm()), rel=1e-6, abs=0.0)


def test_the_norm_of_a_large_shard_keeps_its_digits() -> None:
    buffer = torch.randn(4_000_000, generator=torch.Generator().manual_seed(1))
    found = norm_of_shards(buffer, cut(len(buffer), len(buffer)), 0, 1)
    assert found == pytest.approx(float(torch.linalg.vector_norm(buffer, dtype=torch.float64)), rel=1e-6)


@pytest.mark.parametrize(("value", "finite"), [(3e38, True), (math.inf, False), (math.nan, False)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_is_finite_if_and_only_if_the_gradient_is(kind: torch.dtype, value: float, finite: bool) -> None:
    buffer = torch.ones(10, dtype=kind)
    buffer[7] = value
    assert math.isfinite(norm_of_shards(buffer, cut(10, 4), 0, 1)) == finite


def test_total_norm() -> None:
    assert total_norm([]) == 0.0
    assert total_norm([3.0, 4.0]) == 5.0
    assert total_norm([1e200, 1e200]) == pytest.approx(math.sqrt(2) * 1e200)
    assert total_norm([math.inf, 1.0]) == math.inf
    assert math.isnan(total_norm([math.inf, math.nan]))
