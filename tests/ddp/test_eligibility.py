from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from lightning_bytescheduler.ddp import plan
from lightning_bytescheduler.ddp.aliases import AliasDetector
from lightning_bytescheduler.ddp.plan import model_reasons, optimizer_reasons, unseen_parameters


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


def test_one_per_parameter_optimizer_keeps_the_overlap() -> None:
    assert optimizer_reasons([Adam(weights())]) == []


def test_several_groups_keep_the_overlap() -> None:
    optimizer = SGD([{"params": weights()}, {"params": weights(), "lr": 0.5}], lr=0.1)
    assert optimizer_reasons([optimizer]) == []


@pytest.mark.parametrize("count", [0, 2])
def test_not_one_optimizer(count: int) -> None:
    (reason,) = optimizer_reasons([SGD(weights(), lr=0.1) for _ in range(count)])
    assert f"{count} optimizers" in reason
    assert "one optimizer with several parameter groups keeps the overlap" in reason


def test_an_optimizer_of_whole_steps() -> None:
    (reason,) = optimizer_reasons([LBFGS(weights())])
    assert "LBFGS is not known to update each parameter on its own" in reason


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks(register: str) -> None:
    optimizer = SGD(weights(), lr=0.1)
    handle = getattr(optimizer, register)(lambda *_: None)
    (reason,) = optimizer_reasons([optimizer])
    assert "SGD has step hooks" in reason
    handle.remove()
    assert optimizer_reasons([optimizer]) == []


def test_a_plain_model_has_no_reasons() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert model_reasons(model) == []
    assert unseen_parameters(model) == set()


@pytest.mark.parametrize("layer", [nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True)])
def test_sparse_gradients(layer: nn.Module) -> None:
    (reason,) = model_reasons(nn.Sequential(nn.Linear(2, 2), layer))
    assert reason == "'1' has sparse gradients (sparse=False keeps the overlap)"


def test_weights_tied_by_assignment_are_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert model_reasons(model) == []


def test_weights_tied_by_memory_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    (reason,) = model_reasons(model)
    assert "'0.weight' and '1.weight' are different tensors over the same memory" in reason


def test_a_frozen_twin_is_no_reason_but_is_never_stale() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    assert model_reasons(model) == []
    assert id(model[0].weight) in AliasDetector(p for p in model.parameters() if p.requires_grad).find()


def compiled() -> nn.Module:
    return torch.compile(nn.Linear(2, 2), backend="eager")  # type: ignore[return-value]


def compiled_in_place() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    return layer


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))


def compiled_by_lightning() -> nn.Module:
    layer: Any = nn.Linear(2, 2)
    layer._compiler_ctx = {"compiler": "dynamo"}
    return layer


@pytest.mark.parametrize("opaque", [scripted, traced])
def test_scripted_modules_read_unseen(opaque: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), opaque())
    assert unseen_parameters(model) == {id(p) for p in model[1].parameters()}


@pytest.fixture(params=[True, False], ids=["seen", "unseen"])
def compiled_calls_are_seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether gates can be opened before compiled code is entered, which depends on the version of PyTorch."""
    monkeypatch.setattr(plan, "compiled_calls_are_seen", lambda: request.param)
    return request.param


@pytest.mark.parametrize("opaque", [compiled, compiled_in_place, compiled_by_lightning])
def test_compiled_modules_read_unseen_if_calls_are_not_seen(compiled_calls_are_seen: bool, opaque: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), opaque())
    assert unseen_parameters(model) == (set() if compiled_calls_are_seen else {id(p) for p in model[1].parameters()})


class Decorated(nn.Linear):
    @torch.compile(backend="eager")
    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


class Doubling(nn.Linear):
    def twice(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * self(inputs)


def test_so_does_a_module_with_a_decorated_method(compiled_calls_are_seen: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Decorated(2, 2))
    assert unseen_parameters(model) == (set() if compiled_calls_are_seen else {id(p) for p in model[1].parameters()})


def test_so_does_the_module_whose_method_was_compiled(compiled_calls_are_seen: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), Doubling(2, 2), nn.Linear(2, 2))
    model.compiled = torch.compile(model[1].twice, backend="eager")
    assert unseen_parameters(model) == (set() if compiled_calls_are_seen else {id(p) for p in model[1].parameters()})


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def test_a_compiled_function_that_is_handed_all_it_reads_is_no_reason() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model.loss = torch.compile(squared_error, backend="eager")
    assert unseen_parameters(model) == set()


class Special(nn.Parameter):
    pass


def test_parameters_of_another_class_are_unseen() -> None:
    model = nn.Linear(2, 2)
    model.weight = Special(torch.zeros(2, 2))
    assert unseen_parameters(model) == {id(model.weight)}


@pytest.mark.parametrize("where", ["attribute", "buffer", "list", "other module"])
def test_parameters_of_which_an_alias_is_kept_are_unseen(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a look at the modules, where PyTorch does not show who holds a memory."""
    monkeypatch.setattr(AliasDetector, "works", False)
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    alias = model[0].weight.data[0]
    if where == "buffer":
        model[0].register_buffer("alias", alias)
    elif where == "list":
        model[0].aliases = [alias]
    else:
        model[1 if where == "other module" else 0].alias = alias
    assert unseen_parameters(model) == {id(model[0].weight)}


def test_empty_parameters_and_tensors_are_no_aliases_of_each_other() -> None:
    model = nn.Linear(2, 2)
    model.empty = nn.Parameter(torch.empty(0))
    model.other = nn.Parameter(torch.empty(0))
    model.register_buffer("nothing", torch.empty(0))
    assert model_reasons(model) == []
    assert unseen_parameters(model) == set()
