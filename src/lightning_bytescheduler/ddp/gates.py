"""Gates on parameters: the first touch of a parameter waits for what it still owes.

While a parameter's gradient is on its way its class is :class:`GatedParameter`, which sees every PyTorch function that
is handed the parameter (``__torch_function__``) and lets its gate act first. Class assignment is what
``torch.nn.UninitializedParameter`` uses to become a plain parameter; it costs some fifty nanoseconds and keeps
identity, hooks and optimizer state.

Why touches and not modules: a gate on a module's forward misses what is read elsewhere (tied weights,
``F.linear(x, self.embedding.weight)``, a callback that reads weights, ``state_dict()``); a gate on the parameter itself
is exact wherever it is read, in every iteration, and leaves no observer behind once it has opened. What it cannot see
is code that holds the memory without the Python object: scripted modules, extensions, or an alias made earlier with
``.data``. Those parameters are found beforehand (``plan.py``), in the first iteration (:class:`FirstUseObserver`), in
later ones (:class:`UnseenReads`) or by who holds them (``aliases.py``), and their steps are not deferred. Functions of
PyTorch that take parameters without a word open gates first (``entry_points.py``, ``compiled_calls.py``).

In the first forward pass every parameter carries a gate that only notes its turn: the order of first use is
ByteScheduler's priority, observed and not taken from registration order. A parameter that has a gradient after the
backward pass, though nobody touched it, was read by code that a touch gate cannot see, such as an extension that takes
its memory.

Nobody waits where others wait for the toucher. Threads of this package carry the communication that a gate waits for,
and garbage is collected wherever a thread is just now, under whichever lock: a finalizer that looks at a weight there
sees it as it is (:func:`must_not_wait`).
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
    """What stands between a gated parameter and whoever touches it."""

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        """Act before ``parameter`` is used; ``gradient_only`` when just its ``.grad`` is asked for."""

    def open_all(self, reason: str) -> None:
        """Act before any parameter may be used, and leave none gated; ``reason`` says what begins, in words."""


_gates: dict[int, Gate] = {}  # by id of the parameter; the gate keeps the parameter alive

_TENSOR: Any = torch.Tensor  # its getters have no types
_GRADIENT_ACCESS = frozenset({_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__})
_SET_GRADIENT = _TENSOR.grad.__set__
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


def _drops_gradient(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether that is ``parameter.grad = None``: a deferred step has its gradients, and nobody sees what they hold."""
    return func is _SET_GRADIENT and args[1] is None


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
        if func not in _METADATA and not _drops_gradient(func, args):
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
    if gate is not None and must_not_wait():
        return
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


_collector = 0  # the thread that collects garbage at present; there is one at a time


def _note_collection(phase: str, info: Mapping[str, int]) -> None:
    global _collector
    _collector = get_ident() if phase == "start" else 0


gc.callbacks.append(_note_collection)


def must_not_wait() -> bool:
    """Whether this thread cannot wait for a gate, see the module: it is this package's, or collects garbage."""
    return _collector == get_ident() or current_thread().name.startswith("bytescheduler")


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


