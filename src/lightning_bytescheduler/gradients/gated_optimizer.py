"""A gate on an optimizer: whoever asks for its state while updates are due has them applied first.

While it is closed, the optimizer is of a subclass of its class that opens when ``optimizer.state`` or
``vars(optimizer)`` is read or replaced, and when the optimizer is copied or pickled. What is then handed out is the
state itself, so its type, length, order and equality are what they always are. Parameter groups may be read and
changed freely: a deferred step has its own (``partial_step.py``).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

from torch.optim import Optimizer

__all__ = ["attributes_of", "can_have_a_gate", "close_state", "is_closed", "kind_of", "open_state"]

_OPENS = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__", "state"})
_OPENS_WHEN_SET = frozenset({"__class__", "__dict__", "state"})

_flushes: dict[int, Callable[[], None]] = {}  # by id of the optimizer; whoever closed the gate keeps it alive


class _GatedOptimizer:
    """Mixed into the class of an optimizer whose updates are due. Nothing goes by its class: threads may open it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return kind_of(cast(Optimizer, self))
        if name in _OPENS:
            _open(self)
            if not issubclass(type(self), _GatedOptimizer):
                return getattr(self, name)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPENS_WHEN_SET:
            _open(self)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OPENS_WHEN_SET:
            _open(self)
        object.__delattr__(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _open(self)  # copy.copy() asks the class for this method
        return kind_of(cast(Optimizer, self)).__reduce_ex__(cast(Optimizer, self), protocol)


def _open(optimizer: object) -> None:
    flush = _flushes.get(id(optimizer))
    if flush is not None:
        flush()


_kinds: dict[type[Optimizer], type[Optimizer] | None] = {}


def _gated(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The subclass of ``kind`` with a gate; ``None`` if there can be none."""
    if kind not in _kinds:
        attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        plain = kind.__getattribute__ is object.__getattribute__ and kind.__setattr__ is object.__setattr__
        try:
            made = types.new_class(kind.__name__, (_GatedOptimizer, kind), {}, lambda space: space.update(attributes))
            _kinds[kind] = made if plain else None
        except Exception:  # whatever a class may want of its subclasses
            _kinds[kind] = None
    return _kinds[kind]


def kind_of(optimizer: Optimizer) -> type[Optimizer]:
    """The class of ``optimizer``, whether its gate is closed or open."""
    kind = type(optimizer)
    return kind.__mro__[2] if issubclass(kind, _GatedOptimizer) else kind


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """``vars(optimizer)``, without opening its gate."""
    own: dict[str, Any] = object.__getattribute__(optimizer, "__dict__")
    return own


def can_have_a_gate(optimizer: Optimizer) -> bool:
    """Whether state and groups are plain attributes of ``optimizer``, and its class may be changed for a while."""
    own = attributes_of(optimizer)
    return {"state", "param_groups"} <= own.keys() and _gated(kind_of(optimizer)) is not None


def is_closed(optimizer: Optimizer) -> bool:
    """Whether a gate is closed on ``optimizer``."""
    return issubclass(type(optimizer), _GatedOptimizer)


def close_state(optimizer: Optimizer, flush: Callable[[], None]) -> None:
    """Call ``flush`` before anybody uses ``optimizer``'s state; ``flush`` has to call :func:`open_state`.

    Args:
        optimizer: One that :func:`can_have_a_gate`, else nothing happens.
        flush: Called on whichever thread asks.
    """
    gated = _gated(kind_of(optimizer))
    if gated is not None and not is_closed(optimizer):
        _flushes[id(optimizer)] = flush
        object.__setattr__(optimizer, "__class__", gated)


def open_state(optimizer: Optimizer) -> None:
    """Make ``optimizer`` what it was."""
    _flushes.pop(id(optimizer), None)
    if is_closed(optimizer):
        object.__setattr__(optimizer, "__class__", kind_of(optimizer))
