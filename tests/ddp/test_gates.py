from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from lightning_bytescheduler.ddp.gates import GatedParameter, arm, can_be_gated, disarm, is_armed


class Update:
    """Adds one to a parameter at its first touch, as a due step would; a gradient is awaited only."""

    def __init__(self) -> None:
        self.touches: list[bool] = []

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        self.touches.append(gradient_only)
        disarm([parameter])
        if not gradient_only:
            with torch.no_grad():
                parameter.add_(1.0)


class StaysClosed:
    """A gate while gradients are on their way: weights may be read."""

    def __init__(self) -> None:
        self.touches: list[bool] = []

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        self.touches.append(gradient_only)


@pytest.fixture
def parameter() -> Iterator[nn.Parameter]:
    plain = nn.Parameter(torch.zeros(3, 3))
    yield plain
    disarm([plain])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def in_module(parameter: nn.Parameter) -> nn.Linear:
    layer = nn.Linear(3, 3, bias=False)
    layer.weight = parameter
    return layer


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def multiplied_in_place(parameter: nn.Parameter) -> Tensor:
    with torch.no_grad():
        return parameter.mul_(1.0)


def norms(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack(list(torch._foreach_norm(parameters)))


EYE = torch.eye(3)
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "operator": lambda p: p + 0,
    "reflected operator": lambda p: EYE + p - EYE,
    "method": lambda p: p.clone(),
    "index": lambda p: p[:],
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "list": lambda p: torch.tensor(p.tolist()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "storage": lambda p: torch.empty(0).set_(p.untyped_storage(), 0, (3, 3), (3, 1)),
    "in place": multiplied_in_place,
    "function": lambda p: F.linear(EYE, p).t(),
    "overload": lambda p: torch.ops.aten.add(p, 0),
    "keyword argument": lambda p: F.linear(EYE, weight=p).t(),
    "list argument": lambda p: torch.stack([EYE, p])[1],
    "foreach": lambda p: torch._foreach_add([p], 0)[0],
    "einsum": lambda p: torch.einsum("ij,jk->ik", EYE, p),
    "autograd function": lambda p: Double.apply(p) / 2,
    "module": lambda p: in_module(p)(EYE).t(),
    "functional call": lambda p: torch.func.functional_call(nn.Linear(3, 3, bias=False), {"weight": p}, (EYE,)).t(),
    "vmap": lambda p: torch.vmap(lambda row: row + 0)(p),
    "state dict": lambda p: in_module(p).state_dict()["weight"],
    "deepcopy": copy.deepcopy,
    "deepcopy of the module": lambda p: copy.deepcopy(in_module(p)).weight,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": saved,
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(3, 3),
    "conversion": lambda p: p.double().float(),
    "module conversion": lambda p: in_module(p).double().float().weight,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_sees_the_update(parameter: nn.Parameter, read: Callable[[nn.Parameter], Any]) -> None:
    gate = Update()
    arm([parameter], gate)
    result = read(parameter)
    assert torch.equal(result.detach(), torch.ones(3, 3))
    assert gate.touches == [False]
    assert type(parameter) is nn.Parameter


def test_writes_come_after_the_update(parameter: nn.Parameter) -> None:
    arm([parameter], Update())
    with torch.no_grad():
        parameter.copy_(torch.full((3, 3), 5.0))
    assert torch.equal(parameter, torch.full((3, 3), 5.0))


def test_text_shows_the_updated_value(parameter: nn.Parameter) -> None:
    arm([parameter], Update())
    assert "1." in repr(parameter)


def test_all_parameters_of_a_call_are_touched() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    gate = Update()
    arm(parameters, gate)
    assert norms(parameters).tolist() == pytest.approx([2**0.5] * 3)
    assert gate.touches == [False] * 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.shape,
        lambda p: p.ndim,
        lambda p: p.numel(),
        lambda p: p.device,
        lambda p: p.dtype,
        lambda p: p.is_leaf,
        lambda p: p.requires_grad,
        lambda p: isinstance(p, nn.Parameter),
        lambda p: hash(p),
        lambda p: {p: 1}[p],
    ],
)
def test_what_does_not_lead_to_the_weights_opens_nothing(parameter: nn.Parameter, ask: Callable[..., Any]) -> None:
    expected = ask(parameter)
    gate = Update()
    arm([parameter], gate)
    actual = ask(parameter)
    assert gate.touches == []
    assert type(parameter) is GatedParameter
    disarm([parameter])
    assert repr(actual) == repr(expected)


