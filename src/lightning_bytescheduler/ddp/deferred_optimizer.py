"""Defers an optimizer's step: it is taken bucket by bucket, when the gradients have arrived.

*Partial steps.* If an optimizer's update of a parameter depends only on that parameter, its gradient, its state and its
group's hyperparameters, stepping bucket by bucket gives the same bits as one step. The optimizer's own ``step`` runs on
a stand-in: an object of its class with its attributes, the state at the time of the request, and groups with the chosen
parameters and the hyperparameters of that time. The optimizer itself is unchanged, so learning-rate schedules may go on
and users may replace state and groups before a deferred step happens.

*Gates.* Pending updates are applied before the state of an optimizer is read, so the reader sees what a synchronous
step would have left. While a gate is closed, the optimizer's class is a subclass that opens it: when
``optimizer.state`` or ``vars(optimizer)`` is read or replaced, and when the optimizer is copied or pickled. The reader
gets the state itself, so type, length, order and equality are as usual. Parameter groups may be read and changed
freely: a deferred step has its own copy.
"""

from __future__ import annotations

import inspect
import os.path
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._functorch import pyfunctorch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.gates import must_not_wait
from lightning_bytescheduler.ddp.reads import held_beside
from lightning_bytescheduler.lightning_api import DDPStrategy, MixedPrecision, Precision

_OPENS = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__", "state"})
_OPENS_WHEN_SET = frozenset({"__class__", "__dict__", "state"})

_updates: dict[int, Callable[[], None]] = {}  # by id of the object, which the owner of the gate keeps alive


