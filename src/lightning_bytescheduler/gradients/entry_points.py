"""Functions of PyTorch that reach parameters without a touch, and that open gates first while a fit is under way.

Most functions tell a parameter's class that they are handed it. These do not: they are bound to C++ directly, trace
what runs into a graph of which a step must not become a part, or compute something else for classes they do not know.
Each is replaced where PyTorch looks it up, by a function that opens gates and goes on with the original:

- *transforms* (``torch.func``, ``torch.vmap``, ``torch.autograd.functional``) wrap tensors level by level; what is
  wrapped is opened. What they close over is touched as ever (``plain_mode`` takes the step outside of the transform);
- *fast paths* (attention, transformer layers) ask whether an argument is of a class of its own: it is not, once open;
- *tracers and exporters* (``torch.jit``, ``torch.export``, ``make_fx``, ``torch.onnx``, CUDA graphs) begin with all
  open, and what is scripted or traced is known to be read unseen from then on.

What a version of PyTorch does not have is left out. Calls of ``torch.compile`` are in ``compiled_calls.py``.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_bytescheduler.gradients import compiled_calls
from lightning_bytescheduler.gradients.compiled_calls import open_everything, resume
from lightning_bytescheduler.gradients.gate import any_closed, open_gates

__all__ = ["scripted_parameters", "watch_entry_points"]

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

_scripts: list[tuple[weakref.ref[Any], list[int]]] = []  # made of modules, with the ids of their parameters

_lock = threading.Lock()
_watchers = 0
_replaced: list[tuple[Any, str, Any]] = []


def watch_entry_points() -> Callable[[], None]:
    """Have gates opened at each entry point, until what is returned is called; calls may overlap, on any threads."""
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers == 1:
            _replace_all()
    left = False

    def leave() -> None:
        global _watchers
        nonlocal left
        with _lock:
            if left:
                return
            left = True
            _watchers -= 1
            if not _watchers:
                while _replaced:
                    setattr(*_replaced.pop())

    return leave


def _replace_all() -> None:
    for module, name in _TAKE_THEIR_ARGUMENTS:
        _replace(module, name, _opening_arguments)
    for (module, name), reason in _NEED_ALL_OPEN.items():
        _replace(module, name, functools.partial(_opening_everything, reason))
    _replace("torch.jit._recursive", "create_script_module", _noting_scripts)
    for owner, name, make in compiled_calls.entry_points():
        original = getattr(owner, name)
        _replaced.append((owner, name, original))
        setattr(owner, name, make(original))


def scripted_parameters() -> set[int]:
    """Ids of parameters of modules that were scripted or traced while entry points were watched, while scripts live.

    A script reads the memory of its parameters, which are those of the module that it was made of, without a touch.
    """
    if not _scripts:
        return set()
    _scripts[:] = [(script, ids) for script, ids in _scripts if script() is not None]
    return {key for _, ids in _scripts for key in ids}


def _noting_scripts(original: Any) -> Any:
    @functools.wraps(original)
    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        script = original(module, *args, **kwargs)
        if ids := [id(parameter) for parameter in module.parameters()]:
            _scripts.append((weakref.ref(script), ids))
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
    _replaced.append((owner, attribute, original))
    setattr(owner, attribute, make(original))


def _opening_arguments(original: Any) -> Any:
    @functools.wraps(original)
    def opening(*args: Any, **kwargs: Any) -> Any:
        # Dynamo follows calls into this function, and must not come to depend on whether gates are closed.
        if not torch.compiler.is_dynamo_compiling() and any_closed():
            open_gates((args, kwargs))
        return original(*args, **kwargs)

    return opening


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
