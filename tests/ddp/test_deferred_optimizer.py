from __future__ import annotations

import functools
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_bytescheduler.ddp import deferred_optimizer
from lightning_bytescheduler.ddp.deferred_optimizer import (
    DueStep,
    close_state,
    has_step_hooks,
    is_closed,
    is_per_parameter,
    open_state,
    snapshot_hyperparameters,
    step_partially,
    wants_whole_steps,
)
from tests.support.compare import bit_differences

PER_PARAMETER: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 2},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"maximize": True},
    "Adamax": {},
    "Muon": {},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def make(name: str, options: dict[str, Any]) -> tuple[list[nn.Parameter], Optimizer]:
    """Two groups of parameters, the second with a learning rate of its own."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"this version of torch has no {name}")
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(3, 4, generator=generator)) for _ in range(6)]
    groups = [{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.03}]
    return parameters, getattr(torch.optim, name)(groups, **options)


def gradients(step: int, count: int) -> list[torch.Tensor | None]:
    """Of one step; the parameter of the step's number has none."""
    generator = torch.Generator().manual_seed(100 + step)
    return [None if i == step else torch.randn(3, 4, generator=generator) for i in range(count)]


CASES = [
    pytest.param(name, {**options, **extra}, id="-".join([name, *extra]))
    for name, options in PER_PARAMETER.items()
    for extra in ([{}, {"foreach": True}] if name not in ("Adafactor", "Muon") else [{}])
] + [pytest.param("AdamW", {"fused": True}, id="AdamW-fused")]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_in_parts_have_the_bits_of_whole_steps(name: str, options: dict[str, Any]) -> None:
    whole, whole_optimizer = make(name, options)
    parts, parts_optimizer = make(name, options)
    shuffled = random.Random(7)
    for step in range(5):
        for parameter, gradient in zip(whole, gradients(step, len(whole)), strict=True):
            parameter.grad = gradient
        whole_optimizer.step()
        due = DueStep(parts_optimizer)
        chosen = [
            (index // 4, parameter, gradient)
            for index, (parameter, gradient) in enumerate(zip(parts, gradients(step, len(parts)), strict=True))
            if gradient is not None
        ]
        shuffled.shuffle(chosen)
        cut = shuffled.randint(1, len(chosen) - 1)
        for part in (chosen[:cut], chosen[cut:]):
            step_partially(due, part)
    assert not bit_differences(whole, parts)
    assert not bit_differences(whole_optimizer.state_dict(), parts_optimizer.state_dict())


def sgd(**options: Any) -> tuple[nn.Parameter, SGD]:
    weight = nn.Parameter(torch.zeros(2))
    return weight, SGD([weight], **{"lr": 1.0, **options})


def step_once(due: DueStep, weight: nn.Parameter) -> None:
    step_partially(due, [(0, weight, torch.ones(2))])


def test_hyperparameters_are_those_of_the_snapshot() -> None:
    weight, optimizer = sgd()
    due = DueStep(optimizer)
    optimizer.param_groups[0]["lr"] = 100.0
    step_once(due, weight)
    assert weight.tolist() == [-1.0, -1.0]
    assert optimizer.param_groups[0]["lr"] == 100.0


def test_a_learning_rate_that_is_changed_in_place_is_copied() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Adam([weight], lr=torch.tensor(1.0))
    due = DueStep(optimizer)
    optimizer.param_groups[0]["lr"].fill_(100.0)
    step_once(due, weight)
    assert weight.tolist() == pytest.approx([-1.0, -1.0])


def test_containers_of_hyperparameters_are_copied() -> None:
    _, optimizer = sgd()
    optimizer.param_groups[0]["names"] = {"of one": ["a"]}
    hyperparameters = snapshot_hyperparameters(optimizer)
    optimizer.param_groups[0]["names"]["of one"].append("b")
    assert hyperparameters[0]["names"] == {"of one": ["a"]}
    assert "params" not in hyperparameters[0]


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


@pytest.mark.parametrize(
    "kind", [lambda *both: both, lambda *both: list(both), Pair, lambda one, other: defaultdict(list, x=[one, other])]
)
def test_tensors_in_containers_of_hyperparameters_are_copied(kind: Callable[..., Any]) -> None:
    _, optimizer = sgd()
    value = optimizer.param_groups[0]["betas"] = kind(torch.tensor(0.5), torch.tensor(0.25))
    copied = snapshot_hyperparameters(optimizer)[0]["betas"]
    for tensor in value["x"] if isinstance(value, dict) else value:
        tensor.fill_(0.0)
    assert type(copied) is type(value)
    assert [float(tensor) for tensor in (copied["x"] if isinstance(copied, dict) else copied)] == [0.5, 0.25]


def test_what_was_there_is_put_back() -> None:
    weight, optimizer = sgd()
    other = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [other]})
    groups, weight.grad, other.grad = optimizer.param_groups, torch.full((2,), 5.0), torch.full((2,), 7.0)
    step_once(DueStep(optimizer), weight)
    assert optimizer.param_groups is groups
    assert groups[0]["params"] == [weight]
    assert weight.grad.tolist() == [5.0, 5.0]
    assert weight.tolist() == [-1.0, -1.0]
    assert other.tolist() == [0.0, 0.0]