class _Gated:
    """Mixed into the class of an optimizer with pending updates.

    Code must not test for it: any thread may open it.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return kind_of(self)
        if name in _OPENS:
            _open(self)
            if not is_closed(self):
                return getattr(self, name)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPENS_WHEN_SET:
            _open(self)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OPENS_WHEN_SET:
            _open(self)
        object.__delattr__(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _open(self)  # copy.copy() gets this method from the class
        kind: Any = kind_of(self)
        return kind.__reduce_ex__(self, protocol)


def _open(gated: object) -> None:
    update = _updates.get(id(gated))
    if update is not None and not must_not_wait():
        update()


_kinds: dict[type, type | None] = {}


def _gated(kind: Any) -> type | None:
    """Return the subclass of ``kind`` with a gate; ``None`` if it cannot be made."""
    if kind not in _kinds:
        attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        plain = kind.__getattribute__ is object.__getattribute__ and kind.__setattr__ is object.__setattr__
        try:
            made = types.new_class(kind.__name__, (_Gated, kind), {}, lambda space: space.update(attributes))
            _kinds[kind] = made if plain else None
        except Exception:  # a class may raise anything for its subclasses
            _kinds[kind] = None
    return _kinds[kind]


def kind_of(gated: object) -> type[Any]:
    """Return the class of an optimizer, whether its gate is closed or open."""
    kind = type(gated)
    return kind.__mro__[2] if issubclass(kind, _Gated) else kind


def attributes_of(gated: object) -> dict[str, Any]:
    """Return ``vars(gated)`` without opening its gate."""
    own: dict[str, Any] = object.__getattribute__(gated, "__dict__")
    return own


def can_have_a_gate(optimizer: Optimizer) -> bool:
    """Whether state and groups are plain attributes of ``optimizer``, and its class may be changed."""
    own = attributes_of(optimizer)
    return {"state", "param_groups"} <= own.keys() and _gated(kind_of(optimizer)) is not None


def is_closed(gated: object) -> bool:
    """Whether a gate is closed on an optimizer."""
    return issubclass(type(gated), _Gated)


def close_state(of: Optimizer, update: Callable[[], None]) -> None:
    """Call ``update`` before the state of an optimizer is used; ``update`` has to call :func:`open_state`.

    Args:
        of: The object; nothing happens if its class cannot have a gate.
        update: Called on the thread that reads the state.
    """
    gated = _gated(kind_of(of))
    if gated is not None and not is_closed(of):
        _updates[id(of)] = update
        object.__setattr__(of, "__class__", gated)


def open_state(of: Optimizer) -> None:
    """Restore the class of an optimizer."""
    _updates.pop(id(of), None)
    if is_closed(of):
        object.__setattr__(of, "__class__", kind_of(of))


def state_is_kept(optimizer: Optimizer) -> bool:
    """Whether other code holds the state of ``optimizer``, or a dictionary or tensor of it."""
    own = attributes_of(optimizer)
    if sys.getrefcount(own["state"]) > _ALONE_AS_ATTRIBUTE:
        return True
    if _most_references(own["state"].values()) > _ALONE_IN_MAPPING:
        return True
    tensors = _tensors(own["state"])
    return _most_references(tensors) > _ALONE_IN_LIST or held_beside(tensors)


def _most_references(values: Iterable[Any]) -> int:
    return max(map(sys.getrefcount, values), default=0)


def _tensors(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    return [
        value
        for values in state.values()
        if isinstance(values, dict)
        for value in values.values()
        if type(value) is torch.Tensor and value.layout is torch.strided and value.numel()
    ]


class _Holder:
    def __init__(self) -> None:
        self.state: dict[int, dict[str, torch.Tensor]] = {0: {"": torch.zeros(1, dtype=torch.float32)}}


# Python versions differ in the references that counting itself holds, so these are measured.
_holder = vars(_Holder())
_ALONE_AS_ATTRIBUTE = sys.getrefcount(_holder["state"])
_ALONE_IN_MAPPING = _most_references(_holder["state"].values())
_ALONE_IN_LIST = _most_references(_tensors(_holder["state"]))


_C: Any = torch._C  # its stubs are incomplete
# Private, and needed only within a transform of torch.func or a tracer; without them the step raises there.
_inside_a_transform: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
_outside_transforms: Callable[[], Any] = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", nullcontext)
_modes_before_dispatch: Callable[[], int] = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", lambda: 0)


ParameterGradient = tuple[int, nn.Parameter, torch.Tensor]
"""(index of the parameter group, parameter, gradient to step with)."""

HyperparameterSnapshot = list[dict[str, Any]]
_MAY_HAVE_TENSORS = (torch.Tensor, dict, list, tuple)

_PER_PARAMETER_NAMES = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
_PER_PARAMETER: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in _PER_PARAMETER_NAMES.split() if hasattr(torch.optim, name)
)
_TORCH = os.path.dirname(torch.__file__) + os.sep


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is known to update each parameter independently.

    True for ``torch.optim``'s per-parameter optimizers, and for subclasses that leave every method of the step
    unchanged.
    """
    kind = kind_of(optimizer)
    step = _torchs(kind.step)
    if not any(issubclass(kind, known) and step is inspect.unwrap(known.step) for known in _PER_PARAMETER):
        return False  # also if the class's step is wrapped or replaced
    methods = [name for name in step.__code__.co_names if hasattr(kind, name)]
    if not attributes_of(optimizer).keys().isdisjoint(methods):
        return False
    family = step.__module__.rpartition(".")[2].lstrip("_")  # as in adam() and _multi_tensor_adam()
    functions = (value for name, value in step.__globals__.items() if name.endswith(family))
    return all(map(_torchs, (*(getattr(kind, name) for name in methods), *functions)))


def _torchs(function: Any) -> Any:
    """Return torch's own function inside torch's wrappers; ``None`` if other code wraps or replaces it."""
    while getattr(function, "__code__", None) is not None and function.__code__.co_filename.startswith(_TORCH):
        if not hasattr(function, "__wrapped__"):
            return function
        # Torch's wrappers: no_grad, and the hooks' wrapper that the first instance of a class adds.
        function = function.__wrapped__
    return None


