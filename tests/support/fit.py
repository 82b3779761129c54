"""Trains one recipe under several strategies in one process per rank, and says where the results differ."""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_bytescheduler import ByteSchedulerStrategy, SchedulerStatistics
from lightning_bytescheduler.collectives import routing_group
from lightning_bytescheduler.ddp import fit as fit_module
from lightning_bytescheduler.ddp import wire
from lightning_bytescheduler.ddp.deferred_optimizer import is_closed
from lightning_bytescheduler.ddp.fit_report import OverlapPlan
from lightning_bytescheduler.ddp.gates import GatedParameter
from lightning_bytescheduler.ddp.steps import OverlappedStep
from lightning_bytescheduler.ddp.strategy import SchedulerHooks
from tests.support.compare import bit_differences
from tests.support.late_copies import by_host
from tests.support.network import LateNetwork
from tests.support.rank_pool import show_stacks
from tests.support.simulated_device import on_device

__all__ = ["SIZES", "Outcome", "Recipe", "Run", "differences", "train", "train_all"]

SIZES: Mapping[str, Any] = {"bucket_cap_mb": 0.002, "partition_size": 400, "credit": 800}
"""Several buckets in a small model, several partitions in a bucket, two of them in flight."""

_LANDING_S = 8.0  # for the last gradients after a failure

