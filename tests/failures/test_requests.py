"""What any rank asks of all, rank 0 learns."""

from __future__ import annotations

import torch.distributed as dist

from lightning_bytescheduler.failures.board import Request


def test_rank_0_learns_what_another_rank_has_asked() -> None:
    store = dist.HashStore()
    first, second, third = (Request(store, rank) for rank in range(3))
    for each in (first, second, third):
        each.look()
        assert not each.known
    second.ask()
    first.look()
    assert not first.known, "it is told by the watcher's thread"
    second.look()
    first.look()
    third.look()
    assert (first.known, second.known, third.known) == (True, True, False)
    assert not first.asked


def test_rank_0_knows_at_once_what_it_has_asked() -> None:
    request = Request(dist.HashStore(), 0)
    request.ask()
    assert request.known
