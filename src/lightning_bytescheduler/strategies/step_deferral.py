"""Handing an optimizer's step, and what comes before it, to the engine through the calls Lightning makes anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_bytescheduler.gradients.engine import GradientEngine
from lightning_bytescheduler.gradients.loss_scaler import can_be_deferred, is_enabled, scaling_later

__all__ = ["deferring", "scales_losses", "steps_plainly", "then"]


def steps_plainly(plugin: Precision) -> bool:
    """Whether the plugin's optimizer step is the closure and ``optimizer.step``, with a known scaler or none."""
    if isinstance(plugin, MixedPrecision):
        return type(plugin).optimizer_step is MixedPrecision.optimizer_step and (
            plugin.scaler is None or can_be_deferred(plugin.scaler)
        )
    return type(plugin).optimizer_step is Precision.optimizer_step


def scales_losses(plugin: Precision) -> bool:
    """Whether the plugin scales losses, and leaves out steps with gradients that are not finite."""
    return isinstance(plugin, MixedPrecision) and plugin.scaler is not None and is_enabled(plugin.scaler)


def then(closure: Callable[[], Any], after: Callable[[], None]) -> Callable[[], Any]:
    """A closure that runs ``closure``, then ``after``, and returns what ``closure`` returned."""

    def run() -> Any:
        output = closure()
        after()
        return output

    return run


@contextmanager
def deferring(optimizer: Optimizer, engine: GradientEngine, plugin: Precision) -> Iterator[None]:
    """For the duration, ``optimizer.step(closure)`` runs the closure and hands the step to ``engine``.

    So do the plugin's clipping and the scaler's unscaling. Attributes of the instances are replaced, as learning-rate
    schedules do with ``optimizer.step``, so precision plugins, hooks and user code see the optimizer itself.
    """
    own_step = optimizer.step

    def step(closure: Callable[[], Any] | None = None) -> Any:
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        engine.step(optimizer, own_step)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look for it
        return output

    with ExitStack() as stack:
        stack.enter_context(_replaced(optimizer, "step", step))
        for name, defer in (("clip_grad_by_norm", engine.clip_norm), ("clip_grad_by_value", engine.clip_value)):
            if getattr(type(plugin), name) is getattr(Precision, name):  # else it is the user's own
                stack.enter_context(_replaced(plugin, name, _or_else(defer, getattr(plugin, name))))
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


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    attributes = object.__getattribute__(owner, "__dict__")  # not opening the gate of an optimizer
    absent = object()
    before = attributes.get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
