"""An optimizer whose step, with clipping, unscaling and the loss scale's update, is handed to the engine.

*fp16 loss scaling* does not wait: the scaler learns what became of a step when the gradients are known to be finite.
During a step a stand-in takes the scaler's place. It shares the scaler's state, and hands unscaling and the step to
the engine; the update of the scale follows when the exchange of norms has told whether a gradient overflowed. Until
then the scaler itself is gated like a parameter: whoever looks at it (``state_dict()``, ``get_scale()``) waits and sees
the scale that a synchronous step would have left. Source: ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_bytescheduler.ddp.engine import GradientEngine
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
    """A closure that runs ``closure``, then ``after``, and returns what ``closure`` returned."""

    def run() -> Any:
        output = closure()
        after()
        return output

    return run


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
        for name, defer in (("clip_grad_by_norm", "clip_norm"), ("clip_grad_by_value", "clip_value")):
            if getattr(type(plugin), name) is getattr(Precision, name):  # else it is the user's own
                stack.enter_context(replaced(plugin, name, _or_else(engine, defer, getattr(plugin, name))))
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) and scales_losses(plugin) else None
        if isinstance(plugin, MixedPrecision) and scaler is not None:
            plugin.scaler = stack.enter_context(scaling_later(scaler, engine))
            stack.callback(setattr, plugin, "scaler", scaler)
        yield


def _or_else(
    engine: GradientEngine, defer: str, clip: Callable[[Optimizer, float], None]
) -> Callable[[Optimizer, float], None]:
    def clip_later(optimizer: Optimizer, clip_val: float) -> None:
        if not getattr(engine.context.step, defer)(optimizer, clip_val):  # of the step that the closure has begun
            clip(optimizer, clip_val)

    return clip_later


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


def can_be_deferred(scaler: object) -> bool:
    """Whether ``scaler`` is one whose every step is known."""
    return type(scaler) in (GradScaler, torch.cuda.amp.GradScaler) or isinstance(scaler, _GatedScaler)


def is_enabled(scaler: GradScaler) -> bool:
    """Whether ``scaler`` does anything; told without opening its gate."""
    return bool(object.__getattribute__(scaler, "_enabled"))


def loss_scale_of(strategy: DDPStrategy) -> float | None:
    """What losses are multiplied with at present, if anything; in a backward pass, or when all has landed."""
    plugin = strategy.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return None if scaler is None else float(scaler.get_scale())


@contextmanager
def scaling_later(scaler: GradScaler, engine: GradientEngine) -> Iterator[GradScaler]:
    """A stand-in for ``scaler`` during one step of an optimizer."""
    stand_in = object.__new__(_DeferringScaler)
    stand_in.scaler, stand_in.engine = scaler, engine
    stand_in.unscale, stand_in.found_inf = None, None
    # One state: what is asked of the stand-in is true of the scaler. Taken without opening the gate.
    object.__setattr__(stand_in, "__dict__", object.__getattribute__(scaler, "__dict__"))
    yield stand_in


class _DeferringScaler(GradScaler):
    __slots__ = ("engine", "found_inf", "scaler", "unscale")

    scaler: GradScaler
    engine: GradientEngine
    unscale: Unscale | None
    found_inf: torch.Tensor | None

    def __getattribute__(self, name: str) -> Any:
        _open_for(object.__getattribute__(self, "scaler"))
        return object.__getattribute__(self, name)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        self.unscale = self.engine.context.step.unscale(optimizer, inv_scale)
        if self.unscale is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        self.found_inf = found_inf  # filled in later
        return {found_inf.device: found_inf}

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if self.unscale is None:
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        output: float | None = optimizer.step(*args, **kwargs)  # the engine leaves it out if need be
        return output

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self.unscale is None or self.found_inf is None:
            super().update(new_scale)
            return
        pending = _PendingUpdate(self.scaler, self.unscale, self.found_inf, new_scale)
        _close_gate(self.scaler, self.engine.context.step.update_scale)
        self.engine.context.step.scale_later(pending)


class _PendingUpdate:
    """See :class:`~lightning_bytescheduler.ddp.gradient_transforms.PendingScale`."""

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
    """Mixed into the class of a scaler whose update is due."""

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
