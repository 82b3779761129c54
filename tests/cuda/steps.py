"""Trains with the engine and without Lightning, which wants a device for each rank: here two ranks share a GPU.

The same on a CPU, so that what is here runs where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_bytescheduler.collectives import routing_group
from lightning_bytescheduler.collectives.device_streams import PayloadCopies
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.launch_order import order_of
from lightning_bytescheduler.collectives.route import AllReduce, OnDevice
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.fit import Fit, StepMode, TrainingStep
from lightning_bytescheduler.ddp.fit_report import Record, SchedulerStatistics
from lightning_bytescheduler.ddp.steps import MergedStep, OverlappedStep, PlainStep
from lightning_bytescheduler.scheduler.core import ByteCore
from tests.support.late_copies import LateCopies
from tests.support.models import MeanOfAll
from tests.support.rank_pool import let_go
from tests.support.simulated_device import LatePayloads, on_device

__all__ = ["Case", "Scheduled", "train_both"]

_BUCKET_MB = 0.002
_TIMEOUT_S = 60.0

Inside = Callable[["Scheduled"], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``, which is the first GPU for every rank.
        backend: Backend of the process groups.
        mode: ``"overlapped"``, ``"ddp"`` or ``"synchronised"``.
        max_norm: Clip to this norm.
        late_gradients: For how many cycles the GPU does nothing in each backward pass, before the first gradient.
        halved: Train DDP with half of the loss: what is compared with it halves its gradients.
        routed: Have one order for all collectives of DDP's group, and some in the forward and backward passes.
        dtype: Type of parameters and gradients.
        compiled: Backend that compiles the model, if any.
        by_host: Have gradients travel from host memory; on a CPU as if it was a GPU.
        compression: Codec that encodes them on the GPU before that; on a CPU as if it was one.
        steps: Optimizer steps.
    """

    device: str
    backend: str
    mode: str = "overlapped"
    max_norm: float | None = None
    late_gradients: int = 0
    halved: bool = False
    steps: int = 6
    routed: bool = False
    dtype: torch.dtype = torch.float32
    compiled: str | None = None
    by_host: bool = False
    compression: str | None = None


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.cycles:
            torch.cuda._sleep(ctx.cycles)
        return gradients[0], None


class _Tower(nn.Module):
    def __init__(self, late_gradients: int, talks: bool) -> None:
        super().__init__()
        self.talks = talks
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.late_gradients = late_gradients

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(inputs))
            inputs = inputs + (MeanOfAll.apply(hidden) if self.talks else hidden)
        late: Tensor = _Late.apply(inputs, self.late_gradients) if self.late_gradients else inputs
        return late


class _PlainFit(Fit):
    """Steps of each kind, without a Trainer that decides."""

    def make_step(self, number: int, *, as_ddp: bool) -> TrainingStep:
        if as_ddp and self.merges:
            return MergedStep(self, number, limit=0)
        if number > 1 and self.overlapped and not as_ddp:
            return OverlappedStep(self, number)
        return PlainStep(self, number)


