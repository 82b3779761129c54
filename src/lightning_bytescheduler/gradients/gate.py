"""Gates on parameters: the first touch of a parameter waits for what it still owes.

While a parameter's gradient is on its way its class is :class:`GatedParameter`, which sees every PyTorch function that
is handed the parameter (``__torch_function__``) and lets its gate act first. Class assignment is what
``torch.nn.UninitializedParameter`` uses to become a plain parameter; it costs some fifty nanoseconds and keeps
identity, hooks and optimizer state.

Why touches and not modules: a gate on a module's forward misses what is read elsewhere (tied weights,
``F.linear(x, self.embedding.weight)``, a callback that reads weights, ``state_dict()``); a gate on the parameter itself
is exact wherever it is read, in every iteration, and leaves no observer behind once it has opened. What it cannot see
is code that holds the memory without the Python object: scripted modules, extensions, or an alias made earlier with
``.data``. Those parameters are found beforehand (``eligibility.py``), in the first iteration (``first_use.py``) or by
who holds them (``aliases.py``), and their steps are not deferred. Functions of PyTorch that take parameters without a
word open gates first (``entry_points.py``, ``compiled_calls.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.optim import Optimizer

__all__ = [
    "Gate",
    "GatedParameter",
    "any_closed",
    "arm",
    "can_be_gated",
    "closed_gates",
    "disarm",
    "gate_of",
    "is_armed",
    "open_gates",
]


class Gate(Protocol):
    """What stands between a gated parameter and whoever touches it."""

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """Act before ``parameter`` is used; ``gradient_only`` when just its ``.grad`` is asked for."""

    def open_all(self, reason: str) -> None:
        """Act before any parameter may be used, and leave none gated; ``reason`` says what begins, in words."""


_gates: dict[int, Gate] = {}  # by id of the parameter; the gate keeps the parameter alive

_TENSOR: Any = torch.Tensor  # its getters have no types
_GRADIENT_ACCESS = frozenset({_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__})
# Answered without opening the gate: nothing here depends on the weights or leads to their memory. ``size`` and ``dim``
# are missing on purpose: they are all that ``torch.vmap`` asks of a parameter before it takes its memory.
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


class GatedParameter(nn.Parameter):
    """A parameter whose gate is closed. Never constructed: parameters become one and cease to be one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """Make a plain parameter: what code that wants something "of the same class" gets without a gate."""
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
        if func not in _METADATA:
            gradient_only = func in _GRADIENT_ACCESS
            gated = list(_find_gated((args, kwargs)))
            for parameter in gated:
                _open(parameter, gradient_only)
            still_gated = [parameter for parameter in gated if type(parameter) is GatedParameter]
            if not still_gated:
                return func(*args, **kwargs)
            if any(kind is not cls for kind in types):  # another class has its say about this function, too
                with _plain(still_gated):
                    return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # These take the instance's __dict__ or class before they touch its data, so the gate has to open first. Where
    # weights may be read and only the gradient is awaited it stays closed; neither of them copies a gradient.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _open(self, False)
        with _plain([self]):
            return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _open(self, False)
        with _plain([self]):
            return self.__reduce_ex__(protocol)


# Who prints a parameter's class, or keys something by its name, sees what there would be without a gate.
GatedParameter.__name__, GatedParameter.__qualname__ = nn.Parameter.__name__, nn.Parameter.__qualname__
GatedParameter.__module__ = nn.Parameter.__module__


def _reduce_for_processes(parameter: nn.Parameter) -> Any:
    _open(parameter, False)
    with _plain([parameter]):
        return reduce_tensor(parameter)


# Queues between processes look the class up, and share the memory of what they know.
ForkingPickler.register(GatedParameter, _reduce_for_processes)


@contextmanager
def _plain(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let ``parameters`` be of their own class, though their gates stay closed; they have been touched already."""
    gated = [parameter for parameter in parameters if type(parameter) is GatedParameter]
    for parameter in gated:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameter in gated:
            if is_armed(parameter):
                parameter.__class__ = GatedParameter


# torch's optimizers choose how to step by the exact class of a parameter, and a gate is closed until the step is taken:
# on a GPU they would go parameter by parameter, with other rounding than DDP's.
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
    if gate is None:
        parameter.__class__ = nn.Parameter  # lost its gate: a stale reference must not loop
        if id(parameter) in _gates:  # another thread has closed one since
            parameter.__class__ = GatedParameter
    else:
        gate.touched(parameter, gradient_only)


# Dynamo that meets a gate runs it, rather than trace it and trip over what it changes.
_open: Callable[[nn.Parameter, bool], None] = torch.compiler.disable(_open_here)


def open_gates(values: Any) -> None:
    """Touch every gated parameter in ``values``.

    Args:
        values: What is about to be handed to code that tells nobody: a tensor, or lists, tuples and mappings of such.
    """
    if _gates:
        for parameter in _find_gated(values):
            _open(parameter, False)


def any_closed() -> bool:
    """Whether any gate is closed in this process."""
    return bool(_gates)


def closed_gates() -> list[Gate]:
    """The gates that are closed, each once."""
    return list(dict.fromkeys(list(_gates.values())))


def can_be_gated(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` is of a class whose touches can be seen."""
    return type(parameter) in (nn.Parameter, GatedParameter)


def arm(parameters: Iterable[nn.Parameter], gate: Gate) -> None:
    """Close ``gate`` on ``parameters``; those of a class of their own are left alone."""
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
    """The gate that is closed on ``parameter``, if any."""
    return _gates.get(id(parameter))
