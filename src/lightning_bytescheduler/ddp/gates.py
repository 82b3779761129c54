"""Gates on parameters: the first touch of a parameter waits for its pending gradient and update.

While a parameter's gradient is in flight, its class is :class:`GatedParameter`. That class sees every PyTorch function
that receives the parameter (``__torch_function__``) and lets the gate act first. ``torch.nn.UninitializedParameter``
uses the same class assignment to become a plain parameter. It is cheap and keeps identity, hooks and optimizer
state.

Why parameters and not modules: a gate on a module's forward misses reads elsewhere (tied weights, ``F.linear(x,
self.embedding.weight)``, a callback that reads weights, ``state_dict()``). A gate on the parameter is exact wherever it
is read, in every iteration, and costs nothing once it is open. It cannot see code that holds the memory without the
Python object: scripted modules, extensions, or an alias made earlier with ``.data``. Such parameters are found
beforehand (``plan.py``), in the first iteration (:class:`FirstUseObserver`), in later ones (:class:`UnseenReads`) or by
their references (``aliases.py``), and their steps are not deferred. PyTorch functions that read parameters without a
touch open gates first (``entry_points.py``, ``compiled_calls.py``).

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
from typing import Any, Literal, Protocol

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

    # These read the instance's __dict__ or class before its data, so the gate has to open first. If only the gradient
    # is pending the gate stays closed; neither of them copies a gradient.
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
        parameter.__class__ = nn.Parameter  # it has lost its gate, and must not loop
        if id(parameter) in _gates:  # another thread has closed one since
            parameter.__class__ = GatedParameter
    else:
        gate.touched(parameter, gradient_only)


# Dynamo runs this instead of tracing it, as it would fail on the change of class.
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


class FirstUseObserver:
    """Records the order of first touches of parameters during one forward pass.

    Args:
        parameters: All parameters, in registration order, which is used for those that were not touched.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._registration = {id(p): index for index, p in enumerate(self._parameters)}
        self._position: dict[int, int] = {}
        self._unseen: set[int] = set()
        self._compiled: set[int] = set()
        self._untouched: list[nn.Parameter] = []  # in the observed pass, until its backward pass has been observed too
        self._observing = False
        self._done = False

    def begin(self, unseen: Iterable[int] = ()) -> None:
        """Begin to observe, unless a pass was observed before.

        Args:
            unseen: Ids of parameters that are read without a touch. They are skipped, as compiled code specialises on
                the class of what it reads.
        """
        if not self._done:
            self._observing = True
            self._unseen.update(unseen)
            # A pass that touched nothing does not count, but updates may still be pending.
            arm((p for p in self._parameters if id(p) not in self._unseen and not is_armed(p)), self)

    def end(self) -> None:
        """Stop observing."""
        if not self._observing:
            return
        self._observing = False
        self._done = bool(self._position)
        observed = [p for p in self._parameters if gate_of(p) is self]
        disarm(observed)
        self._untouched = [p for p in observed if id(p) not in self._position]

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`."""
        if gradient_only:
            return
        disarm((parameter,))
        if torch.compiler.is_compiling():
            self._compiled.add(id(parameter))
        self._position.setdefault(id(parameter), len(self._position))

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: stop observing until :meth:`resume`."""
        disarm([p for p in self._parameters if gate_of(p) is self])

    def resume(self, read: Iterable[int]) -> None:
        """Observe again; parameters with the ids ``read`` were used in between."""
        if not self._observing:
            return
        for parameter in read:
            if parameter in self._registration and parameter not in self._unseen:
                self._position.setdefault(parameter, len(self._position))
        known = self._unseen | self._position.keys()
        arm((p for p in self._parameters if id(p) not in known and not is_armed(p)), self)

    def read_unseen(self) -> set[int]:
        """Return the ids of parameters that the observed pass read without a touch or in compiled code.

        Call it after the backward pass. Empty unless a pass was observed since the last call.
        """
        found = {id(p) for p in self._untouched if p.grad is not None} | self._compiled
        self._untouched = []
        self._compiled = set()
        self._unseen |= found
        return found

    def note_unseen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record that ``parameters`` are read without a touch."""
        self._unseen.update(map(id, parameters))

    def position(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the earliest position among ``parameters``: the priority of a bucket that holds them.

        Parameters that are read unseen come first, as their step does not wait for the forward pass. Unused ones come
        last, in the order of registration.
        """
        return min(map(self._position_of, parameters), default=0)

    def _position_of(self, parameter: nn.Parameter) -> int:
        key = id(parameter)
        if key in self._unseen:
            return -1
        return self._position.get(key, len(self._position) + self._registration.get(key, 0))


_TOLD_APART_EVERY = 16  # passes


class UnseenReads:
    """Finds unseen reads that begin after the first iteration, such as a kernel that is switched on later.

    A parameter was read unseen, before its update, if the update was pending, nothing touched it in the forward pass,
    and it gets a gradient in the backward pass. A gate opens for a whole bucket, which hides the bucket's other
    parameters. So in one pass out of sixteen these keep a gate that only records their own touches.

    Cost: one more touch of each parameter in one pass out of sixteen. Not found: reads without a gradient, and a
    parameter that is read unseen and then touched in the same forward pass.

    It watches one engine's forward and backward passes, under its lock or on the training thread.
    """

    def __init__(self) -> None:
        self._apart = False
        self._watched: dict[int, nn.Parameter] = {}
        self._stale: dict[int, nn.Parameter] = {}  # not touched, and stepped only when the forward pass ended
        self._doubtful: dict[int, nn.Parameter] = {}  # not touched, but in a bucket that was opened
        self._with_gradient: set[int] = set()
        self._handles: list[Any] = []

    def begin(self, step: int) -> None:
        """Begin a forward pass."""
        self._apart = step % _TOLD_APART_EVERY == 0

    def opened(self, parameters: Iterable[nn.Parameter], touched: nn.Parameter | None) -> None:
        """Handle ``parameters`` whose gate a touch has opened in a forward pass, instead of making them plain."""
        if not self._apart:
            return
        others = [p for p in parameters if p is not touched]
        self._watched.update((id(p), p) for p in others)
        arm(others, self)

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`."""
        if gradient_only:
            return
        self._watched.pop(id(parameter), None)
        if gate_of(parameter) is self:
            disarm((parameter,))

    def open_all(self, reason: str) -> None:
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: known unseen reads begin."""
        watched, self._watched = self._watched, {}
        disarm(p for p in watched.values() if gate_of(p) is self)

    def end(self, late: Iterable[nn.Parameter] = (), untouched: Iterable[nn.Parameter] = ()) -> None:
        """End a forward pass; it touched neither ``late``, which are stepped only now, nor ``untouched``."""
        watched, self._watched = self._watched, {}
        disarm(p for p in watched.values() if gate_of(p) is self)
        self._doubtful = watched | {id(p): p for p in untouched}
        self._stale = {id(p): p for p in late}

    def before_backward(self) -> None:
        """Record which parameters get a gradient in this process; DDP also fills in those of other ranks."""
        self._forget_hooks()
        for parameter in (*self._stale.values(), *self._doubtful.values()):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._noting(id(parameter))))

    def after_backward(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that were read unseen: those certainly read before the update, and those possibly."""
        found = self._with_gradient
        stale = [p for key, p in self._stale.items() if key in found]
        doubtful = [p for key, p in self._doubtful.items() if key in found]
        self.close()
        return stale, doubtful

    def close(self) -> None:
        """Remove all hooks and gates."""
        self.end()
        self._doubtful = {}
        self._forget_hooks()

    def _forget_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._with_gradient = set()

    def _noting(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._with_gradient.add(key)


OpeningKind = Literal["touch", "gradient", "step", "forward end", "flush"]