Sabotage = Callable[[LightningModule], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, whatever the strategy.

    Attributes:
        model: Makes a :class:`tests.support.models.Trained`.
        steps: Optimizer steps.
        trainer: Arguments of the Trainer.
        callbacks: Factories of callbacks; each rank and run has its own.
        plugins: Factories of plugins.
        ddp: Options of DistributedDataParallel, for every strategy.
        resume: A checkpoint to start from.
        after: What is done with trainer and model after the fit.
    """

    model: Callable[[], Any]
    steps: int = 10
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Callback], ...] = ()
    plugins: tuple[Callable[[], Any], ...] = ()
    ddp: Mapping[str, Any] = field(default_factory=dict)
    resume: str | None = None
    after: Callable[[Trainer, Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a recipe is trained: with which strategy, over what network, and what is broken on purpose.

    Attributes:
        strategy: A name, or a factory of a strategy.
        options: Of ByteSchedulerStrategy, where steps overlap unless a mode is given; without any options, the
            strategy is asked for by its name.
        network: ``"late"``, ``"held"`` (see :class:`LateNetwork`) or ``"plain"``.
        patience: See :class:`LateNetwork`.
        sabotage: Removes something the result depends on.
        far: Whether the link counts as one with long round trips.
        routed: Have one order for all collectives of DDP's group, as on a GPU.
        by_host: Have gradients travel by host memory, as from a GPU.
        on_device: Have them encoded where they are besides, on a simulated device.
    """

    strategy: str | Callable[[], Strategy] = "bytescheduler"
    options: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    network: str = "late"
    patience: float = 20.0
    sabotage: Sabotage | None = None
    far: bool = False
    routed: bool = False
    by_host: bool = False
    on_device: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What a run ended with on one rank."""

    weights: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    losses: list[float]
    notes: list[Any]
    metrics: dict[str, float]
    warnings: list[str]
    error: str | None
    statistics: SchedulerStatistics | None
    reasons: tuple[str, ...]
    plan: OverlapPlan | None
    forced: int


def train(rank: int, recipe: Recipe, run: Run) -> Outcome:
    """Fit ``recipe`` once, on this rank of the pool."""
    show_stacks()
    torch.set_num_threads(1)
    rank_zero_only.rank = rank
    # Another seed on each rank: equal weights can only come from the strategy.
    torch.manual_seed(100 + rank)
    model = recipe.model()
    error = None
    with ExitStack() as stack:
        stack.enter_context(patch.object(wire, "_FAR_S", 0.0 if run.far else math.inf))  # whatever clocks say
        stack.enter_context(patch.object(fit_module, "_LANDING_S", _LANDING_S))  # however busy the machine is
        if run.far:
            stack.enter_context(patch.object(wire, "_chooses", lambda _: True))
        if run.routed:
            stack.enter_context(patch.object(routing_group, "ROUTED_BACKENDS", {"gloo"}))
        if run.by_host:
            stack.enter_context(by_host())
        if run.on_device:
            stack.enter_context(on_device())
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))  # ignored after an interrupt
        warnings.simplefilter("always")
        network = LateNetwork(rank, held=run.network == "held", patience=run.patience)
        if run.strategy != "ddp" and run.network != "plain":
            stack.enter_context(network)
        if run.sabotage is not None:
            # Steps in idle time take updates that nothing waits for, and would hide the sabotage.
            stack.enter_context(patch.object(OverlappedStep, "step_while_waiting", lambda *_: None))
            stack.enter_context(run.sabotage(model))
        trainer = Trainer(
            strategy=_strategy(recipe, run),
            callbacks=[make() for make in recipe.callbacks],
            plugins=[make() for make in recipe.plugins],
            **{**_QUIET, "max_steps": recipe.steps, "devices": int(os.environ["LOCAL_WORLD_SIZE"]), **recipe.trainer},
        )
        try:
            trainer.fit(model, ckpt_path=recipe.resume)
            if recipe.after is not None:
                recipe.after(trainer, model)
        except (Exception, SystemExit) as raised:
            if run.sabotage is None and not hasattr(model, "expected_error"):
                raise
            error = f"{type(raised).__name__}: {raised}"
    # Lightning leaves its teardown out where a callback's on_exception raises, as for weights that lack updates.
    _assert_clean(model, trainer, torn_down=run.sabotage is None)
    strategy = trainer.strategy
    ours = strategy if isinstance(strategy, ByteSchedulerStrategy) else None
    return Outcome(
        weights={name: value.detach().clone() for name, value in model.state_dict().items()},
        optimizers=[optimizer.state_dict() for optimizer in trainer.optimizers],
        losses=model.losses,
        notes=model.notes,
        metrics={k: v.item() for k, v in trainer.callback_metrics.items() if not k.startswith("bytescheduler/")},
        warnings=[str(warning.message) for warning in seen],
        error=error,
        statistics=None if ours is None else ours.statistics,
        reasons=() if ours is None or ours.plan is None else ours.plan.reasons,
        plan=None if ours is None else ours.plan,
        forced=network.forced,
    )


def train_all(rank: int, recipe: Recipe, runs: list[Run]) -> list[Outcome]:
    """Fit ``recipe`` once per run, one after the other."""
    return [train(rank, recipe, run) for run in runs]


def differences(expected: Outcome, actual: Outcome) -> list[str]:
    """What is not the same to the last bit, in words."""
    parts = ("losses", "weights", "optimizers", "notes", "metrics", "error")
    return [line for part in parts for line in bit_differences(getattr(expected, part), getattr(actual, part), part)]


def _assert_clean(model: Any, trainer: Trainer, *, torn_down: bool) -> None:
    """Nothing of the strategy outlives the fit, however it ended."""
    assert not [name for name, p in model.named_parameters() if type(p) is GatedParameter]
    assert not [optimizer for optimizer in trainer.optimizers if is_closed(optimizer)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    left = [callback for callback in trainer.callbacks if isinstance(callback, SchedulerHooks)]  # type: ignore[attr-defined]
    assert not left or not torn_down


_QUIET: Mapping[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}


def _strategy(recipe: Recipe, run: Run) -> str | Strategy:
    if callable(run.strategy):
        return run.strategy()
    if run.strategy == "ddp":
        return DDPStrategy(**recipe.ddp) if recipe.ddp else "ddp"
    if not run.options:
        return run.strategy
    # These models have nothing to hide: which way is faster is not what the tests are about.
    return ByteSchedulerStrategy(**{"mode": "overlapped", **run.options}, **recipe.ddp)
