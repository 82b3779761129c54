"""Gradients that travel by host memory, as a GPU's do to servers and compressed: the bits of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim import AdamW

from lightning_bytescheduler.collectives.device_streams import PayloadCopies
from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.parity.test_compression import INT8
from tests.parity.test_kinds_of_tensors import Complex
from tests.parity.test_parameter_servers import PS
from tests.support import late_copies
from tests.support.fit import Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.servers import train_with_servers

model = partial(Tower, optimizer=partial(AdamW, lr=0.005))


@pytest.mark.slow
def test_ranks_that_are_servers_give_ddps_bits(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=8, trainer={"accumulate_grad_batches": 2})
    ddp, overlapped, waiting, as_ddp = train_on(
        two_ranks,
        recipe,
        DDP,
        Run(options=PS, by_host=True),
        Run(options={**PS, "cross_barrier": False}, by_host=True),
        Run(options={**PS, "mode": "ddp"}, by_host=True),
    )
    assert_overlapped(overlapped, share=0.8)
    for ours in (overlapped, waiting, as_ddp):
        assert_same(ddp, ours)


@pytest.mark.slow
def test_a_spare_server_gives_ddps_bits(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=8)
    (ddp,) = train_on(two_ranks, recipe, DDP)
    run = Run(options={**PS, "servers": 1}, by_host=True)
    served = two_ranks.run(train_with_servers, recipe=recipe, run=run, servers=1)
    assert_same(ddp, [one.outcome for one in served if one.outcome is not None])


@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        pytest.param(INT8, {}, id="int8"),
        pytest.param({**INT8, "compression": "topk:0.1"}, {}, id="topk", marks=pytest.mark.slow),
        pytest.param(INT8, {"gradient_clip_val": 0.05}, id="int8, clipped by norm, in shards", marks=pytest.mark.slow),
    ],
)
def test_compressed_gradients_have_the_same_bits(
    two_ranks: RankPool, options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    recipe = Recipe(model=model, steps=8, trainer=trainer)
    run = Run(options=options)
    straight, by_host = train_on(two_ranks, recipe, run, replace(run, by_host=True))
    assert_overlapped(by_host, share=0.8)
    assert_same(straight, by_host)


@pytest.mark.slow
def test_complex_gradients_that_are_reduced_in_shards_come_back_to_their_places(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Complex, steps=8, trainer={"gradient_clip_val": 0.05})
    run = Run(options={**INT8, "partition_size": 50, "credit": 100})  # several parts of what is complex
    straight, by_host = train_on(two_ranks, recipe, run, replace(run, by_host=True))
    assert_overlapped(by_host, share=0.8)
    assert_same(straight, by_host)


def long_copies() -> AbstractContextManager[Any]:
    """Copies that end after any thread that does not wait for them, also on a busy machine."""
    return patch.object(late_copies, "LATE_S", 0.05)


@contextmanager
def without_waiting_for_copies() -> Iterator[None]:
    with patch.object(PayloadCopies, "_done", lambda *_, **__: True), long_copies():
        yield


def train_sabotaged(rank: int, recipe: Recipe, run: Run, sabotage: Callable[[], Any]) -> Outcome:
    with sabotage():
        return train(rank, recipe, run)


def test_a_wait_that_is_left_out_shows(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=4)
    (ddp,) = train_on(two_ranks, recipe, DDP)
    run = Run(options=PS, by_host=True)
    broken = two_ranks.run(train_sabotaged, recipe=recipe, run=run, sabotage=without_waiting_for_copies)
    with pytest.raises(AssertionError):
        assert_same(ddp, broken)


def fail_on_the_way_back(rank: int, recipe: Recipe, run: Run) -> str:
    def fail(self: PayloadCopies, copy: torch.Tensor, buffer: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with patch.object(PayloadCopies, "bring_back", fail), pytest.raises(RuntimeError) as raised:
        train(rank, recipe, run)
    return str(raised.value)


@pytest.mark.parametrize("cross_barrier", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_copy_that_fails_ends_the_fit_on_all_ranks(cross_barrier: bool) -> None:
    run = Run(options={**PS, "cross_barrier": cross_barrier}, by_host=True, network="plain")
    with RankPool(2) as pool:  # of its own: it has failed then
        said = pool.run(fail_on_the_way_back, recipe=Recipe(model=model, steps=4), run=run)
    assert all("illegal memory access" in one for one in said), said
