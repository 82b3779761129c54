from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack

from lightning_bytescheduler.ddp import reads
from lightning_bytescheduler.ddp.gates import arm, disarm, is_armed
from lightning_bytescheduler.ddp.reads import AliasDetector, aliases_are_seen, references_to_memory

MAKE_ALIAS: dict[str, Callable[[nn.Module], Any]] = {
    "data": lambda module: [p.data for p in module.parameters()],
    "detach": lambda module: [p.detach() for p in module.parameters()],
    "view": lambda module: [p.view(-1) for p in module.parameters()],
    "slice": lambda module: [p.data[:1] for p in module.parameters()],
    "transposed": lambda module: [p.data.t() for p in module.parameters()],
    "state_dict": lambda module: module.state_dict(),
    "numpy": lambda module: [p.detach().numpy() for p in module.parameters()],
    "array and back": lambda module: [torch.from_numpy(p.detach().numpy()) for p in module.parameters()],
    "dlpack": lambda module: [from_dlpack(p.detach()) for p in module.parameters()],
    "parameter": lambda module: [nn.Parameter(p.data) for p in module.parameters()],
    "set_": lambda module: [torch.empty(0).set_(p.untyped_storage()) for p in module.parameters()],
    "cpu": lambda module: [p.detach().cpu().float().contiguous() for p in module.parameters()],
    "expand": lambda module: [p.data.expand(1, *p.shape) for p in module.parameters()],
}


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def found(module: nn.Module) -> int:
    return len(AliasDetector(module.parameters()).find())


def test_this_version_of_pytorch_shows_aliases() -> None:
    assert aliases_are_seen()


@pytest.mark.parametrize("make", MAKE_ALIAS.values(), ids=list(MAKE_ALIAS))
def test_an_alias_is_found_as_long_as_it_lives(make: Callable[[nn.Module], Any]) -> None:
    module = nn.Linear(4, 4)
    detector = AliasDetector(module.parameters())
    assert not detector.find()
    kept = make(module)
    assert detector.find() == {id(p) for p in module.parameters()}
    del kept
    assert not detector.find()


def test_only_what_is_held_is_found() -> None:
    module = block()
    kept = module.get_parameter("linear1.weight").data
    assert AliasDetector(module.parameters()).find() == {id(module.get_parameter("linear1.weight"))}
    del kept


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda module: module(torch.ones(2, 3, 8)).sum().backward(), id="backward"),
        pytest.param(
            lambda module: (
                checkpoint(module, torch.ones(2, 3, 8, requires_grad=True), use_reentrant=True).sum().backward()
            ),
            id="checkpoint-reentrant",
        ),
        pytest.param(
            lambda module: checkpoint(module, torch.ones(2, 3, 8), use_reentrant=False).sum().backward(),
            id="checkpoint-not-reentrant",
        ),
        pytest.param(lambda module: copy.deepcopy(module), id="deepcopy"),
        pytest.param(lambda module: module.load_state_dict(copy.deepcopy(module.state_dict())), id="load"),
        pytest.param(lambda module: module.load_state_dict(block().state_dict(), assign=True), id="load-assign"),
        pytest.param(lambda module: module.double(), id="convert"),
        pytest.param(lambda module: [p.detach().clone() for p in module.parameters()], id="clone"),
        pytest.param(lambda module: [p.tolist() for p in module.parameters()], id="tolist"),
        pytest.param(lambda module: nn.utils.parameters_to_vector(module.parameters()), id="to-vector"),
        pytest.param(lambda module: Adam(module.parameters()).step(), id="optimizer"),
    ],
)
def test_use_leaves_no_alias(use: Callable[[Any], Any]) -> None:
    module = block()
    kept = use(module)
    assert not found(module)
    del kept


def test_gradients_are_no_aliases() -> None:
    module = block()
    module(torch.ones(2, 3, 8)).sum().backward()
    gradients = [p.grad for p in module.parameters()]
    assert not found(module)
    assert all(gradient is not None for gradient in gradients)


