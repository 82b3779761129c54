"""What is sent together, and what becomes of it when another rank fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.gradients.merged_buckets import MergedBuckets

CPU = torch.device("cpu")


class Work:
    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


class Group:
    """Two ranks, of which the other sends when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Work]] = []

    def size(self) -> int:
        return 2

    def allreduce(self, buffers: list[torch.Tensor]) -> Work:
        self.sent.append((len(buffers), Work()))
        return self.sent[-1][1]

    allreduce_coalesced = allreduce


@pytest.mark.parametrize(("merges", "messages"), [(True, [2, 2]), (False, [1, 1, 1, 1])])
def test_neighbours_travel_together_unless_their_size_was_chosen(merges: bool, messages: list[int]) -> None:
    group: Any = Group()
    merged = MergedBuckets(group, CPU, merges=merges)
    buffers = [torch.full((200_000,), 2.0) for _ in range(4)]
    futures = [merged.reduce(buffer, last=number == 3) for number, buffer in enumerate(buffers)]
    assert [count for count, _ in group.sent] == messages
    assert merged.under_way
    for _, work in group.sent:
        work.future.set_result(None)
    assert all(future.value() is buffer for future, buffer in zip(futures, buffers, strict=True))
    assert all((buffer == 1.0).all() for buffer in buffers)
    assert not merged.under_way


def test_a_failure_elsewhere_wakes_whoever_waits() -> None:
    group: Any = Group()
    merged = MergedBuckets(group, CPU, merges=False)
    arrived, open_ = (merged.reduce(torch.ones(4), last=False) for _ in range(2))
    group.sent[0][1].future.set_result(None)
    merged.fail(RankFailedError(1, "boom"))
    assert torch.equal(arrived.wait(), torch.full((4,), 0.5))
    late = merged.reduce(torch.ones(4), last=True)
    for future in (open_, late):
        with pytest.raises(RankFailedError, match="boom"):
            future.wait()
    assert len(group.sent) == 2, "nothing more is sent"
    group.sent[1][1].future.set_result(None)  # what arrives after all does no harm
    assert not merged.under_way
