"""Runs one loop of Fabric with DDP and with the scheduler, in one process per rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_bytescheduler import ByteSchedulerFabricStrategy, OverlapPlan, SchedulerStatistics
from lightning_bytescheduler.ddp.gates import GatedParameter
from tests.support.compare import bit_differences
from tests.support.network import LateNetwork

__all__ = ["SIZES", "Compared", "Loop", "compare", "data", "tower"]

SIZES: Mapping[str, Any] = {"mode": "overlapped", "bucket_cap_mb": 0.002, "partition_size": 400, "credit": 800}
"""Several buckets in a small model, several partitions in a bucket, two of them in flight."""

Loop = Callable[[Fabric], Mapping[str, Any]]
"""Trains, and returns what has to be DDP's to the last bit; modules among that are compared when all has ended."""


class Compared(NamedTuple):
    """What one rank saw."""

    differences: list[str]
    plan: OverlapPlan | None
    statistics: SchedulerStatistics
    forced: int


def tower(*, norm: bool = False) -> nn.Sequential:
    """Linear layers, the same on all ranks."""
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(12, 24)]
    for _ in range(4):
        layers += [nn.Tanh(), *([nn.BatchNorm1d(24)] if norm else []), nn.Linear(24, 24)]
    return nn.Sequential(*layers, nn.Linear(24, 3))


def data(fabric: Fabric, batches: int = 9) -> list[tuple[Tensor, Tensor]]:
    """Batches of this rank."""
    generator = torch.Generator().manual_seed(11 + fabric.global_rank)
    return [(torch.randn(4, 12, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(batches)]


def compare(
    rank: int,
    loops: Mapping[str, Loop],
    *,
    network: str = "late",
    options: Mapping[str, Any] = SIZES,
    fabric: Mapping[str, Any] | None = None,
) -> dict[str, Compared]:
    """Run each of ``loops`` with DDP and with the scheduler, on this rank of a pool."""
    return {name: _compare(rank, loop, network, options, fabric or {}) for name, loop in loops.items()}


def _compare(rank: int, loop: Loop, network: str, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> Compared:
    torch.set_num_threads(1)
    rank_zero_only.rank = rank
    passed = {name: value for name, value in options.items() if name not in {*SIZES, "cross_barrier"}}
    expected = _settled(loop(_launched(DDPStrategy(**passed), arguments)))
    late = LateNetwork(rank, held=network == "held")
    strategy = ByteSchedulerFabricStrategy(**options)
    with late if network != "plain" else nullcontext():
        actual = loop(_launched(strategy, arguments))
        strategy.flush()
        found = _settled(actual)
    plan, statistics = strategy.plan, strategy.statistics
    assert statistics is not None
    strategy.end()
    modules = [value for value in actual.values() if isinstance(value, nn.Module)]
    assert not [p for module in modules for p in module.parameters() if type(p) is GatedParameter]
    wrapped = [inner for module in modules for inner in module.modules() if isinstance(inner, DistributedDataParallel)]
    assert not [inner for inner in wrapped if hasattr(inner, "_bytescheduler")], "a fit that is over still looks"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    return Compared(bit_differences(expected, found), plan, statistics, late.forced)


def _launched(strategy: Any, arguments: Mapping[str, Any]) -> Fabric:
    torch.manual_seed(5)
    made = {name: value() if name == "plugins" else value for name, value in arguments.items()}
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy, **made)
    fabric.launch()
    return fabric


def _settled(outcome: Mapping[str, Any]) -> dict[str, Any]:
    stateful = (nn.Module, torch.optim.Optimizer)
    return {
        name: _copied(value.state_dict() if isinstance(value, stateful) else value) for name, value in outcome.items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, (list, tuple)) else value
