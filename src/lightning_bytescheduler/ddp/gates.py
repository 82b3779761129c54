"""Gates on parameters: the first touch of a parameter waits for its pending gradient and update.

While a parameter's gradient is in flight, its class is :class:`GatedParameter`. That class sees every PyTorch function
that receives the parameter (``__torch_function__``) and lets the gate act first. ``torch.nn.UninitializedParameter``
uses the same class assignment to become a plain parameter. The assignment is cheap and keeps identity, hooks and
optimizer state.

Why parameters and not modules: a gate on a module's forward misses reads elsewhere (tied weights, ``F.linear(x,
self.embedding.weight)``, a callback that reads weights, ``state_dict()``). A gate on the parameter is exact wherever it
is read, in every iteration, and costs nothing once it is open. It cannot see code that holds the memory without the
Python object: scripted modules, extensions, or an alias made earlier with ``.data``. Such parameters are found
beforehand (``decided_fit.py``), in iterations, or by their references (both in ``reads.py``), and their steps are not
deferred. PyTorch functions that read parameters without a touch open gates first (``entry_points.py``,
``compiled_calls.py``).

In the first forward pass every parameter has a gate that only records its turn. ByteScheduler's priority is this
observed order of first use, not the order of registration. A parameter that gets a gradient although nothing touched it
was read by code that a gate cannot see, such as an extension that takes its memory.

Some threads must not wait at a gate. This package's threads carry the communication that a gate waits for. Garbage is
collected on any thread and under any lock, so a finalizer that reads a weight sees it as it is (:func:`must_not_wait`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import current_thread, get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer


class Gate(Protocol):
    """Acts before code uses a gated parameter."""

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """Act before ``parameter`` is used; ``gradient_only`` if only its ``.grad`` is accessed."""

    def open_all(self, reason: str) -> None:
        """Act before any parameter may be used and open all; ``reason`` says in words what begins."""


_gates: dict[int, Gate] = {}  # by id of the parameter, which the gate keeps alive

_TENSOR: Any = torch.Tensor  # typed as Any, as its getters have no types
_GRADIENT_ACCESS = frozenset({_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__})
_SET_GRADIENT = _TENSOR.grad.__set__
# These do not open the gate, as their results do not depend on the weights or lead to their memory. ``size`` and
# ``dim`` are not among them: ``torch.vmap`` calls nothing else on a parameter before it takes its memory.
_METADATA = frozenset(
    {
        _TENSOR.shape.__get__,
        _TENSOR.device.__get__,
        _TENSOR.dtype.__get__,
        _TENSOR.ndim.__get__,
        _TENSOR.is_leaf.__get__,
        _TENSOR.requires_grad.__get__,
        _TENSOR.numel,
    }
)


def _drops_gradient(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether this is ``parameter.grad = None``: a deferred step keeps its gradients, so it need not wait."""
    return func is _SET_GRADIENT and args[1] is None


class GatedParameter(nn.Parameter):
    """A parameter whose gate is closed. It is never constructed; parameters change their class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """Make a plain parameter, for code that constructs one of the same class."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA and not _drops_gradient(func, args):
            gradient_only = func in _GRADIENT_ACCESS
            gated = list(_find_gated((args, kwargs)))
            for parameter in gated:
                _open(parameter, gradient_only)
            still_gated = [parameter for parameter in gated if type(parameter) is GatedParameter]
            if not still_gated:
                return func(*args, **kwargs)
            if any(kind is not cls for kind in types):  # another class handles this function, too
                with _plain(still_gated):
                    return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # Both methods read the instance's __dict__ or class before its data, so the gate has to open first. If only the
    # gradient is pending the gate stays closed, as neither method copies a gradient.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _open(self, False)
        with _plain([self]):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _open(self, False)
        with _plain([self]):
            return self.__reduce_ex__(protocol)


# Code that prints or stores the class's name must see the name of a plain parameter.
GatedParameter.__name__, GatedParameter.__qualname__ = nn.Parameter.__name__, nn.Parameter.__qualname__
GatedParameter.__module__ = nn.Parameter.__module__


@contextmanager
def _plain(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Give ``parameters`` their own class although their gates stay closed; they have been touched already."""
    gated = [parameter for parameter in parameters if type(parameter) is GatedParameter]
    for parameter in gated:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter in gated:
            if is_armed(parameter):
                parameter.__class__ = GatedParameter


# Torch's optimizers choose their implementation by the exact class of parameters, and gates are closed until the step
# is taken. On a GPU they would step one parameter at a time, with other rounding than DDP's.
_STEPPED_TOGETHER = getattr(sys.modules[Optimizer.__module__], "_foreach_supported_types", None)
if isinstance(_STEPPED_TOGETHER, list) and GatedParameter not in _STEPPED_TOGETHER:
    _STEPPED_TOGETHER.append(GatedParameter)


def _find_gated(values: Any) -> Iterator[nn.Parameter]:
    if type(values) is GatedParameter:
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _find_gated(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _find_gated(value)


def _open_here(parameter: nn.Parameter, gradient_only: bool) -> None:
    gate = _gates.get(id(parameter))
    if gate is not None and must_not_wait():
        return
    if gate is None:
        parameter.__class__ = nn.Parameter  # the parameter has lost its gate; this call must not loop
        if id(parameter) in _gates:  # another thread has closed one since
            parameter.__class__ = GatedParameter
    else:
        gate.touched(parameter, gradient_only)


# Dynamo must run this and not trace it, as a trace fails on the change of class.
_open: Callable[[nn.Parameter, bool], None] = torch.compiler.disable(_open_here)


def open_gates(values: Any) -> None:
    """Touch every gated parameter in ``values``.

    Args:
        values: Arguments for code that bypasses gates: a tensor, or lists, tuples and mappings of tensors.
    """
    if _gates:
        for parameter in _find_gated(values):
            _open(parameter, False)


_collector = 0  # the thread that collects garbage at present; there is at most one


def _note_collection(phase: str, info: Mapping[str, int]) -> None:
    global _collector
    _collector = get_ident() if phase == "start" else 0


gc.callbacks.append(_note_collection)


def must_not_wait() -> bool:
    """Whether this thread must not wait for a gate: it is this package's, or collects garbage. See the module."""
    return _collector == get_ident() or current_thread().name.startswith("bytescheduler")


def any_closed() -> bool:
    """Whether any gate is closed in this process."""
    return bool(_gates)


def closed_gates() -> list[Gate]:
    """Return the closed gates, each once."""
    return list(dict.fromkeys(list(_gates.values())))


def can_be_gated(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` is of a class whose touches can be seen."""
    return type(parameter) in (nn.Parameter, GatedParameter)


def arm(parameters: Iterable[nn.Parameter], gate: Gate) -> None:
    """Close ``gate`` on ``parameters``; skips those of other classes."""
    for parameter in parameters:
        if can_be_gated(parameter):
            _gates[id(parameter)] = gate
            parameter.__class__ = GatedParameter


def disarm(parameters: Iterable[nn.Parameter]) -> None:
    """Make ``parameters`` plain again."""
    for parameter in parameters:
        if _gates.pop(id(parameter), None) is not None and type(parameter) is GatedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def is_armed(parameter: nn.Parameter) -> bool:
    """Whether a gate is closed on ``parameter``."""
    return id(parameter) in _gates


def gate_of(parameter: nn.Parameter) -> Gate | None:
    """Return the gate that is closed on ``parameter``, if any."""
    return _gates.get(id(parameter))
