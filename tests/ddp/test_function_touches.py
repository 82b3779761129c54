from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_bytescheduler.ddp import entry_points
from lightning_bytescheduler.ddp.entry_points import watch_entry_points
from lightning_bytescheduler.ddp.gates import GatedParameter, arm, disarm
from lightning_bytescheduler.ddp.reads import Reads


class Gate:
    def __init__(self) -> None:
        self.touches: list[bool] = []

    def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
        self.touches.append(gradient_only)
        disarm([parameter])


def raw_product(value: Tensor, weight: Tensor) -> Tensor:
    """As an extension that takes the memory: no PyTorch function is handed the parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return value * weight.detach()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return raw_product(value, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0] * ctx.saved_tensors[0]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor, weight: Tensor) -> Tensor:
        return raw_product(value, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    backward = Product.backward


class Once(Product):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, gradients[0] * ctx.saved_tensors[0]


class OverridesApply(Product):
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        return super().apply(*args, **kwargs)


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weights: Any) -> Tensor:
        return raw_product(value, weights["layers"][0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


OWNER, NAME = entry_points._OWNER, entry_points._NAME
kept: Callable[..., Tensor] = Product.apply
VALUE = torch.ones(3)
USES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "plain": lambda p: Product.apply(VALUE, p),
    "setup_context": lambda p: WithSetup.apply(VALUE, p),
    "once_differentiable": lambda p: Once.apply(VALUE, p),
    "overridden apply": lambda p: OverridesApply.apply(VALUE, p),
    "nested": lambda p: Nested.apply(VALUE, {"layers": (p, None)}),
}

if NAME != "apply":  # before PyTorch 2.14
    USES["kept as a function"] = lambda p: kept(VALUE, p)


def _takes_keywords() -> bool:
    try:
        WithSetup.apply(VALUE, weight=VALUE)
    except TypeError:  # PyTorch 2.6
        return False
    return True


if _takes_keywords():
    USES["setup_context, keyword"] = lambda p: WithSetup.apply(VALUE, weight=p)


def watch() -> Callable[[], None]:
    """As one fit does."""
    fit: Any = Mock(backward_pass=nullcontext)  # equal to itself alone, as a fit is
    return watch_entry_points(fit)


@pytest.fixture
def touches() -> Iterator[None]:
    leave = watch()
    yield
    leave()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_gate_opens_before_a_custom_function(touches: None, use: Callable[[nn.Parameter], Tensor]) -> None:
    parameter, gate = nn.Parameter(torch.full((3,), 2.0)), Gate()
    arm([parameter], gate)
    assert torch.equal(use(parameter).detach(), parameter.detach())
    assert gate.touches == [False]
    assert type(parameter) is nn.Parameter


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_without_it_nothing_is_seen(use: Callable[[nn.Parameter], Tensor]) -> None:
    """Proof that the test above can fail."""
    parameter, gate = nn.Parameter(torch.full((3,), 2.0)), Gate()
    arm([parameter], gate)
    use(parameter)
    assert gate.touches == []
    disarm([parameter])


def test_the_order_of_first_use_sees_it(touches: None) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    reads = Reads([first, second])
    reads.begin_forward(0.0, 1, observes=True)
    loss = (Product.apply(VALUE, second) + Product.apply(VALUE, first)).sum()
    reads.end_observing()
    loss.backward()
    reads.after_backward(1)
    assert reads.unseen == set()
    assert reads.position_of(0, [second]) < reads.position_of(0, [first])


def test_a_gate_that_stays_closed_lets_the_function_run(touches: None) -> None:
    class StaysClosed(Gate):
        def touched(self, parameter: nn.Parameter, gradient_only: bool) -> None:
            self.touches.append(gradient_only)

    parameter, gate = nn.Parameter(torch.ones(3)), StaysClosed()
    arm([parameter], gate)
    result = Product.apply(VALUE, parameter)
    result.sum().backward()
    assert type(result) is Tensor
    assert type(parameter) is GatedParameter
    disarm([parameter])
    assert parameter.grad is not None


def test_pytorch_is_left_as_it_was_when_the_last_user_ends() -> None:
    before, apply = vars(OWNER)[NAME], torch.autograd.Function.apply
    leave, leave_too = watch(), watch()
    assert (torch.autograd.Function.apply == apply) is (NAME != "apply")
    leave()
    leave()
    assert vars(OWNER)[NAME] is not before
    leave_too()
    assert vars(OWNER)[NAME] is before


def test_a_replacement_by_other_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OWNER, NAME, vars(OWNER)[NAME])
    leave = watch()
    theirs = lambda args: args  # noqa: E731
    setattr(OWNER, NAME, theirs)
    leave()
    assert vars(OWNER)[NAME] is theirs


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
def test_custom_functions_still_compile_whole(touches: None) -> None:
    compiled = torch.compile(lambda value: Double.apply(value) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(VALUE), torch.full((3,), 3.0))


@pytest.mark.filterwarnings("ignore:.*vmap.*")
def test_functorch_transforms_still_run(touches: None) -> None:
    gradient = torch.func.grad(lambda weight: WithSetup.apply(VALUE, weight).sum())(torch.ones(3))
    assert torch.equal(gradient, VALUE)


def _custom_op() -> Callable[[Tensor], Tensor]:
    @torch.library.custom_op("bytescheduler_tests::doubled", mutates_args=())
    def doubled(weight: Tensor) -> Tensor:
        return weight * 2

    return doubled


def test_operators_of_a_library_are_seen_by_themselves() -> None:
    doubled = _custom_op()
    for operator in (doubled, torch.ops.bytescheduler_tests.doubled, torch.ops.bytescheduler_tests.doubled.default):
        parameter, gate = nn.Parameter(torch.ones(3)), Gate()
        arm([parameter], gate)
        operator(parameter)
        assert gate.touches == [False]


@pytest.mark.parametrize("launch", [lambda p: p.data_ptr(), lambda p: p.untyped_storage(), lambda p: p.stride()])
def test_what_a_kernel_launcher_asks_for_is_a_touch(launch: Callable[[nn.Parameter], Any]) -> None:
    """Triton's launcher and ctypes bindings ask a tensor for its address."""
    parameter, gate = nn.Parameter(torch.ones(3)), Gate()
    arm([parameter], gate)
    launch(parameter)
    assert gate.touches == [False]