def test_what_was_there_is_put_back_after_an_error() -> None:
    weight, optimizer = sgd()
    groups, state, weight.grad = optimizer.param_groups, optimizer.state, None
    due = DueStep(optimizer)
    due.hyperparameters[0]["lr"] = 1j
    with pytest.raises(RuntimeError):
        step_once(due, weight)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert weight.grad is None


def test_a_schedule_does_not_count_partial_steps() -> None:
    weight, optimizer = sgd()
    LambdaLR(optimizer, lambda _: 1.0)
    calls = optimizer._opt_called if hasattr(optimizer, "_opt_called") else False
    step_once(DueStep(optimizer), weight)
    assert getattr(optimizer, "_opt_called", False) == calls


def test_a_step_opens_no_gate() -> None:
    weight, optimizer = sgd(momentum=0.5)
    flushes: list[None] = []
    close_state(optimizer, lambda: flushes.append(None))
    due = DueStep(optimizer)
    step_once(due, weight)
    step_once(due, weight)
    assert weight.tolist() == [-2.5, -2.5]
    assert is_closed(optimizer)
    assert not flushes
    open_state(optimizer)


def replace_state(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def replace_groups(optimizer: Optimizer) -> None:
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [], "lr": 100.0}]


def hook(optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("there was no hook when the step was due"))


@pytest.mark.parametrize(
    "change",
    [
        replace_state,
        replace_groups,
        hook,
        lambda optimizer: optimizer.__setstate__({"state": defaultdict(dict)}),
        lambda optimizer: optimizer.__dict__.update(state=defaultdict(dict)),
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        lambda optimizer: setattr(optimizer, "__class__", Adam),
    ],
)
def test_what_is_done_to_the_optimizer_later_does_not_reach_a_step_that_is_due(change: Any) -> None:
    weight, optimizer = sgd(momentum=0.5)
    step_once(DueStep(optimizer), weight)
    due = DueStep(optimizer)
    state = optimizer.state
    change(optimizer)
    new, groups = optimizer.state, optimizer.param_groups
    step_once(due, weight)
    assert weight.tolist() == [-2.5, -2.5], "with the momentum of the step before"
    assert state[weight]["momentum_buffer"].tolist() == [1.5, 1.5]
    assert optimizer.state is new
    assert optimizer.param_groups is groups


