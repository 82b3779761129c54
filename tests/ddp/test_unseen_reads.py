from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.gates import is_armed
from lightning_bytescheduler.ddp.reads import UnseenReads


@pytest.fixture
def pair() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


def backward(reads: UnseenReads, *used: nn.Parameter) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    reads.before_backward()
    torch.stack([p.sum() for p in used]).sum().backward()
    return reads.after_backward()


def same(found: list[nn.Parameter], expected: list[nn.Parameter]) -> bool:
    return [id(p) for p in found] == [id(p) for p in expected]


def test_a_gradient_of_what_nobody_touched_gives_the_read_away(pair: tuple[nn.Parameter, nn.Parameter]) -> None:
    used, unused = pair
    reads = UnseenReads()
    reads.begin(2)
    reads.end([used, unused])
    stale, doubtful = backward(reads, used)
    assert same(stale, [used])
    assert not doubtful
    assert backward(reads, used, unused) == ([], [])


def test_a_gradient_that_other_ranks_contributed_is_no_read(pair: tuple[nn.Parameter, nn.Parameter]) -> None:
    used, elsewhere = pair
    reads = UnseenReads()
    reads.begin(2)
    reads.end([elsewhere])
    reads.before_backward()
    used.sum().backward()
    elsewhere.grad = torch.ones(2)  # as DDP does
    assert reads.after_backward() == ([], [])


@pytest.mark.parametrize("step", [16, 32])
def test_neighbours_are_told_apart_now_and_then(pair: tuple[nn.Parameter, nn.Parameter], step: int) -> None:
    touched, raw = pair
    reads = UnseenReads()
    reads.begin(step)
    reads.opened(pair, touched)
    assert (is_armed(touched), is_armed(raw)) == (False, True)
    reads.end()
    assert not is_armed(raw)
    stale, doubtful = backward(reads, touched, raw)
    assert not stale
    assert same(doubtful, [raw])


def test_neighbours_that_are_touched_are_no_news(pair: tuple[nn.Parameter, nn.Parameter]) -> None:
    reads = UnseenReads()
    reads.begin(16)
    reads.opened(pair, pair[0])
    pair[1].sum()
    assert not is_armed(pair[1])
    reads.end()
    assert backward(reads, *pair) == ([], [])


def test_in_other_passes_nothing_is_left_on_them(pair: tuple[nn.Parameter, nn.Parameter]) -> None:
    reads = UnseenReads()
    reads.begin(17)
    reads.opened(pair, pair[0])
    assert not is_armed(pair[1])


def test_nothing_is_left_behind(pair: tuple[nn.Parameter, nn.Parameter]) -> None:
    reads = UnseenReads()
    reads.begin(16)
    reads.opened(pair, pair[0])
    reads.close()
    assert not is_armed(pair[1])
    reads.begin(17)
    reads.end(pair)
    reads.before_backward()
    reads.close()
    assert not pair[0]._backward_hooks
