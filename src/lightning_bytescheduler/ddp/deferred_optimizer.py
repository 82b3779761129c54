"""Hands an optimizer's step to the fit, with clipping, unscaling and the update of the loss scale.

*fp16 loss scaling*: the update of the scale is deferred, too. During a step a stand-in replaces the scaler. It shares
the scaler's state, and hands unscaling and the step to the fit. The scale is updated when the exchange of norms has
shown whether a gradient overflowed. Until then the scaler is gated like a parameter: code that reads it
(``state_dict()``, ``get_scale()``) waits and sees the scale that a synchronous step would have left. Source:
``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.gradient_transforms import Unscale
from lightning_bytescheduler.ddp.partial_step import replaced
from lightning_bytescheduler.lightning_api import DDPStrategy, MixedPrecision, Precision

__all__ = [
    "can_be_deferred",
    "deferred_step",
    "deferring",
    "followed_by",
    "is_enabled",
    "loss_scale_of",
    "scales_losses",
    "scaling_later",
    "steps_plainly",
]


def followed_by(after: Callable[[], None], closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure that runs ``closure``, then ``after``, and returns the result of ``closure``."""

    def run() -> Any:
        output = closure()
        after()
        return output

    return run


@contextmanager
def deferred_step(optimizer: Optimizer, fit: Fit) -> Iterator[None]:
    """Within the context, ``optimizer.step(closure)`` runs the closure and hands the step to ``fit``."""
    own_step = optimizer.step

    def step(closure: Callable[[], Any] | None = None) -> Any:
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        fit.take_step(optimizer, own_step)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look for it
        return output

    with replaced(optimizer, "step", step):
        yield


@contextmanager
def deferring(optimizer: Optimizer, fit: Fit, plugin: Precision) -> Iterator[None]:
    """Like :func:`deferred_step`; also hands the plugin's clipping and the scaler's unscaling to ``fit``.

    It replaces attributes of the instances, as learning-rate schedules do with ``optimizer.step``. So precision
    plugins, hooks and user code see the optimizer itself.
    """
    with ExitStack() as stack:
        stack.enter_context(deferred_step(optimizer, fit))
        for name, defer in (("clip_grad_by_norm", "clip_norm"), ("clip_grad_by_value", "clip_value")):
            if getattr(type(plugin), name) is getattr(Precision, name):  # otherwise the user has overridden it
                stack.enter_context(replaced(plugin, name, _or_else(fit, defer, getattr(plugin, name))))
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) and scales_losses(plugin) else None
        if isinstance(plugin, MixedPrecision) and scaler is not None:
            plugin.scaler = stack.enter_context(scaling_later(scaler, fit))
            stack.callback(setattr, plugin, "scaler", scaler)
        yield


def _or_else(fit: Fit, defer: str, clip: Callable[[Optimizer, float], None]) -> Callable[[Optimizer, float], None]:
    def clip_later(optimizer: Optimizer, clip_val: float) -> None:
        if not getattr(fit.step, defer)(optimizer, clip_val):  # the step that the closure has begun
            clip(optimizer, clip_val)

    return clip_later


def steps_plainly(plugin: Precision) -> bool:
    """Whether the plugin only runs the closure and ``optimizer.step``, with a supported scaler or none."""
    if isinstance(plugin, MixedPrecision):
        return type(plugin).optimizer_step is MixedPrecision.optimizer_step and (
            plugin.scaler is None or can_be_deferred(plugin.scaler)
        )
    return type(plugin).optimizer_step is Precision.optimizer_step


def scales_losses(plugin: Precision) -> bool:
    """Whether the plugin scales losses and skips steps with non-finite gradients."""
    return isinstance(plugin, MixedPrecision) and plugin.scaler is not None and is_enabled(plugin.scaler)


