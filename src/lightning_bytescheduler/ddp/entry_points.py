"""Opens gates before PyTorch functions that read parameters without a touch, and before forks, during a fit.

Most functions report their arguments to a parameter's class. The functions here do not: they are bound to C++ directly,
trace code into a graph that a step must not become part of, or compute differently for unknown classes. Each is
replaced where PyTorch looks it up, by a function that opens gates and calls the original:

- *transforms* (``torch.func``, ``torch.vmap``, ``torch.autograd.functional``) wrap tensors level by level; gates of
  wrapped tensors open. Tensors that the transformed function closes over are touched as usual (``plain_mode`` takes the
  step outside of the transform);
- *fast paths* (attention, transformer layers) check whether an argument is of a subclass: once open, it is not;
- *tracers and exporters* (``torch.jit``, ``torch.export``, ``make_fx``, ``torch.onnx``, CUDA graphs) begin with all
  gates open, and scripted or traced modules are known to be read unseen from then on;
- *backward passes* add to gradients, so gradients in flight land first. A nested pass, as of activation checkpointing,
  is part of the outer one;
- *custom functions* wrap kernels that take a weight's memory (Triton, CUDA extensions).
  ``torch.autograd.Function.apply`` dispatches no ``__torch_function__``, but passes its arguments to
  ``torch._functorch.utils.unwrap_dead_wrappers``, looked up at each call. ``apply`` itself is unchanged, so this also
  holds for ``apply`` methods stored as functions (``attention = Attention.apply``), for subclasses that override it,
  and for Dynamo, which recognises custom functions by their ``apply``. PyTorch 2.14 has ``apply`` in C without such a
  look-up: there ``apply`` itself is replaced, and an ``apply`` stored as a function before the fit is not seen.

All are replaced for a whole fit, by functions that Dynamo may trace: these do nothing while it compiles, so compiled
code does not depend on gates. Where Dynamo runs a custom function uncompiled, it must not trace the code around it: the
replacement there is one permanent object that Dynamo is told to skip.

Not seen: weights that are only reachable from the arguments, such as a module's, and kernels called without a custom
function. Observation of the first and later iterations (``reads.py``) finds those reads, and also reads by other
functions where a version of PyTorch lacks one of these. ``compiled_calls.py`` handles calls of ``torch.compile``.

A forked child has its parent's memory and none of its threads, so a closed gate would wait forever there. All gates
open before a fork, on whichever thread it happens: the parent waits for pending updates, and the child has plain
parameters. ``subprocess`` replaces the child's memory at once and runs no hooks, so it costs nothing. Processes that
receive a weight through a pipe (``spawn``, ``forkserver``, queues) get it pickled, which opens its gate. Torch passes
parameters in shared memory, by their exact class.

Locks: the forking thread takes the lock of each :class:`Watching` and holds it across the fork, so that in the child no
lock is held by a thread that does not exist there. All threads take these locks in one order.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import nn
from torch._functorch import utils
from torch.multiprocessing.reductions import reduce_tensor

from lightning_bytescheduler.ddp import compiled_calls
from lightning_bytescheduler.ddp.compiled_calls import open_everything, resume
from lightning_bytescheduler.ddp.gates import GatedParameter, any_closed, open_gates
from lightning_bytescheduler.ddp.reads import note_script

_FUNCTION = torch.autograd.Function
_IN_PYTHON = isinstance(vars(_FUNCTION)["apply"], classmethod)
_OWNER, _NAME = (utils, "unwrap_dead_wrappers") if _IN_PYTHON else (_FUNCTION, "apply")
_original: Any = vars(_OWNER).get(_NAME)


def unwrap_and_open(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Open the gates among ``args``, then call the original."""
    open_gates(args)
    return _original(args)  # type: ignore[no-any-return]


def apply_and_open(function: type[torch.autograd.Function], /, *args: Any, **kwargs: Any) -> Any:
    """Open the gates among the arguments, then apply ``function``."""
    open_gates((args, kwargs))
    return _original.__get__(None, function)(*args, **kwargs)


# Where Dynamo runs a custom function uncompiled, it must not trace the code around it.
_replacement: Any = (
    torch.compiler.disable(unwrap_and_open)
    if _IN_PYTHON
    else classmethod(torch.compiler.disable(apply_and_open, recursive=False))
)


class Watching(Protocol):
    """Has gates to open before a fork, and gradients in flight that a backward pass would add to."""

    def before_fork(self) -> None:
        """Take the lock and make all parameters plain; must not raise."""

    def after_fork(self, *, in_child: bool) -> None:
        """Release the lock; in the child, drop what only the parent can finish."""

    def backward_pass(self) -> AbstractContextManager[object]:
        """Wrap a backward pass that adds to gradients."""


_lock = threading.Lock()
_watchers: list[Watching] = []
_replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, original, replacement)
_of_this_thread = threading.local()


def _before() -> None:
    _of_this_thread.held = held = []
    for fit in list(_watchers):
        fit.before_fork()
        held.append(fit)


def _after(*, in_child: bool) -> None:
    held, _of_this_thread.held = getattr(_of_this_thread, "held", []), []
    for fit in reversed(held):
        fit.after_fork(in_child=in_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=lambda: _after(in_child=False),
        after_in_child=lambda: _after(in_child=True),
    )


