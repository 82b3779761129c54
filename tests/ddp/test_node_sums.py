"""What ranks of a node give to the one that pushes: added up in the order of ranks, with nothing lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_bytescheduler.compression.dense import Dense
from lightning_bytescheduler.ddp.encoded_pieces import Piece
from lightning_bytescheduler.ddp.node_sums import given, room_for, summed

CODEC = Dense("bf16")


def pieces_of(residual: Tensor | None = None, *, idle: bool = False) -> list[Piece]:
    """Three elements that travel as they are, and five that are encoded."""
    return [Piece(0, 3, None, None), Piece(3, 8, CODEC, torch.zeros(5) if residual is None else residual, idle=idle)]


def numbers(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, generator=generator).half(), torch.randn(5, generator=generator)]


@pytest.mark.parametrize("pusher", range(3))
def test_sums_are_in_the_order_of_ranks_whoever_pushes(pusher: int) -> None:
    messages = [given(pieces_of(), numbers(rank)) for rank in range(3) if rank != pusher]
    assert {len(message) for message in messages} == {len(room_for(pieces_of(), numbers(pusher)))} == {34}
    _, sums = summed(pieces_of(), numbers(pusher), pusher, iter(messages))
    first, second, third = (numbers(rank) for rank in range(3))
    for at, total in enumerate(sums):
        assert total.dtype is first[at].dtype
        assert torch.equal(total, (first[at] + second[at]) + third[at])


def test_what_a_rank_has_left_of_what_another_pushes_goes_along() -> None:
    left = torch.arange(5.0)
    message = given(pieces_of(left), numbers(1))
    _, sums = summed(pieces_of(), numbers(0), 0, iter([message]))
    assert torch.equal(sums[1], numbers(0)[1] + (numbers(1)[1] + torch.arange(5.0)))
    assert not left.any()


@pytest.mark.parametrize(("idle", "value"), [(True, 0.0), (False, float("inf"))])
def test_what_may_not_be_applied_takes_nothing_along(idle: bool, value: float) -> None:
    """Of a parameter without a gradient no optimizer sees what travels; and what is not finite is left out."""
    left, own = torch.arange(5.0), torch.full((5,), value)
    message = given(pieces_of(left, idle=idle), [numbers(1)[0], own])
    _, sums = summed(pieces_of(), [numbers(0)[0], torch.zeros(5)], 0, iter([message]))
    assert torch.equal(sums[1], own)
    assert torch.equal(left, torch.arange(5.0))


def test_a_node_is_idle_where_all_of_its_ranks_are() -> None:
    for flags in ((True, True, True), (True, True, False), (False, True, True), (True, False, True)):
        own, *others = [pieces_of(idle=flag) for flag in flags]
        messages = [given(pieces, numbers(rank)) for rank, pieces in enumerate(others, 1)]
        found, _ = summed(own, numbers(0), 0, iter(messages))
        assert found == [replace(piece, idle=piece.codec is not None and all(flags)) for piece in own]
