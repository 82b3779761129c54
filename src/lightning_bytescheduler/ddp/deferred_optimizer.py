"""An optimizer whose step, with clipping and unscaling, is handed to the engine in place of being taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.engine import GradientEngine
from lightning_bytescheduler.ddp.loss_scaler import scaling_later
from lightning_bytescheduler.ddp.partial_step import replaced
from lightning_bytescheduler.ddp.plan import scales_losses
from lightning_bytescheduler.lightning_api import MixedPrecision, Precision

__all__ = ["deferred_step", "deferring"]


@contextmanager
def deferred_step(optimizer: Optimizer, engine: GradientEngine) -> Iterator[None]:
    """For the duration, ``optimizer.step(closure)`` runs the closure and hands the step to ``engine``."""
    own_step = optimizer.step

    def step(closure: Callable[[], Any] | None = None) -> Any:
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        engine.step(optimizer, own_step)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look for it
        return output

    with replaced(optimizer, "step", step):
        yield


@contextmanager
def deferring(optimizer: Optimizer, engine: GradientEngine, plugin: Precision) -> Iterator[None]:
    """As :func:`deferred_step`; and the plugin's clipping and the scaler's unscaling are handed to ``engine``, too.

    Attributes of the instances are replaced, as learning-rate schedules do with ``optimizer.step``, so precision
    plugins, hooks and user code see the optimizer itself.
    """
    with ExitStack() as stack:
        stack.enter_context(deferred_step(optimizer, engine))
        for name, defer in (("clip_grad_by_norm", engine.clip_norm), ("clip_grad_by_value", engine.clip_value)):
            if getattr(type(plugin), name) is getattr(Precision, name):  # else it is the user's own
                stack.enter_context(replaced(plugin, name, _or_else(defer, getattr(plugin, name))))
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) and scales_losses(plugin) else None
        if isinstance(plugin, MixedPrecision) and scaler is not None:
            plugin.scaler = stack.enter_context(scaling_later(scaler, engine))
            stack.callback(setattr, plugin, "scaler", scaler)
        yield


def _or_else(
    defer: Callable[[Optimizer, float], bool], clip: Callable[[Optimizer, float], None]
) -> Callable[[Optimizer, float], None]:
    def clip_later(optimizer: Optimizer, clip_val: float) -> None:
        if not defer(optimizer, clip_val):
            clip(optimizer, clip_val)

    return clip_later
