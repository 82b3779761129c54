"""Functions that read parameters without touching them see the update, and none records it in its result."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_bytescheduler.ddp import entry_points as watched_at
from lightning_bytescheduler.ddp.deferred_optimizer import plain_mode
from lightning_bytescheduler.ddp.entry_points import watch_entry_points
from lightning_bytescheduler.ddp.gates import GatedParameter, arm, disarm

INPUTS = torch.linspace(-1.0, 1.0, 6).view(2, 3)
DIRECTION = torch.linspace(1.0, 2.0, 9).view(3, 3)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.eye(3))
        self.second = nn.Parameter(torch.full((3, 3), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.first @ self.second


class Update:
    """Changes a parameter in place at its first touch, as a due step does."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        arm([parameter], self)

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        disarm([self.parameter])
        with plain_mode(torch.device("cpu"), torch.float32):
            update(self.parameter)

    def open_all(self, reason: str) -> None:
        self.touched(self.parameter, gradient_only=False)


class Travels:
    """A gate while gradients are on their way: weights may be read."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        arm([parameter], self)

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        pass

    def open_all(self, reason: str) -> None:
        disarm([self.parameter])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return 2.0 * inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2.0 * gradient


class Passes:
    """Counts backward passes that it is told of."""

    count = 0

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        self.count += 1
        yield

    def before_fork(self) -> None:
        """Nothing is under way."""

    def after_fork(self, *, in_child: bool) -> None:
        """Nothing was."""


def update(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(2.0).add_(1.0)


@pytest.fixture(autouse=True)
def entry_points() -> Iterator[Callable[[], None]]:
    leave = watch_entry_points(Passes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        yield leave
    leave()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is compiled yet."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def squared(first: Tensor, second: Tensor) -> Tensor:
    return (INPUTS @ first @ second).pow(2).sum()


def loss_of(weights: dict[str, Tensor], module: Product) -> Tensor:
    return torch.func.functional_call(module, weights, (INPUTS,)).pow(2).sum()


def per_sample(module: Product) -> Any:
    weights = dict(module.named_parameters())

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(module, weights, (sample,)).pow(2).sum()

    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, INPUTS)


def pair(module: Product) -> tuple[Tensor, Tensor]:
    return module.first, module.second


def dual(module: Product) -> Tensor:
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(module.first, DIRECTION)
        return forward_ad.unpack_dual(INPUTS @ weight @ module.second).tangent


def dual_closed(module: Product) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(INPUTS, INPUTS))).tangent


jacobian = torch.autograd.functional.jacobian
TRANSFORMS: dict[str, Callable[[Product], Any]] = {
    "grad over named parameters": lambda m: torch.func.grad(loss_of)(dict(m.named_parameters()), m),
    "grad over closed weights": lambda m: torch.func.grad(lambda x: m(x).sum())(INPUTS),
    "grad over one of two": lambda m: torch.func.grad(lambda w: (INPUTS @ w @ m.second).sum())(m.first),
    "per-sample": per_sample,
    "per-sample over closed weights": lambda m: torch.vmap(torch.func.grad(lambda x: m(x).pow(2).sum()))(INPUTS),
    "vmap over closed weights": lambda m: torch.vmap(m)(INPUTS),
    "vmap over a weight": lambda m: torch.vmap(lambda row: row @ m.second)(m.first),
    "ensemble": lambda m: torch.vmap(lambda w: INPUTS @ w)(torch.stack(pair(m))),
    "jacrev": lambda m: torch.func.jacrev(squared, argnums=(0, 1))(*pair(m)),
    "jacfwd": lambda m: torch.func.jacfwd(squared, argnums=1)(*pair(m)),
    "hessian": lambda m: torch.func.hessian(squared)(*pair(m)),
    "hessian over closed weights": lambda m: torch.func.hessian(lambda x: m(x).pow(2).sum())(INPUTS),
    "jvp": lambda m: torch.func.jvp(squared, pair(m), (DIRECTION, DIRECTION)),
    "jvp over closed weights": lambda m: torch.func.jvp(m, (INPUTS,), (INPUTS,)),
    "vjp": lambda m: torch.func.vjp(squared, *pair(m))[1](torch.tensor(1.0)),
    "linearize": lambda m: torch.func.linearize(squared, *pair(m))[1](DIRECTION, DIRECTION),
    "linearize over closed weights": lambda m: torch.func.linearize(m, INPUTS)[1](INPUTS),
    "functionalize": lambda m: torch.func.functionalize(squared)(*pair(m)),
    "functionalize over closed weights": lambda m: torch.func.functionalize(m)(INPUTS),
    "autograd jacobian": lambda m: jacobian(squared, pair(m)),
    "autograd jacobian, vectorised": lambda m: jacobian(m, INPUTS, vectorize=True),
    "autograd jacobian, forward": lambda m: jacobian(m, INPUTS, vectorize=True, strategy="forward-mode"),
    "autograd hvp": lambda m: torch.autograd.functional.hvp(lambda x: m(x).pow(2).sum(), INPUTS, INPUTS),
    "dual numbers": dual,
    "dual numbers and closed weights": dual_closed,
}


def exported(module: Product) -> Tensor:
    return torch.export.export(module, (INPUTS,)).module()(INPUTS)


def saved(module: Product) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def in_a_queue(parameter: nn.Parameter) -> Tensor:
    return pickle.loads(ForkingPickler.dumps(parameter))  # what is sent shares the memory


def swapped(module: Product) -> Tensor:
    other = nn.Parameter(torch.zeros(3, 3))
    torch.utils.swap_tensors(module.first, other)
    assert type(module.first) is type(other) is nn.Parameter
    return other.detach().clone()


TRACERS: dict[str, Callable[[Product], Any]] = {
    "jit.trace": lambda m: torch.jit.trace(m, INPUTS)(INPUTS),
    "jit.script": lambda m: torch.jit.script(m)(INPUTS),
    "jit.freeze": lambda m: torch.jit.freeze(torch.jit.script(m.eval()))(INPUTS),
    "export": exported,
    "make_fx": lambda m: make_fx(m)(INPUTS)(INPUTS),
    "symbolic_trace": lambda m: torch.fx.symbolic_trace(m)(INPUTS),
    "swap_tensors": swapped,
}
COPIES: dict[str, Callable[[Product], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy of a parameter": lambda m: copy.copy(m.first),
    "deepcopy of a parameter": lambda m: copy.deepcopy(m.second),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
    "a queue": lambda m: in_a_queue(m.first),
    "state_dict": lambda m: m.state_dict(),
    "deepcopy of a state_dict": lambda m: copy.deepcopy(m.state_dict(keep_vars=True)),
    "the same class": lambda m: type(m.first)(m.first.detach().clone()),
}
COMPILED: dict[str, Callable[[Product], Any]] = {
    "module": lambda m: torch.compile(m, backend="eager", fullgraph=True)(INPUTS),
    "method": lambda m: torch.compile(m.forward, backend="eager", fullgraph=True)(INPUTS),
    "closure": lambda m: torch.compile(lambda x: m(x) + 1, backend="eager", fullgraph=True)(INPUTS),
    "arguments": lambda m: torch.compile(squared, backend="eager", fullgraph=True)(*pair(m)),
    "transform": lambda m: torch.compile(torch.func.grad(squared), backend="eager", fullgraph=True)(*pair(m)),
}


def values(result: Any) -> list[Tensor]:
    if isinstance(result, nn.Module):
        result = result.state_dict()
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    assert not [leaf for leaf in leaves if type(leaf) is GatedParameter]
    return [leaf.detach() for leaf in leaves]


def assert_sees_updates(use: Callable[[Product], Any]) -> None:
    expected, actual = Product(), Product()
    for parameter in expected.parameters():
        update(parameter)
    gates = [Update(parameter) for parameter in actual.parameters()]
    try:
        shown = values(use(actual))
    finally:
        disarm(gate.parameter for gate in gates)
    wanted = values(use(expected))
    assert len(shown) == len(wanted) > 0
    assert all(map(torch.equal, shown, wanted))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform: Callable[[Product], Any]) -> None:
    assert_sees_updates(transform)


@pytest.mark.parametrize("trace", TRACERS.values(), ids=TRACERS)
def test_tracers(trace: Callable[[Product], Any]) -> None:
    assert_sees_updates(trace)


@pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES)
def test_copies(copies: Callable[[Product], Any]) -> None:
    assert_sees_updates(copies)


@pytest.mark.parametrize("compiled", COMPILED.values(), ids=COMPILED)
def test_compiled_code(fresh: None, compiled: Callable[[Product], Any]) -> None:
    assert_sees_updates(compiled)


@pytest.mark.parametrize("use", [*COPIES.values(), *TRACERS.values()], ids=[*COPIES, *TRACERS])
def test_while_gradients_travel(use: Callable[[Product], Any]) -> None:
    """Weights may be read then, and stay gated; copies of them are plain."""
    module = Product()
    gates = [Travels(parameter) for parameter in module.parameters()]
    try:
        assert values(use(module))
    finally:
        disarm(gate.parameter for gate in gates)


def test_reading_weights_opens_nothing_that_is_not_read() -> None:
    module = Product()
    gates = [Update(parameter) for parameter in module.parameters()]
    torch.func.grad(lambda w: (INPUTS @ w).sum())(module.first)
    torch.vmap(lambda row: row * 2)(INPUTS)
    assert [type(p) for p in module.parameters()] == [nn.Parameter, GatedParameter]
    disarm(gate.parameter for gate in gates)


def test_a_step_that_is_taken_while_something_is_traced_is_no_part_of_it() -> None:
    """Even if a gate closes during tracing, which begins with all open."""
    parameter = nn.Parameter(torch.ones(2))

    def traced(inputs: Tensor) -> Tensor:
        with plain_mode(torch.device("cpu"), torch.float32):
            update(parameter)
        return inputs * 2

    graph = torch.jit.trace(traced, torch.ones(2), check_trace=False).graph
    assert torch.equal(parameter, torch.full((2,), 3.0))
    assert str(graph).count("aten::") == 1
    assert "aten::mul" in str(graph)


def test_a_step_is_not_traced() -> None:
    first, second = Product(), Product()
    gates = [Update(parameter) for parameter in first.parameters()]
    graphs = [str(torch.jit.trace(module, INPUTS).graph).count("\n") for module in (first, second)]
    disarm(gate.parameter for gate in gates)
    assert graphs[0] == graphs[1]


class Labelled(Tensor):
    """A third-party tensor class; results that involve it are of that class."""


def test_other_classes_have_their_say_while_gradients_travel() -> None:
    parameter = nn.Parameter(torch.eye(3))
    gate = Travels(parameter)
    product = torch.mm(parameter, INPUTS.t().as_subclass(Labelled))
    assert type(parameter) is GatedParameter
    disarm([gate.parameter])
    assert type(product) is Labelled


@pytest.mark.parametrize("padded", [False, True])
def test_attention_computes_what_it_computes_without_gates(padded: bool) -> None:
    """Its fast path, in evaluation mode, is for parameters of no class of their own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    inputs = torch.randn(2, 5, 8)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    with torch.no_grad():
        expected = encoder(inputs, src_key_padding_mask=mask)
        gates = [Opens(parameter) for parameter in encoder.parameters()]
        shown = encoder(inputs, src_key_padding_mask=mask)
    disarm(gate.parameter for gate in gates)
    assert shown.shape == expected.shape
    assert torch.equal(shown, expected)