def test_a_tied_parameter_is_no_alias_of_itself() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    assert not found(nn.Sequential(one, other))


def test_parameters_in_one_memory_are_no_aliases_of_each_other() -> None:
    """As an LSTM's on a GPU."""
    flat = torch.zeros(24)
    parts = [nn.Parameter(flat[start : start + 8]) for start in (0, 8, 16)]
    del flat
    detector = AliasDetector(parts)
    assert not detector.find()
    kept = parts[1].data
    assert detector.find() == {id(p) for p in parts}
    del kept


def test_a_memory_that_was_flattened_later_and_is_kept() -> None:
    module = nn.Linear(4, 4)
    detector = AliasDetector(module.parameters())
    vector = torch.zeros(20)
    nn.utils.vector_to_parameters(vector, module.parameters())
    assert len(detector.find()) == 2
    del vector
    assert not detector.find()


def test_looking_opens_no_gate() -> None:
    module = nn.Linear(4, 4)
    touches: list[nn.Parameter] = []

    class Gate:
        def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
            touches.append(parameter)
            disarm((parameter,))

    detector = AliasDetector(module.parameters())
    kept = module.weight.data
    arm(module.parameters(), Gate())
    try:
        assert detector.find() == {id(module.weight)}
        assert all(map(is_armed, module.parameters()))
        assert not touches
    finally:
        disarm(module.parameters())
    del kept


def test_parameters_without_a_memory_of_their_own_are_left_out() -> None:
    class Labelled(nn.Parameter):
        pass

    empty, other_class = nn.Parameter(torch.empty(0)), Labelled(torch.zeros(3))
    kept = [empty.data, other_class.data]
    assert not AliasDetector([empty, other_class]).find()
    del kept


def test_references_are_found_where_pytorch_has_no_function_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(3)
    kept = [tensor.detach() for _ in range(5)]
    by_function = references_to_memory(tensor)
    monkeypatch.setattr(reads, "_use_count", reads._read_count)
    assert references_to_memory(tensor) == by_function
    parameter = nn.Parameter(tensor)
    assert aliases_are_seen()
    assert AliasDetector([parameter]).find() == {id(parameter)}
    del tensor
    kept.clear()
    assert not AliasDetector([parameter]).find()


def test_a_pytorch_that_counts_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_use_count", lambda _: 1)
    parameter = nn.Parameter(torch.zeros(3))
    kept = parameter.data
    assert not aliases_are_seen()
    assert not AliasDetector([parameter]).find()
    del kept


FOREIGN: dict[str, Callable[[], torch.Tensor]] = {
    "array": lambda: torch.from_numpy(np.zeros(3)),
    "buffer": lambda: torch.frombuffer(bytearray(12), dtype=torch.float32),
    "dlpack": lambda: from_dlpack(np.zeros(3)),
    "shared": lambda: torch.zeros(3).share_memory_(),
}
OWN: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3),
    "copy of an array": lambda: torch.tensor(np.zeros(3)),
    "copy of what is shared": lambda: copy.deepcopy(torch.zeros(3).share_memory_()),
    "clone": lambda: torch.from_numpy(np.zeros(3)).clone(),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=list(FOREIGN))
def test_memory_of_others_counts_as_held(make: Callable[[], torch.Tensor]) -> None:
    parameter = nn.Parameter(make())
    assert AliasDetector([parameter]).find() == {id(parameter)}
    parameter.data = parameter.data.clone()
    assert not AliasDetector([parameter]).find()


@pytest.mark.parametrize("make", OWN.values(), ids=list(OWN))
def test_memory_of_pytorch_itself_does_not(make: Callable[[], torch.Tensor]) -> None:
    assert not AliasDetector([nn.Parameter(make())]).find()


def test_what_was_loaded_is_foreign_only_where_a_file_is_mapped(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")
    for mapped in (False, True):
        module = nn.Linear(3, 3)
        module.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=mapped), assign=True)
        assert found(module) == (2 if mapped else 0)
