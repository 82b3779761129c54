"""Calls of what ``torch.compile`` made: they meet plain parameters with their final weights.

Compiled code reads weights without a touch, and is compiled anew for parameters of another class. So gates open before
it is entered, as few as possible: those of the module that was compiled and of the parameters and modules among the
arguments. What else it reads (a closure, a global) shows when it is compiled, as Dynamo wraps every tensor that a graph
reads; from then on everything is opened at the entry of that code, and before anything is compiled. Code that is
broken into several graphs is treated likewise, as one of them may have been compiled for somebody else, and so is code
of which no compilation was seen, as it was compiled before the fit.

All of this happens at places of Dynamo's own Python code that every compiled call and every compilation passes through.
With a version of PyTorch that lacks one of them, steps are synchronised (``plan.py``).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from lightning_bytescheduler.ddp.gates import Gate, any_closed, closed_gates, open_gates

__all__ = ["compiled_calls_are_seen", "entry_points", "open_everything", "resume"]

_WRAPPERS = ("compile_wrapper", "_fn")  # Dynamo's name for what torch.compile returns, by version


class _Region:
    """What is known of a compiled function, over all its calls.

    Attributes:
        graphs: The functions that were compiled while it ran; more than one if it was broken up.
        read: Ids of parameters that it read.
        reads_elsewhere: Whether it read parameters that belong neither to its module nor to its arguments.
    """

    def __init__(self) -> None:
        self.graphs: set[CodeType] = set()
        self.read: set[int] = set()
        self.reads_elsewhere = False

    @property
    def needs_all(self) -> bool:
        """Also where no compilation was seen."""
        return self.reads_elsewhere or len(self.graphs) != 1


class _Local(threading.local):
    def __init__(self) -> None:
        self.reads: list[dict[int, nn.Parameter]] = []  # of each compilation under way
        self.outermost: FrameType | None = None  # the compiled call in which gates stand aside
        self.stood_aside: list[Gate] = []
        self.read: set[int] = set()  # meanwhile


_regions: weakref.WeakKeyDictionary[CodeType, dict[type, _Region]] = weakref.WeakKeyDictionary()
_local = _Local()


def open_everything(reason: str) -> list[Gate]:
    """Open every closed gate of this process.

    Args:
        reason: What begins, in words.

    Returns:
        Gates that only look on, and go on doing so when :func:`resume` is called.
    """
    gates = closed_gates()
    for gate in gates:
        gate.open_all(reason)
    return [gate for gate in gates if hasattr(gate, "resume")]


def resume(stood_aside: Iterable[Gate], read: Iterable[int] = ()) -> None:
    """Have gates look on again.

    Args:
        stood_aside: From :func:`open_everything`.
        read: Ids of parameters that were read meanwhile.
    """
    for gate in stood_aside:
        gate.resume(read)  # type: ignore[attr-defined]


def entry_points() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """(owner, attribute, what makes its replacement) of the places compiled calls pass through; empty if unknown."""
    try:
        from torch._dynamo import convert_frame, eval_frame
        from torch._dynamo.variables.builder import GraphArg, VariableBuilder

        found: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (eval_frame, "_callback_from_stance", _at_entry),
            (eval_frame, "_maybe_set_eval_frame", _at_exit),
            (convert_frame.CatchErrorsWrapper, "__call__", _at_compilation),
            (VariableBuilder, "wrap_tensor", _noting_reads),
            (GraphArg, "__post_init__", _noting_inputs),
        ]
        _leave_out_this_file()
    except (ImportError, AttributeError):
        return []
    return found if all(callable(getattr(owner, name, None)) for owner, name, _ in found) else []


@functools.cache
def _leave_out_this_file() -> None:
    # Some versions come to the places above while Dynamo looks at every function that runs.
    torch._dynamo.trace_rules.add(__name__)


def compiled_calls_are_seen() -> bool:
    """Whether this version of PyTorch lets gates be opened before compiled code is entered."""
    return bool(entry_points())


def _at_entry(original: Any) -> Any:
    def callback_from_stance(callback: Any) -> Any:
        if callable(callback):
            with _uncompiled():
                if any_closed():
                    _enter(sys._getframe(1))
        return original(callback)

    return callback_from_stance


def _enter(frame: FrameType) -> None:
    function = _compiled_in(frame)
    region = _region(function)
    if region.needs_all:
        _stand_aside(f"compiled {_name(function)}", frame)
        if _local.outermost is not None:
            _local.read |= region.read
            _local.read.update(() if function is None else map(id, _own_parameters(function, frame)))
    else:
        open_gates(list(_own_parameters(function, frame)))


class _uncompiled:  # a context manager
    """What runs within is not compiled itself, where a compiled call is made in another that is under way."""

    def __enter__(self) -> None:
        self._before = torch._C._dynamo.eval_frame.set_eval_frame(None)

    def __exit__(self, *_: object) -> None:
        torch._C._dynamo.eval_frame.set_eval_frame(self._before)


def _stand_aside(reason: str, frame: FrameType) -> None:
    stood_aside = open_everything(reason)
    if stood_aside and _local.outermost is None:
        callers = [caller for caller in _stack(frame) if _compiled_in(caller) is not None]
        _local.outermost = callers[-1] if callers else None
    if _local.outermost is not None:
        _local.stood_aside += stood_aside


def _at_exit(original: Any) -> Any:
    def maybe_set_eval_frame(callback: Any) -> Any:
        # Also called at the entry, with something to call, and by what runs within.
        if _local.stood_aside and not callable(callback) and sys._getframe(1) is _local.outermost:
            with _uncompiled():
                stood_aside, read = _local.stood_aside, _local.read
                _local.stood_aside, _local.read, _local.outermost = [], set(), None
                resume(stood_aside, read)
        return original(callback)

    return maybe_set_eval_frame


def _at_compilation(original: Any) -> Any:
    def converted(wrapper: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if any_closed():
            _stand_aside(f"compiled {frame.f_code.co_name}", sys._getframe(1))
        reads: dict[int, nn.Parameter] = {}
        _local.reads.append(reads)
        try:
            result = original(wrapper, frame, *args, **kwargs)
        finally:
            _local.reads.pop()
            if _local.outermost is not None:
                _local.read |= reads.keys()
        if getattr(result, "guarded_code", result) is not None:
            _note(frame.f_code, reads)
        return result

    return converted


def _noting_reads(original: Any) -> Any:
    def wrap_tensor(builder: Any, value: Any) -> Any:
        _note_read(value)
        return original(builder, value)

    return wrap_tensor


def _noting_inputs(original: Any) -> Any:
    # Dynamo keeps a table of what wraps which type, and may have it from before.
    def post_init(argument: Any) -> None:
        _note_read(argument._example)
        original(argument)

    return post_init


def _note_read(value: Any) -> None:
    if _local.reads and isinstance(value, nn.Parameter):
        _local.reads[-1][id(value)] = value


def _note(code: CodeType, reads: Mapping[int, nn.Parameter]) -> None:
    """Tell every compiled call on this thread's stack what was compiled in it, and what that reads."""
    for caller in _stack(sys._getframe(1)):
        function = _compiled_in(caller)
        if function is not None:
            region = _region(function)
            region.graphs.add(code)
            region.read |= reads.keys()
            if reads and not region.reads_elsewhere:
                own = {id(parameter) for parameter in _own_parameters(function, caller)}
                region.reads_elsewhere = not own.issuperset(reads)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _compiled_in(frame: FrameType) -> Any:
    """The function that ``frame`` runs compiled, or ``None`` if it is not Dynamo's frame of such a call."""
    code = frame.f_code
    if code.co_name not in _WRAPPERS or frame.f_globals.get("__name__") != "torch._dynamo.eval_frame":
        return None
    variables = frame.f_locals
    return variables.get("fn") if callable(variables.get("callback")) else None


