from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bytescheduler.ddp.gates import is_armed
from lightning_bytescheduler.ddp.reads import Reads


class Backwards(nn.Module):
    """Registers its layers in the reverse of the order of use, and one that it does not use."""

    unused: Any
    second: Any
    first: Any

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.first = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Any:
        return self.second(self.first(inputs))


def begin(reads: Reads, unseen: set[int] | None = None) -> None:
    reads.unseen |= unseen or set()
    reads.begin_forward(0.0, 1, observes=True)


def observe(reads: Reads, module: nn.Module, unseen: set[int] | None = None) -> None:
    begin(reads, unseen)
    loss = module(torch.ones(1, 2)).sum()
    reads.end_observing()
    loss.backward()


def read_unseen(reads: Reads) -> set[int]:
    """What the backward pass shows to have been read unseen."""
    before = set(reads.unseen)
    reads.after_backward(1)
    return reads.unseen - before


def position(reads: Reads, parameters: Iterable[nn.Parameter]) -> int:
    """That of a bucket of which nothing else is known."""
    return reads.position_of(0, parameters)


def test_the_order_is_that_of_use() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    observe(reads, module)
    assert [position(reads, [p]) for p in module.first.parameters()] == [0, 1]
    assert [position(reads, [p]) for p in module.second.parameters()] == [2, 3]


def test_what_was_not_used_comes_last_in_the_order_of_registration() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    observe(reads, module)
    last = [position(reads, [p]) for p in module.unused.parameters()]
    assert last == sorted(last)
    assert last[0] > position(reads, [module.second.bias])


def test_a_bucket_is_as_urgent_as_its_most_urgent_parameter() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    observe(reads, module)
    assert position(reads, [module.unused.weight, module.second.bias, module.first.bias]) == 1


def test_before_any_pass_the_order_is_that_of_registration() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    assert [position(reads, [p]) for p in module.parameters()] == list(range(6))


def test_no_gate_is_left_behind() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    begin(reads)
    assert all(is_armed(p) for p in module.parameters())
    reads.end_observing()
    assert not any(is_armed(p) for p in module.parameters())
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_one_pass_is_observed() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    observe(reads, module)
    module.first, module.second = module.second, module.first
    begin(reads)
    assert not any(is_armed(p) for p in module.parameters())
    reads.end_observing()
    assert position(reads, module.second.parameters()) == 0


def test_a_pass_that_uses_nothing_does_not_count() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    begin(reads)
    reads.end_observing()
    observe(reads, module)
    assert position(reads, module.first.parameters()) == 0


def test_gates_of_others_are_left_closed() -> None:
    """A pass that used nothing may have left updates on their way."""
    module = Backwards()
    reads, other = Reads(module.parameters()), Reads([module.second.weight])
    begin(other)
    begin(reads)
    module.first(torch.ones(1, 2))
    reads.end_observing()
    assert is_armed(module.second.weight)
    assert not is_armed(module.second.bias)
    other.end_observing()


def test_access_to_a_gradient_is_no_use() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    begin(reads)
    assert module.unused.weight.grad is None
    module(torch.ones(1, 2))
    reads.end_observing()
    assert position(reads, [module.first.weight]) == 0


def test_nothing_was_read_unseen_in_a_plain_module() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    observe(reads, module)
    assert read_unseen(reads) == set()


class Extension(Backwards):
    """Reads one weight as code that takes its memory does."""

    def forward(self, inputs: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            inputs = inputs + self.unused.bias
        return super().forward(inputs)


def test_a_gradient_without_a_touch_gives_a_silent_read_away() -> None:
    module = Extension()
    reads = Reads(module.parameters())
    observe(reads, module)
    assert read_unseen(reads) == {id(module.unused.bias)}
    assert read_unseen(reads) == set()


def test_what_is_read_unseen_is_most_urgent() -> None:
    module = Extension()
    reads = Reads(module.parameters())
    observe(reads, module)
    read_unseen(reads)
    assert position(reads, [module.unused.bias]) < position(reads, [module.first.weight])


def test_parameters_known_to_be_unseen_are_left_alone_and_most_urgent() -> None:
    module = Backwards()
    reads = Reads(module.parameters())
    known = {id(module.second.weight)}
    begin(reads, known)
    assert not is_armed(module.second.weight)
    assert is_armed(module.second.bias)
    reads.end_observing()
    assert position(reads, [module.second.weight]) < 0
    observe(reads, module, known)
    assert position(reads, [module.second.weight]) < position(reads, [module.first.weight]) == 0
    assert read_unseen(reads) == set()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks
def test_reads_of_compiled_code_are_told_apart() -> None:
    if torch.__version__ < "2.7":
        pytest.skip(
            "Dynamo of this version leaves code that meets a gate uncompiled, so there is nothing to tell apart"
        )
    module = Backwards()
    product = torch.compile(lambda inputs, weight: inputs @ weight, backend="eager")
    reads = Reads(module.parameters())
    begin(reads)
    loss = product(module(torch.ones(1, 2)), module.unused.weight).sum()
    reads.end_observing()
    loss.backward()
    assert read_unseen(reads) == {id(module.unused.weight)}