class Scheduled:
    """An engine and what it needs, on one rank."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device, case: Case) -> None:
        self.errors: list[BaseException] = []
        with patch.object(routing_group, "ROUTED_BACKENDS", {case.backend} if case.routed else set()):
            self.groups = SchedulerGroups.create(
                timeout=timedelta(seconds=_TIMEOUT_S), routed_on=device, by_host=case.by_host
            )
        self.groups.warm_up(self.groups.wire_device(device))
        self.order = order_of(self.groups.control, self._note, direct=False)
        self.core = ByteCore(partition_size=400, credit=800, order=self.order)
        self.record = Record()
        self.statistics = self.record.statistics
        self.compression = self._compression(parameters, case)
        copies = None
        if case.by_host:
            there = LateCopies if self.compression is None else LatePayloads
            copies = PayloadCopies(device) if device.type == "cuda" else there(device)
        self.route = (
            OnDevice(self.groups.data, self._note, device)
            if device.type == "cuda" and copies is None
            else AllReduce(self.groups.data, self._note, copies)
        )
        if self.compression is not None and copies is not None:
            self.compression.work_on(copies)
        self.order.start(self.core.update_order)
        self.routing = self.route.routing = self._ordered(device)
        wire: Any = SimpleNamespace(
            core=self.core,
            route=self.route,
            groups=self.groups,
            timeout=_TIMEOUT_S,
            servers=None,
            record=self.record,
        )
        self.fit = _PlainFit(wire, parameters, device, codec=self.compression)
        self.fit.overlapped = case.mode != "synchronised"
        self.fit.mode = StepMode(case.mode == "ddp")
        self.fit.sharded = case.max_norm is not None

    def _compression(self, parameters: list[nn.Parameter], case: Case) -> GradientCompression | None:
        rules = CompressionRules.resolve(case.compression, None if case.compression is None else 40)
        if rules is None:
            return None
        named = {str(position): parameter for position, parameter in enumerate(parameters)}
        return GradientCompression(rules, named, record=self.record)

    def _ordered(self, device: torch.device) -> RoutingGroup | None:
        if self.groups.reports is None or dist.group.WORLD is None:
            return None
        routing = RoutingGroup(
            dist.group.WORLD,
            self.groups.data,
            self.groups.reports,
            core=self.core,
            order=self.order,
            device=device,
            on_error=self._note,
            timeout=_TIMEOUT_S,
        )
        routing.install()
        return routing

    def _note(self, error: BaseException) -> BaseException:
        self.errors.append(error)
        self.core.abort(error)
        return error

    def close(self) -> None:
        if self.routing is not None:
            assert self.routing.in_order
            self.routing.uninstall(failed=False, timeout=_TIMEOUT_S)
            assert self.routing.idle
        self.core.shutdown(timeout=_TIMEOUT_S)
        assert self.order.end(_TIMEOUT_S)
        self.fit.open_gates()
        assert self.route.stop_encoding(_TIMEOUT_S)
        assert self.route.stop(_TIMEOUT_S)
        let_go()
        self.groups.destroy()
        assert not self.errors


@contextmanager
def _world(rank: int, world_size: int, meeting: str, case: Case) -> Iterator[torch.device]:
    device = torch.device("cuda", 0) if case.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        case.backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        yield device
    finally:
        let_go()
        dist.destroy_process_group()


def _model(rank: int, case: Case, device: torch.device) -> tuple[DistributedDataParallel, Optimizer, list[Tensor]]:
    torch.manual_seed(7)
    model = _Tower(case.late_gradients, case.routed).to(device, case.dtype)
    wrapped = DistributedDataParallel(
        model if case.compiled is None else torch.compile(model, backend=case.compiled),
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=_BUCKET_MB,
        gradient_as_bucket_view=True,
    )
    # Dynamo cuts compiled graphs at DDP's bucket size, which it wants no smaller than DDP's first bucket.
    wrapped.bucket_bytes_cap = max(wrapped.bucket_bytes_cap, dist._DEFAULT_FIRST_BUCKET_BYTES)
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(8, 24, generator=generator).to(device, case.dtype) for _ in range(case.steps)]
    return wrapped, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3), inputs


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def _train_ddp(rank: int, case: Case, device: torch.device) -> list[Tensor]:
    model, optimizer, inputs = _model(rank, case, device)
    for batch in inputs:
        loss = model(batch).pow(2).mean() * (0.5 if case.halved else 1.0)
        optimizer.zero_grad()
        loss.backward()
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
    return _weights(model)


def _train_scheduled(
    rank: int, case: Case, device: torch.device, inside: Inside
) -> tuple[list[Tensor], SchedulerStatistics, Any]:
    model, optimizer, inputs = _model(rank, case, device)
    scheduled = Scheduled(list(model.module.parameters()), device, case)
    fit = scheduled.fit
    fit.take_over(model)
    with inside(scheduled) as seen:
        for batch in inputs:
            fit.begin_forward()
            loss = model(batch).pow(2).mean()
            fit.end_forward()
            optimizer.zero_grad()
            with fit.backward():
                loss.backward()
            if case.max_norm is not None and not fit.step.transforms.clip_norm(optimizer, case.max_norm):
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            if fit.overlapped:
                fit.take_step(optimizer, optimizer.step)
            else:
                optimizer.step()
        fit.flush()
        weights = _weights(model)
    scheduled.close()
    return weights, scheduled.statistics, seen


def _nothing(scheduled: Scheduled) -> AbstractContextManager[Any]:
    return nullcontext()


def train_both(
    rank: int, world_size: int, meeting: str, case: Case, inside: Inside = _nothing
) -> tuple[list[Tensor], list[Tensor], int, Any]:
    """Train with DDP, then with the engine; a function for :meth:`RankPool.run`.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        meeting: A file that does not exist, where they find each other.
        case: What is trained.
        inside: Entered around the engine's training; what it gives is returned.

    Returns:
        The weights that DDP ended with, those that the engine ended with, how many updates it deferred, and what
        ``inside`` gave.
    """
    with _world(rank, world_size, meeting, case) as device:
        expected = _train_ddp(rank, case, device)
        with on_device() if case.compression is not None and device.type == "cpu" else nullcontext():
            weights, statistics, seen = _train_scheduled(rank, case, device, inside)
        return expected, weights, statistics.deferred_updates, seen