def _own_parameters(function: Any, frame: FrameType) -> Iterator[nn.Parameter]:
    variables = frame.f_locals
    yield from _parameters_in((_owner(function), variables.get("args", ()), variables.get("kwargs", {})))


def _parameters_in(values: Any) -> Iterator[nn.Parameter]:
    if isinstance(values, nn.Parameter):
        yield values
    elif isinstance(values, nn.Module):
        yield from values.parameters()
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _parameters_in(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _parameters_in(value)


def _owner(function: Any) -> nn.Module | None:
    """The module that was compiled, or whose method was, perhaps under decorators."""
    while function is not None:
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            return owner
        function = getattr(function, "__wrapped__", None)
    return None


def _code(function: Any) -> tuple[CodeType | None, type]:
    function = inspect.unwrap(function)
    runs = getattr(function, "forward" if isinstance(function, nn.Module) else "__code__", None)
    code = getattr(runs, "__code__", runs)
    return (code if isinstance(code, CodeType) else None), type(_owner(function))


def _region(function: Any) -> _Region:
    code, kind = _code(function)
    return _Region() if code is None else _regions.setdefault(code, {}).setdefault(kind, _Region())


def _name(function: Any) -> str:
    owner, name = _owner(function), getattr(function, "__name__", "code")
    return str(name) if owner is None else f"{type(owner).__name__}.{name}"
