"""Functions of PyTorch that reach parameters without a touch, and forks: gates open first while a fit is under way.

Most functions tell a parameter's class that they are handed it. These do not: they are bound to C++ directly, trace
what runs into a graph of which a step must not become a part, or compute something else for classes they do not know.
Each is replaced where PyTorch looks it up, by a function that opens gates and goes on with the original:

- *transforms* (``torch.func``, ``torch.vmap``, ``torch.autograd.functional``) wrap tensors level by level; what is
  wrapped is opened. What they close over is touched as ever (``plain_mode`` takes the step outside of the transform);
- *fast paths* (attention, transformer layers) ask whether an argument is of a class of its own: it is not, once open;
- *tracers and exporters* (``torch.jit``, ``torch.export``, ``make_fx``, ``torch.onnx``, CUDA graphs) begin with all
  open, and what is scripted or traced is known to be read unseen from then on;
- *backward passes* add to gradients, which are under way as others left them: those land first. A pass inside of
  another one, as of activation checkpointing, is a part of that;
- *custom functions* are how kernels that take a weight's memory (Triton, CUDA extensions) become part of a model.
  ``torch.autograd.Function.apply`` dispatches no ``__torch_function__``, but hands the arguments to
  ``torch._functorch.utils.unwrap_dead_wrappers`` first, looked up at each call. ``apply`` itself stays what it is, so
  this holds for ``apply`` methods that were kept as functions (``attention = Attention.apply``), for subclasses that
  override it and call what they inherit, and for Dynamo, which recognises custom functions by their ``apply`` and
  traces what is inside. PyTorch 2.14 has ``apply`` in C, where nothing is looked up: ``apply`` itself is replaced, and
  one that was kept as a function before the fit is not seen.

They are replaced for a whole fit, by functions that Dynamo may follow: they do nothing while it compiles, so what it
compiles does not come to depend on gates. But where Dynamo has given up on a custom function and runs it as it is, it
must not look into what is around it: what takes the place there is one object for good, and Dynamo is told to leave it
alone.

Not seen: weights that the arguments only lead to, such as a module's, and kernels that are called without a custom
function. The first iteration finds those, and later ones do (``gates.py``). What a version of PyTorch does
not have is left out, and found that way too. Calls of ``torch.compile`` are in ``compiled_calls.py``.

A forked child has its parent's memory and none of its threads: a gate that is closed there would wait forever. So all
gates open before a fork, whichever thread forks: the parent waits for what is due, and the child has plain parameters
and needs nothing of ours. ``subprocess`` replaces the child's memory at once, runs no hooks, and costs nothing.
Processes that get a weight over a pipe (``spawn``, ``forkserver``, queues) have it pickled, which opens its gate; torch
hands parameters over in shared memory, by their exact class.

Locks: whoever forks takes the lock of each :class:`Watching` and holds it across the fork, so that the child never
finds it taken by a thread that it does not have. Two threads that fork take the locks in one order.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import nn
from torch._functorch import utils
from torch.multiprocessing.reductions import reduce_tensor

from lightning_bytescheduler.ddp import compiled_calls
from lightning_bytescheduler.ddp.aliases import note_script
from lightning_bytescheduler.ddp.compiled_calls import open_everything, resume
from lightning_bytescheduler.ddp.gates import GatedParameter, any_closed, open_gates

__all__ = ["Watching", "watch_entry_points"]

_FUNCTION = torch.autograd.Function
_IN_PYTHON = isinstance(vars(_FUNCTION)["apply"], classmethod)
_OWNER, _NAME = (utils, "unwrap_dead_wrappers") if _IN_PYTHON else (_FUNCTION, "apply")
_original: Any = vars(_OWNER).get(_NAME)


def unwrap_and_open(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Open the gates among ``args``, then do what PyTorch does with them."""
    open_gates(args)
    return _original(args)  # type: ignore[no-any-return]


def apply_and_open(function: type[torch.autograd.Function], /, *args: Any, **kwargs: Any) -> Any:
    """Open the gates among the arguments, then apply ``function``."""
    open_gates((args, kwargs))
    return _original.__get__(None, function)(*args, **kwargs)


# Dynamo, where it gave up on a custom function and runs it as it is, must not look into what is around it.
_replacement: Any = (
    torch.compiler.disable(unwrap_and_open)
    if _IN_PYTHON
    else classmethod(torch.compiler.disable(apply_and_open, recursive=False))
)


