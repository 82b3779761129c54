from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from lightning_bytescheduler.ddp import decided_fit
from lightning_bytescheduler.ddp.ddp_arguments import check_module
from lightning_bytescheduler.ddp.decided_fit import model_reasons, optimizer_reasons, unseen_parameters
from lightning_bytescheduler.ddp.reads import AliasDetector
from lightning_bytescheduler.exceptions import UnsupportedError


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
    """They are refused with the way out, unless they are frozen."""
    with pytest.raises(UnsupportedError, match=r"'1' has sparse gradients .*sparse=False.* or use strategy='ddp'"):
        check_module(nn.Sequential(nn.Linear(2, 2), layer))
    check_module(nn.Sequential(nn.Linear(2, 2), layer.requires_grad_(False)))


def test_weights_tied_by_assignment_are_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert model_reasons(model) == []


def test_weights_tied_by_memory_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    (reason,) = model_reasons(model)
    assert "'0.weight' and '1.weight' are different tensors over the same memory" in reason


def test_a_column_and_a_row_that_meet_share_memory() -> None:
    """The row begins behind as many elements as the column has, but before its last one."""
    matrix = torch.zeros(8, 8)
    (reason,) = model_reasons(nn.ParameterList([nn.Parameter(matrix[:, 0]), nn.Parameter(matrix[5])]))
    assert "'0' and '1' are different tensors over the same memory" in reason


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


@pytest.mark.parametrize("opaque", [scripted, traced])
def test_scripted_modules_read_unseen(opaque: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), opaque())
    assert unseen_parameters(model) == {id(p) for p in model[1].parameters()}


@pytest.mark.parametrize("opaque", [compiled, compiled_in_place])
def test_compiled_modules_are_seen(opaque: Any) -> None:
    assert unseen_parameters(nn.Sequential(nn.Linear(2, 2), opaque())) == set()


@pytest.mark.parametrize("asked", ["compiled_calls_are_seen", "aliases_are_seen"])
def test_a_pytorch_that_hides_reads_has_no_overlap(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    assert model_reasons(nn.Linear(2, 2)) == []
    monkeypatch.setattr(decided_fit, asked, lambda: False)
    (reason,) = model_reasons(nn.Linear(2, 2))
    assert f"PyTorch {torch.__version__} does not show" in reason


class Special(nn.Parameter):
    pass


def test_parameters_of_another_class_are_unseen() -> None:
    model = nn.Linear(2, 2)
    model.weight = Special(torch.zeros(2, 2))
    assert unseen_parameters(model) == {id(model.weight)}


def test_empty_parameters_and_tensors_are_no_aliases_of_each_other() -> None:
    model = nn.Linear(2, 2)
    model.empty = nn.Parameter(torch.empty(0))
    model.other = nn.Parameter(torch.empty(0))
    model.register_buffer("nothing", torch.empty(0))
    assert model_reasons(model) == []
    assert unseen_parameters(model) == set()