class Opens(Travels):
    """A gate that opens at any touch and changes nothing."""

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        disarm([self.parameter])


def test_what_was_replaced_is_put_back(entry_points: Callable[[], None]) -> None:
    watched = torch.overrides.has_torch_function
    leave = watch_entry_points(Passes())
    assert torch.overrides.has_torch_function is watched
    leave()
    leave()
    assert torch.overrides.has_torch_function is watched
    entry_points()
    assert torch.overrides.has_torch_function is torch._C._has_torch_function


def test_a_later_replacement_by_other_code_is_left_alone(
    entry_points: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def theirs(self: nn.Module, set_to_none: bool = True) -> None:
        pass

    before = nn.Module.zero_grad
    monkeypatch.setattr(nn.Module, "zero_grad", theirs)
    entry_points()
    assert nn.Module.zero_grad is theirs
    monkeypatch.undo()
    assert nn.Module.zero_grad is before
    nn.Module.zero_grad = before.__wrapped__  # type: ignore[method-assign, attr-defined]


def test_a_function_that_other_code_put_back_does_not_call_itself(entry_points: Callable[[], None]) -> None:
    """A mock that starts in a fit and ends after it does this: the next fit finds the last one's replacement."""
    owner, name = watched_at._OWNER, watched_at._NAME
    with patch.object(owner, name):
        entry_points()
    leave = watch_entry_points(Passes())
    try:
        inputs = torch.ones(3, requires_grad=True)
        assert torch.equal(Doubled.apply(inputs), torch.full((3,), 2.0))
    finally:
        leave()
    assert vars(owner)[name] is watched_at._original


def test_passes_that_add_to_gradients_are_told_once() -> None:
    passes = Passes()
    leave = watch_entry_points(passes)
    model, inputs = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    torch.autograd.grad(model(inputs).sum(), inputs)
    assert passes.count == 0, "it adds to nothing"
    model(inputs).sum().backward()
    assert passes.count == 1
    checkpoint(model, inputs, use_reentrant=True).sum().backward()
    assert passes.count == 2, "the pass inside is a part of it"
    leave()
    model(inputs).sum().backward()
    assert passes.count == 2
