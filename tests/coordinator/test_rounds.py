"""The service and a small worker: joining, rounds, updates and means."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.options import CoordinatorOptions, run_options
from lightning_bytescheduler.coordinator.server import CoordinatorServer
from lightning_bytescheduler.diloco.outer_optimizer import OuterOptimizer
from lightning_bytescheduler.diloco.round_end import RoundOptions
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean
from tests.coordinator.small_worker import SmallWorker


def options_of(*, rounds: RoundOptions | None = None, lease: float = 60.0, **given: Any) -> CoordinatorOptions:
    given.setdefault("inner_steps", 1)
    own = {name: given.pop(name) for name in ("late", "spool_bytes", "spool_memory", "keep_rounds") if name in given}
    return CoordinatorOptions(
        run=run_options(**given), rounds=rounds or RoundOptions(quorum=0.0, grace=30.0), lease=lease, **own
    )


def weights_of(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"layer.weight": torch.randn(6, 4, generator=generator), "layer.bias": torch.randn(6, generator=generator)}


def updates_of(workers: int, size: int = 30) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, generator=generator) for _ in range(workers)]


def in_a_run(server: CoordinatorServer, workers: int, work: Callable[[list[SmallWorker]], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with AsyncExitStack() as stack:
            made = [
                await stack.enter_async_context(SmallWorker(server.url, f"w{n}", weights_of(n))) for n in range(workers)
            ]
            return await asyncio.wait_for(work(made), 20)

    return asyncio.run(run())


@pytest.fixture
def server() -> Iterator[CoordinatorServer]:
    with CoordinatorServer(options_of(rounds=RoundOptions(start_workers=3, quorum=0.0))) as made:
        yield made


def test_three_workers_take_rounds_and_have_the_coordinators_bits(server: CoordinatorServer) -> None:
    updates = updates_of(3)

    async def work(workers: list[SmallWorker]) -> list[dict[str, Tensor]]:
        for worker in workers:
            await worker.join()
        for _ in range(3):
            await asyncio.gather(
                *(
                    w.take_part(update, samples=n + 1)
                    for n, (w, update) in enumerate(zip(workers, updates, strict=True))
                )
            )
        assert len({worker.chain for worker in workers}) == 1
        return [dict(worker.outer.weights) for worker in workers]

    found = in_a_run(server, 3, work)

    expected = OuterOptimizer(weights_of(0))
    for _ in range(3):
        mean = WeightedMean({"all": torch.empty(30)})
        for weight, update in enumerate(updates, start=1):
            mean.add({"all": update}, weight=weight)
        weight, bias = mean.mean()["all"].split([24, 6])
        expected.step({"layer.weight": weight.view(6, 4), "layer.bias": bias})
    for weights in found:
        for name, tensor in expected.weights.items():
            assert torch.equal(weights[name], tensor)
    status = server.status()
    assert (status.weights_version, status.samples) == (3, 18)
    assert [(one.round, one.samples, one.merged) for one in status.rounds] == [(1, 6, 3), (2, 6, 3), (3, 6, 3)]


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8", "int4"])
def test_smaller_wires_give_everybody_the_same_bits(wire_dtype: str) -> None:
    options = options_of(rounds=RoundOptions(start_workers=2, quorum=0.0), wire_dtype=wire_dtype)
    with CoordinatorServer(options) as made:

        async def checked(workers: list[SmallWorker]) -> None:
            for worker in workers:
                await worker.join()
            for _ in range(2):
                updates = zip(workers, updates_of(2), strict=True)
                await asyncio.gather(*(worker.take_part(update, samples=3) for worker, update in updates))
            first, second = (worker.outer.weights for worker in workers)
            assert all(torch.equal(first[name], second[name]) for name in first)
            assert made.service.weights is not None
            kept = made.service.weights._optimizer.weights
            assert all(torch.equal(first[name], kept[name]) for name in first)

        in_a_run(made, 2, checked)