def steps_as_its_class(optimizer: Optimizer, step: object = None) -> bool:
    """Whether ``optimizer.step`` is its class's, apart from the wrapper of learning-rate schedules.

    Args:
        optimizer: The optimizer.
        step: The instance's own step, if a stand-in replaces it at present.
    """
    own = attributes_of(optimizer).get("step") if step is None else step
    if getattr(own, "_wrapped_by_lr_sched", False):
        own = getattr(own, "__wrapped__", own)
    own = getattr(own, "__func__", own)  # unwrap a bound method
    return own is None or any(vars(kind).get("step") is own for kind in type(optimizer).__mro__)


def whole_steps_for(optimizer: Optimizer, step: object = None) -> Iterator[str]:
    """Yield why an optimizer cannot be stepped bucket by bucket, as it is now, each with how to avoid it.

    Args:
        optimizer: The optimizer.
        step: The instance's own step, if a stand-in replaces it at present.
    """
    name = kind_of(optimizer).__name__
    if not is_per_parameter(optimizer):
        alike = "torch.optim's SGD, Adam, AdamW and the like are"
        yield f"{name} is not known to update each parameter on its own ({alike})"
    elif not can_have_a_gate(optimizer):
        yield f"{name} has attributes of a kind of its own (plain attributes state and param_groups keep the overlap)"
    if not steps_as_its_class(optimizer, step):
        yield (
            f"the step of this {name} was replaced by another function (leave it as it is, and do what else is to be "
            "done in LightningModule.on_train_batch_end, to keep the overlap)"
        )
    if has_step_hooks(optimizer):
        yield f"{name} has step hooks, which expect whole steps (remove them to keep the overlap)"


