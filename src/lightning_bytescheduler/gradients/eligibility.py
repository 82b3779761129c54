"""What keeps a step from crossing the barrier, and which parameters a touch gate cannot see."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.gradients.aliases import AliasDetector
from lightning_bytescheduler.gradients.compiled_calls import compiled_calls_are_seen
from lightning_bytescheduler.gradients.gate import can_be_gated
from lightning_bytescheduler.gradients.gated_optimizer import can_have_a_gate
from lightning_bytescheduler.gradients.partial_step import has_step_hooks, is_per_parameter, steps_as_its_class

__all__ = ["model_reasons", "optimizer_reasons", "unseen_parameters"]


def optimizer_reasons(optimizers: Sequence[Optimizer]) -> list[str]:
    """Why steps of ``optimizers`` cannot be deferred; empty if they can. Each reason says how to avoid it."""
    if len(optimizers) != 1:
        return [
            f"there are {len(optimizers)} optimizers (one optimizer with several parameter groups keeps the overlap)"
        ]
    optimizer = optimizers[0]
    reasons = []
    name = type(optimizer).__name__
    if not is_per_parameter(optimizer):
        reasons.append(
            f"{name} is not known to update each parameter on its own (torch.optim's SGD, Adam, AdamW and the like are)"
        )
    elif not can_have_a_gate(optimizer):
        reasons.append(
            f"{name} has attributes of a kind of its own (state and param_groups as plain ones keep the overlap)"
        )
    if not steps_as_its_class(optimizer):
        reasons.append(
            f"the step of this {name} was replaced by another function (leave it as it is, and do what else is to be "
            "done in LightningModule.on_train_batch_end, to keep the overlap)"
        )
    if has_step_hooks(optimizer):
        reasons.append(f"{name} has step hooks, which expect whole steps (remove them to keep the overlap)")
    return reasons


def model_reasons(model: nn.Module) -> list[str]:
    """Why updates of ``model`` cannot be deferred; empty if they can. Each reason says how to avoid it."""
    reasons = []
    sparse = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]
    if sparse:
        reasons.append(f"{sparse[0]!r} has sparse gradients (sparse=False keeps the overlap)")
    shared = _sharing_memory(model)
    if shared:
        reasons.append(
            f"parameters {shared[0]!r} and {shared[1]!r} are different tensors over the same memory "
            "(tie them by assigning the same nn.Parameter to keep the overlap)"
        )
    return reasons


def _sharing_memory(model: nn.Module) -> tuple[str, str] | None:
    """Two parameters that overlap; neighbours in one storage, as cuDNN wants those of an LSTM, do not."""
    ranges = sorted(
        (parameter.data_ptr(), _end(parameter), name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() and can_be_gated(parameter)
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            return name, other
    return None


def _end(parameter: nn.Parameter) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data_ptr() + (reach + 1) * parameter.element_size()


def unseen_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that may be read without a touch: their steps are not deferred.

    Those of scripted modules, whose code holds the memory itself, and those of a class of their own. Compiled modules,
    and modules with compiled methods, count where gates cannot be opened before such code is entered. What shows only
    when it runs is found by :class:`~lightning_bytescheduler.gradients.first_use.FirstUseObserver`, and who keeps an
    alias by :class:`~lightning_bytescheduler.gradients.aliases.AliasDetector`; where PyTorch does not show aliases,
    parameters of which a module keeps one (a tensor attribute, buffer or frozen parameter over the same memory) count
    as unseen.
    """
    compiled_too = not compiled_calls_are_seen()
    aliases_show = AliasDetector(()).works
    unseen: set[int] = set()
    by_storage: dict[int, int] = {}
    for parameter in model.parameters():
        if not can_be_gated(parameter):
            unseen.add(id(parameter))
        elif parameter.requires_grad and parameter.numel():
            by_storage[parameter.untyped_storage().data_ptr()] = id(parameter)
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) or (compiled_too and _is_compiled(module)):
            unseen.update(id(p) for p in module.parameters())
        for owner_of_method in _compiled_methods_owners(module) if compiled_too else ():
            unseen.update(id(p) for p in owner_of_method.parameters())
        for alias in () if aliases_show else _plain_tensors(module):
            owner = by_storage.get(alias.untyped_storage().data_ptr())
            if owner is not None:
                unseen.add(owner)
    return unseen


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_compiler_ctx", None) is not None  # Lightning's mark on a compiled LightningModule
    )


def _compiled_methods_owners(module: nn.Module) -> Iterable[nn.Module]:
    """Modules of which ``module`` has a compiled method: Dynamo must not meet the gates of what such a method reads."""
    # Decorated in the class, or compiled later and kept as an attribute.
    if any(_compiled_from(value) is not None for cls in type(module).__mro__ for value in vars(cls).values()):
        yield module
    for value in vars(module).values():
        owner = getattr(_compiled_from(value), "__self__", None)
        if isinstance(owner, nn.Module):
            yield owner


def _compiled_from(value: Any) -> Any:
    """What ``torch.compile`` made the function ``value`` from, or ``None``."""
    return getattr(value, "_torchdynamo_orig_callable", None) if inspect.isfunction(value) else None


def _plain_tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    """Tensors that ``module`` reads and no gate is ever closed on."""
    values = [*vars(module).values(), *module._buffers.values()]
    for value in values:
        candidates = value if isinstance(value, (list, tuple)) else (value,)
        for tensor in candidates:
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
                yield tensor
    for parameter in module._parameters.values():
        if parameter is not None and not parameter.requires_grad and parameter.numel():
            yield parameter
