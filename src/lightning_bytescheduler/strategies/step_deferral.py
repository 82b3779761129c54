"""Handing an optimizer's step to the engine, through the step Lightning calls anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_bytescheduler.gradients.engine import GradientEngine

__all__ = ["deferring", "steps_plainly", "then"]


def steps_plainly(plugin: Precision) -> bool:
    """Whether the plugin's optimizer step is the closure followed by ``optimizer.step``, and nothing else."""
    if isinstance(plugin, MixedPrecision):
        return plugin.scaler is None
    return type(plugin).optimizer_step is Precision.optimizer_step


def then(closure: Callable[[], Any], after: Callable[[], None]) -> Callable[[], Any]:
    """A closure that runs ``closure``, then ``after``, and returns what ``closure`` returned."""

    def run() -> Any:
        output = closure()
        after()
        return output

    return run


@contextmanager
def deferring(optimizer: Optimizer, engine: GradientEngine) -> Iterator[None]:
    """For the duration, ``optimizer.step(closure)`` runs the closure and hands the step to ``engine``.

    The instance's attribute is replaced, as learning-rate schedules do, so precision plugins, hooks and user code see
    the optimizer itself.
    """
    own_step = optimizer.step
    replaced = vars(optimizer).get("step")

    def step(closure: Callable[[], Any] | None = None) -> Any:
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        engine.step(optimizer, own_step)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look for it
        return output

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if replaced is None:
            del optimizer.step
        else:
            optimizer.step = replaced  # type: ignore[method-assign]