def can_be_deferred(scaler: object) -> bool:
    """Whether ``scaler`` is of a supported class."""
    return type(scaler) in (GradScaler, torch.cuda.amp.GradScaler) or isinstance(scaler, _GatedScaler)


def is_enabled(scaler: GradScaler) -> bool:
    """Whether ``scaler`` is enabled; opens no gate."""
    return bool(object.__getattribute__(scaler, "_enabled"))


def loss_scale_of(strategy: DDPStrategy) -> float | None:
    """Return the current factor of losses, if any; call it in a backward pass or when no step is pending."""
    plugin = strategy.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return None if scaler is None else float(scaler.get_scale())


@contextmanager
def scaling_later(scaler: GradScaler, fit: Fit) -> Iterator[GradScaler]:
    """Yield a stand-in for ``scaler`` during one step of an optimizer."""
    stand_in = object.__new__(_DeferringScaler)
    stand_in.scaler, stand_in.fit = scaler, fit
    stand_in.unscale, stand_in.found_inf = None, None
    # Both share one state. It is taken without opening the gate.
    object.__setattr__(stand_in, "__dict__", object.__getattribute__(scaler, "__dict__"))
    yield stand_in


class _DeferringScaler(GradScaler):
    __slots__ = ("fit", "found_inf", "scaler", "unscale")

    scaler: GradScaler
    fit: Fit
    unscale: Unscale | None
    found_inf: torch.Tensor | None

    def __getattribute__(self, name: str) -> Any:
        _open_for(object.__getattribute__(self, "scaler"))
        return object.__getattribute__(self, name)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        self.unscale = self.fit.step.unscale(optimizer, inv_scale)
        if self.unscale is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        self.found_inf = found_inf  # the value is filled in later
        return {found_inf.device: found_inf}

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if self.unscale is None:
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        output: float | None = optimizer.step(*args, **kwargs)  # the fit skips it if necessary
        return output

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self.unscale is None or self.found_inf is None:
            super().update(new_scale)
            return
        pending = _PendingUpdate(self.scaler, self.unscale, self.found_inf, new_scale)
        _close_gate(self.scaler, self.fit.step.update_scale)
        self.fit.step.scale_later(pending)


class _PendingUpdate:
    def __init__(
        self, scaler: GradScaler, unscale: Unscale, found_inf: torch.Tensor, new_scale: float | torch.Tensor | None
    ) -> None:
        self._scaler = scaler
        self._unscale = unscale
        self._found_inf = found_inf
        self._new_scale = new_scale

    def update(self) -> None:
        _open_gate(self._scaler)
        self._found_inf.fill_(float(self._unscale.found_inf()))
        self._scaler.update(self._new_scale)

    def discard(self) -> None:
        _open_gate(self._scaler)


class _GatedScaler:
    """Mixed into the class of a scaler whose update is pending."""

    def __getattribute__(self, name: str) -> Any:
        if name != "__class__":
            _open_for(self)
        return object.__getattribute__(self, name)


_updates: dict[int, Callable[[], None]] = {}  # by id of the scaler, which the pending update keeps alive


def _open_for(scaler: object) -> None:
    update = _updates.get(id(scaler))
    if update is not None:
        update()


_gated_kinds: dict[type[GradScaler], type[GradScaler]] = {}


def _gated(kind: type[GradScaler]) -> type[GradScaler]:
    if kind not in _gated_kinds:
        _gated_kinds[kind] = type(kind.__name__, (_GatedScaler, kind), {"__module__": kind.__module__})
    return _gated_kinds[kind]


def _close_gate(scaler: GradScaler, update: Callable[[], None]) -> None:
    _updates[id(scaler)] = update
    if not isinstance(scaler, _GatedScaler):
        scaler.__class__ = _gated(type(scaler))


def _open_gate(scaler: GradScaler) -> None:
    _updates.pop(id(scaler), None)
    if issubclass(type(scaler), _GatedScaler):
        scaler.__class__ = type(scaler).__mro__[2]
