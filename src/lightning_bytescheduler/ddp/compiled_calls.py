"""Opens gates before code made by ``torch.compile`` runs, so that it reads plain parameters with their final weights.

Compiled code reads weights without a touch, and is compiled anew for parameters of another class. So gates are opened
before it is entered, as few as possible: those of the compiled module, and of parameters and modules among the
arguments. Other reads (a closure, a global) are found at compilation, as Dynamo wraps every tensor that a graph reads.
If there are any, all gates are opened before that code is entered. The same holds for code that is broken into several
graphs, as one graph may have been compiled for another caller, and for code whose compilation was not seen. All gates
are also opened before anything is compiled.

The module hooks into functions of Dynamo that every compiled call and every compilation passes through. If a version of
PyTorch lacks one of them, steps are synchronised (``decided_fit.py``).
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
from torch.utils._pytree import tree_leaves

from lightning_bytescheduler.ddp.gates import Gate, any_closed, closed_gates, open_gates

__all__ = ["compiled_calls_are_seen", "entry_points", "open_everything", "resume"]

_WRAPPERS = ("compile_wrapper", "_fn")  # Dynamo's name for the wrapper that torch.compile returns, by version


class _Region:
    """What is known about a compiled function, over all its calls.

    Attributes:
        graphs: The functions compiled while it ran; more than one if it was broken up.
        reads_elsewhere: Whether it read parameters that belong neither to its module nor to its arguments.
    """

    def __init__(self) -> None:
        self.graphs: set[CodeType] = set()
        self.read: set[int] = set()
        self.reads_elsewhere = False

    @property
    def needs_all(self) -> bool:
        """Whether all gates have to be opened before a call; also true if no compilation was seen."""
        return self.reads_elsewhere or len(self.graphs) != 1


class _Local(threading.local):
    def __init__(self) -> None:
        self.reads: list[dict[int, nn.Parameter]] = []  # one entry for each compilation in progress
        self.outermost: FrameType | None = None  # the compiled call during which gates stand aside
        self.stood_aside: list[Gate] = []
        self.read: set[int] = set()  # while gates stand aside


_regions: weakref.WeakKeyDictionary[CodeType, dict[type, _Region]] = weakref.WeakKeyDictionary()
_local = _Local()


def open_everything(reason: str) -> list[Gate]:
    """Open every closed gate of this process.

    Returns:
        Gates that only observe; :func:`resume` makes them observe again.
    """
    gates = closed_gates()
    for gate in gates:
        gate.open_all(reason)
    return [gate for gate in gates if hasattr(gate, "resume")]


def resume(stood_aside: Iterable[Gate], read: Iterable[int] = ()) -> None:
    """Make gates observe again."""
    for gate in stood_aside:
        gate.resume(read)  # type: ignore[attr-defined]


def entry_points() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (owner, attribute, factory of the replacement) of Dynamo's hooked functions; empty if one is missing."""
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
    # Some versions of Dynamo trace every function that runs, these hooks included.
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
    """Keeps Dynamo from compiling the code within, if a compiled call is made inside another one."""

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
        # Dynamo also calls this at the entry, with a callable, and for inner calls.
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
    # Dynamo may have stored the class in a table already, so its method is replaced and not the class.
    def post_init(argument: Any) -> None:
        _note_read(argument._example)
        original(argument)

    return post_init


def _note_read(value: Any) -> None:
    if _local.reads and isinstance(value, nn.Parameter):
        _local.reads[-1][id(value)] = value


def _note(code: CodeType, reads: Mapping[int, nn.Parameter]) -> None:
    """Add a compilation and its reads to every compiled call on this thread's stack."""
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
    while frame is not None:
        yield frame
        frame = frame.f_back


def _compiled_in(frame: FrameType) -> Any:
    """Return the function that ``frame`` runs compiled; ``None`` if it is not Dynamo's frame of such a call."""
    code = frame.f_code
    if code.co_name not in _WRAPPERS or frame.f_globals.get("__name__") != "torch._dynamo.eval_frame":
        return None
    variables = frame.f_locals
    return variables.get("fn") if callable(variables.get("callback")) else None


def _own_parameters(function: Any, frame: FrameType) -> Iterator[nn.Parameter]:
    variables = frame.f_locals
    for found in tree_leaves((_owner(function), variables.get("args"), variables.get("kwargs"))):
        if isinstance(found, nn.Parameter):
            yield found
        elif isinstance(found, nn.Module):
            yield from found.parameters()


def _owner(function: Any) -> nn.Module | None:
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
