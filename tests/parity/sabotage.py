"""Takes away one thing the weights depend on, to prove that a test would notice.

Each is a factory of context managers over the module that is about to be trained, see ``Run.sabotage``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.ddp import decided_fit as decided_module
from lightning_bytescheduler.ddp import fit as fit_module
from lightning_bytescheduler.ddp import gradient_transforms as transforms_module
from lightning_bytescheduler.ddp import steps as steps_module
from lightning_bytescheduler.ddp import trainer_fit as trainer_module
from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.gradient_transforms import ClipNorm
from lightning_bytescheduler.ddp.reads import AliasDetector, Reads
from lightning_bytescheduler.ddp.steps import BucketUpdate, OverlappedStep, UpdateState
from lightning_bytescheduler.ddp.strategy import ByteSchedulerStrategy
from lightning_bytescheduler.scheduler.core import ByteCore

__all__ = [
    "backward_waits_for_nothing",
    "blind_between_steps",
    "blind_to_aliases",
    "blind_to_gradients",
    "blind_to_kept_state",
    "blind_to_weights_and_state",
    "every_read_is_seen",
    "everything_is_deferred",
    "forgets_to_clip",
    "no_entry_points",
    "no_gate_on",
    "no_gate_on_state",
    "no_parameter_sits_out",
    "nothing_lands_after_a_failure",
    "nothing_lands_at_the_end",
    "only_buckets_step",
]


@contextmanager
def no_gate_on(module: LightningModule, *, names: tuple[str, ...]) -> Iterator[None]:
    """Leave the named parameters, and whatever shares a bucket with them, without a gate."""
    parameters = dict(module.named_parameters())
    bare = {id(parameters[name]) for name in names}
    close_gate = BucketUpdate.close_gate

    def close_most(update: BucketUpdate) -> None:
        if not any(id(p) in bare for p in update.bucket.parameters):
            close_gate(update)

    with (
        patch.object(BucketUpdate, "close_gate", close_most),
        patch.object(Reads, "before_backward", lambda _: None),  # otherwise the first such read is the last
    ):
        yield


@contextmanager
def blind_between_steps(module: LightningModule) -> Iterator[None]:
    """See touches in training steps only: reads elsewhere get the values from before the update."""
    touched, begin_forward = BucketUpdate.touched, Fit.begin_forward

    def touched_in_forward(update: BucketUpdate, parameter: nn.Parameter, gradient_only: bool) -> None:
        if update.step.fit.reads.forward.under_way or update.state is not UpdateState.DUE:
            touched(update, parameter, gradient_only)
        else:
            update.open_gate()

    def rearming_begin_forward(fit: Fit, *batch: Any) -> None:
        begin_forward(fit, *batch)
        for update in fit.step.updates if isinstance(fit.step, OverlappedStep) else ():
            if update.state is UpdateState.DUE:
                update.close_gate()

    with (
        patch.object(BucketUpdate, "touched", touched_in_forward),
        patch.object(Fit, "begin_forward", rearming_begin_forward),
    ):
        yield


@contextmanager
def no_gate_on_state(module: LightningModule) -> Iterator[None]:
    """Let the optimizer's state be read and replaced while updates are due."""
    with patch.object(steps_module, "close_state", lambda *_: None):
        yield


@contextmanager
def blind_to_weights_and_state(module: LightningModule) -> Iterator[None]:
    """Gate neither of them outside training steps, so that neither hides the other's sabotage."""
    with blind_between_steps(module), no_gate_on_state(module):
        yield


@contextmanager
def blind_to_gradients(module: LightningModule) -> Iterator[None]:
    """Let gradients be read and written while they are on their way."""
    touched = BucketUpdate.touched

    def touched_weights(update: BucketUpdate, parameter: nn.Parameter, gradient_only: bool) -> None:
        if not gradient_only:
            touched(update, parameter, gradient_only)

    with patch.object(BucketUpdate, "touched", touched_weights):
        yield


@contextmanager
def every_read_is_seen(module: LightningModule) -> Iterator[None]:
    """Believe that every read of a parameter is seen."""
    with (
        patch.object(BucketUpdate, "has_any", lambda *_: False),
        blind_to_aliases(module),
    ):
        yield


@contextmanager
def no_entry_points(module: LightningModule) -> Iterator[None]:
    """Let functions that read parameters without touching them read whatever is there."""
    with patch.object(fit_module, "watch_entry_points", lambda _: lambda: None):
        yield


@contextmanager
def nothing_lands_at_the_end(module: LightningModule) -> Iterator[None]:
    """End each fit without waiting for what is still due."""
    shutdown = ByteCore.shutdown

    def hurried_shutdown(core: ByteCore, *, timeout: float, drain: bool = True) -> None:
        shutdown(core, timeout=timeout, drain=False)

    with (
        patch.object(ByteSchedulerStrategy, "flush", lambda _: None),
        patch.object(ByteCore, "shutdown", hurried_shutdown),
    ):
        yield


@contextmanager
def nothing_lands_after_a_failure(module: LightningModule) -> Iterator[None]:
    """Drop what is still due when a fit fails."""

    def drop(fit: Fit) -> tuple[int, int]:
        fit.open_gates()
        return 0, 0

    with patch.object(Fit, "land_what_arrived", drop):
        yield


@contextmanager
def everything_is_deferred(module: LightningModule) -> Iterator[None]:
    """Believe that any optimizer steps each parameter on its own."""
    with (
        patch.object(trainer_module, "optimizer_reasons", lambda _: []),
        patch.object(steps_module, "wants_whole_steps", lambda *_: None),
        patch.object(decided_module, "wants_whole_steps", lambda *_: None),
    ):
        yield


@contextmanager
def backward_waits_for_nothing(module: LightningModule) -> Iterator[None]:
    """Return from each backward pass before its gradients have arrived, even where steps are synchronised."""
    hook = Fit.hook

    def hurried_hook(fit: Fit, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        hook(fit, bucket)
        return _done(bucket.buffer())

    with patch.object(Fit, "hook", hurried_hook):
        yield


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


@contextmanager
def no_parameter_sits_out(module: LightningModule) -> Iterator[None]:
    """Step every parameter of the optimizer, with zeros where no rank had a gradient."""
    step = Fit.take_step

    def step_all(fit: Fit, optimizer: Optimizer, own_step: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return step(fit, optimizer, own_step)

    with patch.object(Fit, "take_step", step_all):
        yield


@contextmanager
def only_buckets_step(module: LightningModule) -> Iterator[None]:
    """Forget the optimizer's parameters that are in no bucket."""
    step, step_partially = Fit.take_step, steps_module.step_partially

    def step_buckets(fit: Fit, *args: Any) -> Any:
        with patch.object(steps_module, "step_partially", lambda *_: None):
            result = step(fit, *args)
        assert steps_module.step_partially is step_partially
        return result

    with patch.object(Fit, "take_step", step_buckets):
        yield


@contextmanager
def forgets_to_clip(module: LightningModule) -> Iterator[None]:
    """Take over clipping, and never do it."""
    with (
        patch.object(ClipNorm, "__call__", lambda *_: None),
        patch.object(transforms_module, "clip_values", lambda *_, **__: None),
    ):
        yield


@contextmanager
def blind_to_aliases(module: LightningModule) -> Iterator[None]:
    """Believe that no alias of a parameter is kept."""
    with patch.object(AliasDetector, "find", lambda _: set()):
        yield


@contextmanager
def blind_to_kept_state(module: LightningModule) -> Iterator[None]:
    """Believe that the optimizer's state is not kept."""
    with patch.object(steps_module, "state_is_kept", lambda _: False):
        yield