def test_the_groups_of_a_part_are_not_seen_outside() -> None:
    """A schedule that another thread steps during the update writes to the groups that it finds."""
    weight, optimizer = sgd()

    class Gradient(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            optimizer.param_groups[0]["lr"] = 0.25
            return super().__torch_function__(func, types, args, kwargs or {})

    step_partially(DueStep(optimizer), [(0, weight, torch.ones(2).as_subclass(Gradient))])
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_what_a_step_notes_on_its_optimizer_stays_there() -> None:
    class Counts(SGD):
        count = 0

        def _init_group(self, *args: Any) -> Any:
            self.count += 1
            return super()._init_group(*args)

    weight = nn.Parameter(torch.zeros(2))
    optimizer = Counts([weight], lr=1.0)
    due = DueStep(optimizer)
    step_once(due, weight)
    step_once(due, weight)
    assert optimizer.count == 2


def test_what_parts_add_to_the_state_has_the_order_of_a_whole_step() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    optimizer = Adam(weights)
    step_partially(DueStep(optimizer), [(0, weights[2], torch.ones(2))])
    due = DueStep(optimizer)
    for index in (3, 0, 1):
        step_partially(due, [(0, weights[index], torch.ones(2))])
    due.complete()
    assert [next(n for n, w in enumerate(weights) if w is key) for key in optimizer.state] == [2, 0, 1, 3]


@pytest.mark.parametrize("keeps_the_name", [True, False])
def test_a_class_whose_step_was_replaced_is_stepped_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, keeps_the_name: bool
) -> None:
    inner = SGD.step

    def step(self: SGD, closure: Any = None) -> Any:
        return inner(self, closure)

    _, optimizer = sgd()
    assert wants_whole_steps(optimizer) is None
    monkeypatch.setattr(SGD, "step", functools.wraps(inner)(step) if keeps_the_name else step)
    assert wants_whole_steps(optimizer)


class Own(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class OwnPart(Adam):
    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)  # type: ignore[misc]


def replaced_part(parameters: Any) -> Optimizer:
    optimizer = Adam(parameters)
    optimizer._init_group = lambda *_: False  # type: ignore[method-assign]
    return optimizer


class OwnDefaults(Adam):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)


@pytest.mark.parametrize("name", ["adam", "_single_tensor_adam"])
def test_a_function_that_steps_was_replaced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    optimizer, functions = OwnDefaults([nn.Parameter(torch.zeros(2))]), sys.modules[Adam.__module__]
    assert is_per_parameter(optimizer)
    monkeypatch.setattr(functions, name, functools.wraps(getattr(functions, name))(lambda *_, **__: None))
    assert not is_per_parameter(optimizer)


def inheriting(parent: type[AdamW]) -> type[AdamW]:
    return type("Inherits", (parent,), {})


@pytest.mark.parametrize("name", PER_PARAMETER)
def test_torchs_own_are_known(name: str) -> None:
    _, optimizer = make(name, PER_PARAMETER[name])
    assert is_per_parameter(optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.LBFGS, torch.optim.SparseAdam, partial(Own, lr=0.1), OwnPart, replaced_part],
    ids=["LBFGS", "SparseAdam", "own step", "own part of a step", "replaced part"],
)
def test_others_are_not(optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
    assert not is_per_parameter(optimizer([nn.Parameter(torch.zeros(2))]))


@pytest.mark.parametrize("parent_first", [True, False])
def test_a_subclass_that_keeps_step_is_known_whichever_is_made_first(parent_first: bool) -> None:
    # Before its first instance, a class's step carries no wrapper for hooks; whose first instance comes first decides
    # which class gets it.
    parent = inheriting(AdamW)
    child = inheriting(parent)
    weights = [nn.Parameter(torch.zeros(2))]
    if parent_first:
        parent(weights)
    assert is_per_parameter(child(weights))


def test_hooks_of_the_optimizer_and_of_all_optimizers_are_noticed() -> None:
    _, optimizer = sgd()
    assert not has_step_hooks(optimizer)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert has_step_hooks(optimizer)
        handle.remove()
        assert not has_step_hooks(optimizer)


def test_numbers_are_not_copied() -> None:
    """A snapshot is made in each step, for each group."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with patch.object(deferred_optimizer, "tree_map_only", side_effect=AssertionError("a walk")):
        assert snapshot_hyperparameters(optimizer)[0]["betas"] == (0.9, 0.999)