def wants_whole_steps(optimizer: Optimizer, step: object = None) -> str | None:
    """Return the first reason of :func:`whole_steps_for`, if any."""
    return next(whole_steps_for(optimizer, step), None)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer has step hooks, which expect whole steps."""
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
    )


def snapshot_hyperparameters(optimizer: Optimizer) -> HyperparameterSnapshot:
    """Copy every group's hyperparameters, without its parameters."""
    return [
        {name: _copied(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    if isinstance(value, tuple) and not any(isinstance(each, _MAY_HAVE_TENSORS) for each in value):
        return value  # such as betas, in each step: a tree function would take a hundred times as long
    return tree_map_only(torch.Tensor, _clone, value) if isinstance(value, _MAY_HAVE_TENSORS) else value


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()  # a capturable optimizer's learning rate is changed in place


class DueStep:
    """A pending step: everything that it depends on besides parameters and gradients, at this moment."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.kind = kind_of(optimizer)
        self.state = attributes_of(optimizer)["state"]  # does not open the gate
        self.hyperparameters = snapshot_hyperparameters(optimizer)
        self.default_dtype = torch.get_default_dtype()
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._known = len(self.state)

    def complete(self) -> None:
        """Record that all parts are taken: new entries of the state get the order of a whole step."""
        if len(self.state) > self._known + 1:
            with torch._C.DisableTorchFunctionSubclass():
                position = {id(parameter): index for index, parameter in enumerate(self._parameters)}
                added = list(self.state)[self._known :]
                for key in sorted(added, key=lambda key: position.get(id(key), len(position))):
                    self.state[key] = self.state.pop(key)


def step_partially(due: DueStep, chosen: Sequence[ParameterGradient]) -> None:
    """Take ``due`` for ``chosen``; the rest of the optimizer stays as it is.

    Args:
        due: The step.
        chosen: Parameters with the gradients to step with; ``parameter.grad`` is restored afterwards.
    """
    by_group: dict[int, list[nn.Parameter]] = {}
    replaced: list[tuple[nn.Parameter, torch.Tensor | None]] = []
    for group, parameter, gradient in chosen:
        by_group.setdefault(group, []).append(parameter)
        if parameter.grad is not gradient:
            replaced.append((parameter, parameter.grad))
            parameter.grad = gradient
    own = attributes_of(due.optimizer)
    groups = [{**due.hyperparameters[group], "params": params} for group, params in by_group.items()]
    before = {**own, "state": due.state, "param_groups": groups}
    # The class's step, as a learning-rate schedule may wrap the instance's to count steps. The wrapper for hooks is
    # left out: there were none when the step was requested.
    step: Any = due.kind.step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    stand_in = object.__new__(due.kind)
    after = attributes_of(stand_in)
    after.update(before)
    try:
        step(stand_in)
    finally:
        # Attributes that the step sets on its optimizer, such as the result of its device check.
        noted = {name: value for name, value in after.items() if name not in before or value is not before[name]}
        noted.pop("param_groups", None)
        own.update(noted)
        for parameter, gradient_before in replaced:
            parameter.grad = gradient_before


@contextmanager
def plain_mode(device: torch.device, default_dtype: torch.dtype, *, for_all_threads: bool = True) -> Iterator[None]:
    """Restore the modes that ``optimizer.step`` would have met at the step boundary.

    A touch may happen under inference mode (validation), autocast, a default-device context, or another default type
    that Lightning sets for a forward pass; optimizer state created there would be of the wrong kind. Selective
    activation checkpointing would replay the update, tracing would record it, and transforms of ``torch.func`` forbid
    changes to tensors that they close over.

    Args:
        device: Where the parameters live.
        default_dtype: The default type at the step boundary.
        for_all_threads: Whether the default type of all threads may be set: only on the training's thread, as its
            forward pass may have set it.
    """
    with ExitStack() as stack:
        if for_all_threads and torch.get_default_dtype() is not default_dtype:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(default_dtype)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch._C._len_torch_dispatch_stack() or _modes_before_dispatch():
            stack.enter_context(_disable_current_modes())
        if _inside_a_transform():
            stack.enter_context(_outside_transforms())
        tracing = _C._get_tracing_state()
        if tracing is not None:
            stack.callback(_C._set_tracing_state, tracing)
            _C._set_tracing_state(None)
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())  # for changes to gradients; optimizers disable gradients themselves
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Within the context, ``owner`` has ``value`` as an attribute of its own."""
    attributes = object.__getattribute__(owner, "__dict__")  # does not open the gate of an optimizer
    absent = object()
    before = attributes.get(name, absent)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def followed_by(after: Callable[[], None], closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure that runs ``closure``, then ``after``, and returns the result of ``closure``."""

    def run() -> Any:
        output = closure()
        after()
        return output

    return run


@contextmanager
def deferring(optimizer: Optimizer, fit: Fit, plugin: Precision | None) -> Iterator[None]:
    """Within the context, ``optimizer.step(closure)`` runs the closure and hands the step to ``fit``.

    The Trainer's precision plugin also hands over its clipping. Attributes of the instances are replaced, as
    learning-rate schedules do with ``optimizer.step``. So precision plugins, hooks and user code see the optimizer
    itself.
    """
    own_step = optimizer.step

    def step(closure: Callable[[], Any] | None = None) -> Any:
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        fit.take_step(optimizer, own_step)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look for it
        return output

    with ExitStack() as stack:
        stack.enter_context(replaced(optimizer, "step", step))
        for name, defer in (("clip_grad_by_norm", "clip_norm"), ("clip_grad_by_value", "clip_value")):
            if getattr(type(plugin), name, None) is getattr(Precision, name):  # otherwise the user has overridden it
                stack.enter_context(replaced(plugin, name, _or_else(fit, defer, getattr(plugin, name))))
        yield


def _or_else(fit: Fit, defer: str, clip: Callable[[Optimizer, float], None]) -> Callable[[Optimizer, float], None]:
    def clip_later(optimizer: Optimizer, clip_val: float) -> None:
        if not getattr(fit.step.transforms, defer)(optimizer, clip_val):  # the step that the closure has begun
            clip(optimizer, clip_val)

    return clip_later


def loss_scale_of(strategy: DDPStrategy) -> float:
    """Return the current factor of losses, 1 without one; call it in a backward pass or when no step is pending."""
    plugin = strategy.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return 1.0 if scaler is None else float(scaler.get_scale())
