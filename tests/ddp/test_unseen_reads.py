from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.gates import is_armed
from lightning_bytescheduler.ddp.reads import Reads

Pair = tuple[nn.Parameter, nn.Parameter]


class Told:
    """Takes what the user is told."""

    def __init__(self) -> None:
        self.late: list[nn.Parameter] = []

    def read_unseen(self, parameters: list[nn.Parameter], step: int) -> None:
        self.late.extend(parameters)


@pytest.fixture
def pair() -> Pair:
    return nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


def reads_of(pair: Pair, *, step: int) -> Reads:
    """Those of two parameters, in the forward pass of a step after the first one, which touched both."""
    reads = Reads(pair)
    reads.begin_forward(0.0, 1, observes=True)
    for parameter in pair:
        parameter.sum()
    end_forward(reads)
    reads.begin_forward(0.0, step, observes=True)
    return reads


def end_forward(reads: Reads, untouched: Iterable[nn.Parameter] = ()) -> None:
    reads.end_observing()
    reads.end_forward(untouched)


def backward(reads: Reads, *used: nn.Parameter) -> Told:
    told: Any = Told()
    reads.seen = told
    reads.before_backward()
    torch.stack([p.sum() for p in used]).sum().backward()
    reads.after_backward(2)
    return told  # type: ignore[no-any-return]


def same(found: list[nn.Parameter], expected: list[nn.Parameter]) -> bool:
    return [id(p) for p in found] == [id(p) for p in expected]


def test_a_gradient_of_an_untouched_parameter_gives_the_read_away(pair: Pair) -> None:
    used, unused = pair
    reads = reads_of(pair, step=2)
    end_forward(reads, [used, unused])
    told = backward(reads, used)
    assert same(told.late, [used])
    assert reads.unseen == {id(used)}
    told = backward(reads, used, unused)
    assert not told.late


def test_a_gradient_that_other_ranks_contributed_is_no_read(pair: Pair) -> None:
    used, elsewhere = pair
    reads = reads_of(pair, step=2)
    end_forward(reads, [elsewhere])
    reads.before_backward()
    used.sum().backward()
    elsewhere.grad = torch.ones(2)  # as DDP does
    reads.after_backward(2)
    assert not reads.unseen


@pytest.mark.parametrize("step", [16, 32])
def test_neighbours_are_told_apart_now_and_then(pair: Pair, step: int) -> None:
    touched, raw = pair
    reads = reads_of(pair, step=step)
    reads.opened([*pair], touched)
    assert (is_armed(touched), is_armed(raw)) == (False, True)
    end_forward(reads)
    assert not is_armed(raw)
    told = backward(reads, touched, raw)
    assert same(told.late, [raw])


def test_neighbours_that_are_touched_are_no_news(pair: Pair) -> None:
    reads = reads_of(pair, step=16)
    reads.opened([*pair], pair[0])
    pair[1].sum()
    assert not is_armed(pair[1])
    end_forward(reads)
    told = backward(reads, *pair)
    assert not told.late


def test_in_other_passes_nothing_is_left_on_them(pair: Pair) -> None:
    reads = reads_of(pair, step=17)
    reads.opened([*pair], pair[0])
    assert not is_armed(pair[1])


def test_nothing_is_left_behind(pair: Pair) -> None:
    reads = reads_of(pair, step=16)
    reads.opened([*pair], pair[0])
    reads.close()
    assert not is_armed(pair[1])
    reads.begin_forward(0.0, 17, observes=True)
    end_forward(reads, pair)
    reads.before_backward()
    reads.close()
    assert not pair[0]._backward_hooks