class Watching(Protocol):
    """What has gates to open before a fork, and gradients under way to which a backward pass would add."""

    def before_fork(self) -> None:
        """Take the lock, and make all parameters plain; must not raise."""

    def after_fork(self, *, in_child: bool) -> None:
        """Let go of the lock; in the child, forget what only the parent can end."""

    def backward_pass(self) -> AbstractContextManager[object]:
        """Around a backward pass that adds to gradients."""


_lock = threading.Lock()
_watchers: list[Watching] = []
_replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is in its place
_of_this_thread = threading.local()


def _before() -> None:
    _of_this_thread.held = held = []
    for engine in list(_watchers):
        engine.before_fork()
        held.append(engine)


def _after(*, in_child: bool) -> None:
    held, _of_this_thread.held = getattr(_of_this_thread, "held", []), []
    for engine in reversed(held):
        engine.after_fork(in_child=in_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=lambda: _after(in_child=False),
        after_in_child=lambda: _after(in_child=True),
    )


def _reduce_opened(parameter: nn.Parameter) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """As torch reduces a parameter, and of that class also where the gate stays closed (gradients on their way)."""
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

_RUN_BACKWARD = ("torch.autograd", "torch.autograd.graph")  # where its name is looked up


def watch_entry_points(engine: Watching) -> Callable[[], None]:
    """Have gates opened at each entry point, until what is returned is called; calls may overlap, on any threads.

    Args:
        engine: Told of backward passes and forks.
    """
    with _lock:
        _watchers.append(engine)
        if len(_watchers) == 1:
            _replace_all()
    left = False

    def leave() -> None:
        nonlocal left
        with _lock:
            if left:
                return
            left = True
            _watchers.remove(engine)
            if not _watchers:
                while _replaced:
                    owner, name, original, ours = _replaced.pop()
                    if vars(owner).get(name) is ours:  # else somebody has put something in its place since
                        setattr(owner, name, original)

    return leave


def _replace_all() -> None:
    global _original
    found = vars(_OWNER).get(_NAME)
    if found is not None:
        # Somebody may have put ours back since the last fit: it would call itself.
        _original = _original if found is _replacement else found
        _put(_OWNER, _NAME, _original, _replacement)
    for module, name in _TAKE_THEIR_ARGUMENTS:
        _replace(module, name, _opening_arguments)
    for module, name in _DROP_GRADIENTS:
        _replace(module, name, _leaving_gates_closed)
    for (module, name), reason in _NEED_ALL_OPEN.items():
        _replace(module, name, functools.partial(_opening_everything, reason))
    for module in _RUN_BACKWARD:
        _replace(module, "_engine_run_backward", _telling_passes)
    _replace("torch.jit._recursive", "create_script_module", _noting_scripts)
    for owner, name, make in compiled_calls.entry_points():
        original = getattr(owner, name)
        _put(owner, name, original, make(original))


def _telling_passes(run: Any) -> Any:
    @functools.wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        adds = kwargs.get("accumulate_grad") and torch._C._current_autograd_node() is None
        if not adds or torch.compiler.is_dynamo_compiling():
            return run(*args, **kwargs)
        with ExitStack() as told:
            for engine in list(_watchers):
                told.enter_context(engine.backward_pass())
            return run(*args, **kwargs)

    return running


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
        # Dynamo follows calls into this function, and must not come to depend on whether gates are closed.
        if not torch.compiler.is_dynamo_compiling() and any_closed():
            open_gates((args, kwargs))
        return original(*args, **kwargs)

    return opening


def _leaving_gates_closed(zero_grad: Any) -> Any:
    @functools.wraps(zero_grad)
    def leaving(self: Any, set_to_none: bool = True) -> Any:
        if not set_to_none or torch.compiler.is_dynamo_compiling() or not any_closed():
            return zero_grad(self, set_to_none)
        # A deferred step has its gradients, and what is only dropped need not have arrived.
        with torch._C.DisableTorchFunctionSubclass():
            return zero_grad(self, set_to_none)

    return leaving


def _opening_everything(reason: str, original: Any) -> Any:
    @functools.wraps(original)
    def opening(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not any_closed():
            return original(*args, **kwargs)
        stood_aside = open_everything(reason)
        try:
            return original(*args, **kwargs)
        finally:
            resume(stood_aside)

    return opening
