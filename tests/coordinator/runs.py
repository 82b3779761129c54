"""Coordinators and small workers for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import torch
from torch import Tensor

from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.round_end import RoundOptions
from tests.coordinator.small_worker import SmallWorker

ELEMENTS = 30


def options_of(*, lease: float = 60.0, workers: int = 1, **given: Any) -> CoordinatorOptions:
    """Rounds of one step; a time limit never decides."""
    given.setdefault("inner_steps", 1)
    rounds = RoundOptions(start_workers=workers, quorum=0.0, grace=30.0)
    return CoordinatorOptions(run=run_options(**given), rounds=rounds, lease=lease)


def weights_of(seed: int = 0) -> dict[str, Tensor]:
    """A model of ``ELEMENTS`` numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {"layer.weight": torch.randn(6, 4, generator=generator), "layer.bias": torch.randn(6, generator=generator)}


def updates_of(workers: int) -> list[Tensor]:
    """An update of each worker."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ELEMENTS, generator=generator) for _ in range(workers)]


def in_a_run(server: CoordinatorServer, workers: int, work: Callable[..., Awaitable[Any]]) -> Any:
    """Call ``work`` with so many workers, that have not joined."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            made = [SmallWorker(server.url, f"w{number}", weights_of(number)) for number in range(workers)]
            for worker in made:
                await stack.enter_async_context(worker)
            return await asyncio.wait_for(work(*made), 60)

    return asyncio.run(run())