def _reduce_opened(parameter: nn.Parameter) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce a parameter as torch does, always as a plain one: its gate may stay closed (gradients in flight)."""
    open_gates((parameter,))
    rebuild, arguments = reduce_tensor(parameter)
    return rebuild, tuple(nn.Parameter if value is GatedParameter else value for value in arguments)


ForkingPickler.register(GatedParameter, _reduce_opened)


_TAKE_THEIR_ARGUMENTS = (
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
    ("torch._functorch.vmap", "_add_batch_dim"),
    ("torch.overrides", "has_torch_function"),
    ("torch.overrides", "has_torch_function_unary"),
    ("torch.overrides", "has_torch_function_variadic"),
    ("torch", "to_dlpack"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch.distributed.distributed_c10d", "_check_single_tensor"),
    ("torch.distributed.distributed_c10d", "_check_tensor_list"),
)
_DROP_GRADIENTS = (("torch.optim.optimizer", "Optimizer.zero_grad"), ("torch.nn.modules.module", "Module.zero_grad"))
_NEED_ALL_OPEN = {
    ("torch._C", "_create_function_from_trace"): "torch.jit.trace",
    ("torch._C", "_create_function_from_trace_with_dict"): "torch.jit.trace",
    ("torch._C", "_create_graph_by_tracing"): "torch.jit.trace",
    ("torch.jit._recursive", "create_script_module"): "torch.jit.script or torch.jit.trace",
    ("torch._subclasses.fake_tensor", "FakeTensorMode.__enter__"): "torch.export or another tracer",
    ("torch._subclasses.functional_tensor", "FunctionalTensorMode.__enter__"): "torch.export or another tracer",
    ("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode.__enter__"): "torch.export or another tracer",
    ("torch.fx._symbolic_trace", "Tracer.trace"): "torch.fx.symbolic_trace",
    ("torch.utils", "swap_tensors"): "torch.utils.swap_tensors",
    ("torch.cuda.graphs", "CUDAGraph.capture_begin"): "torch.cuda.graph",
    ("torch.cuda.graphs", "CUDAGraph.replay"): "the replay of a CUDA graph",
}

_RUN_BACKWARD = ("torch.autograd", "torch.autograd.graph")  # modules that look up ``_engine_run_backward``


def watch_entry_points(fit: Watching) -> Callable[[], None]:
    """Open gates at each entry point until the returned function is called; calls may overlap, on any threads."""
    with _lock:
        _watchers.append(fit)
        if len(_watchers) == 1:
            _replace_all()

    def leave() -> None:
        with _lock:
            if fit not in _watchers:
                return
            _watchers.remove(fit)
            if not _watchers:
                while _replaced:
                    owner, name, original, ours = _replaced.pop()
                    if vars(owner).get(name) is ours:  # otherwise other code has replaced it since
                        setattr(owner, name, original)

    return leave


def _replace_all() -> None:
    global _original
    found = vars(_OWNER).get(_NAME)
    if found is not None:
        # Other code may have restored our replacement since the last fit; as original it would call itself.
        _original = _original if found is _replacement else found
        _put(_OWNER, _NAME, _original, _replacement)
    for module, name in _TAKE_THEIR_ARGUMENTS:
        _replace(module, name, _opening_arguments)
    for module, name in _DROP_GRADIENTS:
        _replace(module, name, functools.partial(_within, _gates_stay_closed))
    for (module, name), reason in _NEED_ALL_OPEN.items():
        _replace(module, name, functools.partial(_within, functools.partial(_everything_open, reason)))
    for module in _RUN_BACKWARD:
        _replace(module, "_engine_run_backward", functools.partial(_within, _backward_passes))
    _replace("torch.jit._recursive", "create_script_module", _noting_scripts)
    for owner, name, make in compiled_calls.entry_points():
        original = getattr(owner, name)
        _put(owner, name, original, make(original))


def _within(context: Callable[..., AbstractContextManager[object]], original: Any) -> Any:
    """Return ``original`` within a context made from its arguments; compiled code calls it alone."""

    @functools.wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return original(*args, **kwargs)
        with context(*args, **kwargs):
            return original(*args, **kwargs)

    return within


@contextmanager
def _backward_passes(*_: Any, accumulate_grad: bool = False, **__: Any) -> Iterator[None]:
    adds = accumulate_grad and torch._C._current_autograd_node() is None
    with ExitStack() as told:
        for fit in list(_watchers) if adds else ():
            told.enter_context(fit.backward_pass())
        yield


def _gates_stay_closed(owner: object, set_to_none: bool = True) -> AbstractContextManager[object]:
    # A deferred step keeps its own gradients, and a gradient that is dropped need not have arrived.
    return torch._C.DisableTorchFunctionSubclass() if set_to_none and any_closed() else nullcontext()


@contextmanager
def _everything_open(reason: str, *_: Any, **__: Any) -> Iterator[None]:
    stood_aside = open_everything(reason)
    try:
        yield
    finally:
        resume(stood_aside)


def _noting_scripts(original: Any) -> Any:
    @functools.wraps(original)
    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        script = original(module, *args, **kwargs)
        note_script(script, module)
        return script

    return noting


def _replace(module: str, name: str, make: Callable[[Any], Any]) -> None:
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    original = None if owner is None else vars(owner).get(attribute)
    if not callable(original):
        return
    _put(owner, attribute, original, make(original))


def _put(owner: Any, name: str, original: Any, ours: Any) -> None:
    _replaced.append((owner, name, original, ours))
    setattr(owner, name, ours)


def _opening_arguments(original: Any) -> Any:
    @functools.wraps(original)
    def opening(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces calls of this function; compiled code must not depend on closed gates.
        if not torch.compiler.is_dynamo_compiling() and any_closed():
            open_gates((args, kwargs))
        return original(*args, **kwargs)

    return opening
