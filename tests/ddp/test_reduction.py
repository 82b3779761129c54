"""Norms of shards: whatever way parameters, parts and shards overlap, they add up to each parameter's norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.ddp.reduction import _shard_norms, total_norm
from lightning_bytescheduler.scheduler.task import CommTask


def cut(size: int, partition: int) -> CommTask:
    task = CommTask("bucket 0 scatter", size, launch=lambda _: None)
    task.partition(partition)
    return task


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0),
    partition=st.integers(1, 40),
    world_size=st.integers(1, 5),
)
def test_norms_of_all_ranks_shards_are_the_parameters_norms(sizes: list[int], partition: int, world_size: int) -> None:
    buffer = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(sum(sizes)))
    task = cut(buffer.numel(), partition)
    ranks = [_shard_norms(buffer, sizes, task, rank, world_size) for rank in range(world_size)]
    for position, gradient in enumerate(buffer.split(sizes)):
        found = total_norm(norms.get(position, 0.0) for norms in ranks)
        assert found == pytest.approx(float(gradient.double().norm()), rel=1e-6, abs=0.0)


@pytest.mark.parametrize(("value", "finite"), [(3e38, True), (math.inf, False), (math.nan, False)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_is_finite_if_and_only_if_the_gradient_is(kind: torch.dtype, value: float, finite: bool) -> None:
    buffer = torch.ones(10, dtype=kind)
    buffer[7] = value
    norms: Any = _shard_norms(buffer, [5, 5], cut(10, 4), 0, 1)
    assert math.isfinite(norms[0])
    assert math.isfinite(norms[1]) == finite