class FirstUseObserver:
    """Notes the first touch of each parameter during one forward pass.

    Args:
        parameters: In registration order, which is used for parameters the pass did not touch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._registration = {id(p): index for index, p in enumerate(self._parameters)}
        self._position: dict[int, int] = {}
        self._unseen: set[int] = set()
        self._compiled: set[int] = set()
        self._untouched: list[nn.Parameter] = []  # of the observed pass, until its backward pass has been seen too
        self._observing = False
        self._done = False

    def begin(self, unseen: Iterable[int] = ()) -> None:
        """Observe from here on, unless a pass was observed before.

        Args:
            unseen: Ids of parameters whose touches are known not to be seen. They are left alone, as compiled code
                specialises on the class of what it reads.
        """
        if not self._done:
            self._observing = True
            self._unseen.update(unseen)
            # A pass that used nothing did not count, but there may be updates on their way all the same.
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
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: look away until :meth:`resume`."""
        disarm([p for p in self._parameters if gate_of(p) is self])

    def resume(self, read: Iterable[int]) -> None:
        """Look on; parameters with the ids ``read`` were used meanwhile."""
        if not self._observing:
            return
        for parameter in read:
            if parameter in self._registration and parameter not in self._unseen:
                self._position.setdefault(parameter, len(self._position))
        known = self._unseen | self._position.keys()
        arm((p for p in self._parameters if id(p) not in known and not is_armed(p)), self)

    def read_unseen(self) -> set[int]:
        """Ids of parameters that the observed pass read without a touch, or in compiled code; call after backward.

        Empty unless a pass was observed since the last call.
        """
        found = {id(p) for p in self._untouched if p.grad is not None} | self._compiled
        self._untouched = []
        self._compiled = set()
        self._unseen |= found
        return found

    def note_unseen(self, parameters: Iterable[nn.Parameter]) -> None:
        """``parameters`` are read without a touch, as was found later."""
        self._unseen.update(map(id, parameters))

    def position(self, parameters: Iterable[nn.Parameter]) -> int:
        """The earliest position among ``parameters``: the priority of a bucket that holds them.

        Whatever is read unseen comes first, as its step does not wait for the forward pass; what was not used comes
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
    """Finds reads that no gate sees, and that began after the first iteration: a kernel that is switched on later.

    A parameter that nobody touched in a forward pass, though its update was due, and that gets a gradient in the
    backward pass all the same, was read unseen, and before its update. A gate opens for a whole bucket, so a parameter
    is told apart from its neighbours only now and then: in such a pass, parameters whose bucket another one's touch has
    opened keep a gate that only notes their own.

    What this costs: nothing for parameters that are touched, and one more touch of each in one pass out of sixteen.

    Not found: reads without a gradient, and a parameter that is read unseen and then touched in the same forward pass.
    Watches one engine's forward and backward passes, under its lock or on the training thread.
    """

    def __init__(self) -> None:
        self._apart = False
        self._watched: dict[int, nn.Parameter] = {}
        self._stale: dict[int, nn.Parameter] = {}  # not touched, and not stepped when the forward pass ended
        self._doubtful: dict[int, nn.Parameter] = {}  # not touched, but their bucket was open at some time
        self._with_gradient: set[int] = set()
        self._handles: list[Any] = []

    def begin(self, step: int) -> None:
        """A forward pass begins.

        Args:
            step: Number of the backward pass that follows.
        """
        self._apart = step % _TOLD_APART_EVERY == 0

    def opened(self, parameters: Iterable[nn.Parameter], touched: nn.Parameter | None) -> None:
        """In place of making ``parameters`` plain, in a forward pass: a touch of one of them has opened their gate."""
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
        """See :class:`~lightning_bytescheduler.ddp.gates.Gate`: what begins reads unseen, and that is known."""
        watched, self._watched = self._watched, {}
        disarm(p for p in watched.values() if gate_of(p) is self)

    def end(self, late: Iterable[nn.Parameter] = (), untouched: Iterable[nn.Parameter] = ()) -> None:
        """A forward pass has ended; nobody touched ``late``, which are stepped only now, and ``untouched``."""
        watched, self._watched = self._watched, {}
        disarm(p for p in watched.values() if gate_of(p) is self)
        self._doubtful = watched | {id(p): p for p in untouched}
        self._stale = {id(p): p for p in late}

    def before_backward(self) -> None:
        """See who gets a gradient: in this process, as DDP fills in those of other ranks."""
        self._forget_hooks()
        for parameter in (*self._stale.values(), *self._doubtful.values()):
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._noting(id(parameter))))

    def after_backward(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Who was read unseen: surely before the update, and perhaps."""
        found = self._with_gradient
        stale = [p for key, p in self._stale.items() if key in found]
        doubtful = [p for key, p in self._doubtful.items() if key in found]
        self.close()
        return stale, doubtful

    def close(self) -> None:
        """Leave nothing behind."""
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