def set_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(3, 3)


def delete_gradient(parameter: nn.Parameter) -> None:
    del parameter.grad


@pytest.mark.parametrize("access", [lambda p: p.grad, set_gradient, delete_gradient])
def test_access_to_the_gradient_says_so(parameter: nn.Parameter, access: Callable[[nn.Parameter], Any]) -> None:
    gate = StaysClosed()
    arm([parameter], gate)
    access(parameter)
    assert gate.touches == [True]
    assert type(parameter) is GatedParameter


def test_a_gate_that_stays_closed_lets_functions_run(parameter: nn.Parameter) -> None:
    gate = StaysClosed()
    arm([parameter], gate)
    result = F.linear(torch.ones(1, 3), parameter) + 1
    result.sum().backward()
    assert type(result) is Tensor
    assert gate.touches
    assert is_armed(parameter)
    disarm([parameter])
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(3, 3))


def test_a_parameter_keeps_its_identity(parameter: nn.Parameter) -> None:
    module = in_module(parameter)
    seen: list[Tensor] = []
    parameter.register_hook(seen.append)
    parameter.note = "kept"  # type: ignore[attr-defined]
    optimizer = SGD([parameter], lr=1.0)
    arm([parameter], Update())
    assert module.weight is parameter
    assert optimizer.param_groups[0]["params"][0] is parameter
    module(torch.ones(1, 3)).sum().backward()
    assert type(module.weight) is nn.Parameter
    assert len(seen) == 1
    assert parameter.note == "kept"  # type: ignore[attr-defined]


def test_a_gate_can_be_taken_away_unopened(parameter: nn.Parameter) -> None:
    gate = Update()
    arm([parameter], gate)
    arm([parameter], gate)
    disarm([parameter])
    disarm([parameter])
    assert not is_armed(parameter)
    assert torch.equal(parameter, torch.zeros(3, 3))
    assert gate.touches == []


def test_the_last_gate_counts(parameter: nn.Parameter) -> None:
    first, second = Update(), Update()
    arm([parameter], first)
    arm([parameter], second)
    parameter.sum()
    assert (first.touches, second.touches) == ([], [False])


def test_a_parameter_that_lost_its_gate_becomes_plain(parameter: nn.Parameter) -> None:
    parameter.__class__ = GatedParameter
    assert parameter.sum().item() == 0.0
    assert type(parameter) is nn.Parameter


def test_parameters_of_another_class_are_left_alone() -> None:
    class Special(nn.Parameter):
        pass

    special = Special(torch.zeros(2))
    assert not can_be_gated(special)
    arm([special], Update())
    assert type(special) is Special
    assert not is_armed(special)


def test_nothing_is_kept_alive_once_the_gate_is_open() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    gate = Update()
    arm([parameter], gate)
    parameter.sum()
    references = weakref.ref(parameter), weakref.ref(gate)
    del parameter, gate
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_optimizers_choose_their_way_to_step_as_without_a_gate() -> None:
    """They ask for the exact class, on a GPU; here the list they look it up in has to do."""
    known = getattr(sys.modules[SGD.__mro__[1].__module__], "_foreach_supported_types", None)
    if known is None:
        pytest.skip("this version of PyTorch has no such list")
    assert (nn.Parameter in known) == (GatedParameter in known)


def test_a_closed_gate_does_not_show_in_the_name_of_a_class() -> None:
    module = nn.Linear(2, 2)
    plain = type(module.weight)
    arm(module.parameters(), StaysClosed())
    try:
        gated = type(module.weight)
        assert gated is not plain
        assert (gated.__name__, gated.__qualname__, repr(gated)) == (plain.__name__, plain.__qualname__, repr(plain))
    finally:
        disarm(module.parameters())
