"""What is sent together, who waits for it, and what becomes of it when another rank fails."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_bytescheduler.ddp.merged_buckets import MergedBuckets, merged_bytes
from lightning_bytescheduler.ddp.steps import BucketFutures
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.tuning.sizes import LinkEstimate
from tests.support.waiting import WAIT, until

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 1024 * 1024


class Work:
    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.waited_for = threading.Event()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited_for.set()
        if not self.future.done():
            threading.Event().wait(0.001)
            raise RuntimeError("the slice ran out")
        self.future.value()


class Group:
    """Two ranks, of which the other sends when it is told to, or at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.sent: list[tuple[int, Work]] = []

    def size(self) -> int:
        return 2

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "nccl")

    def allreduce(self, buffers: list[torch.Tensor]) -> Work:
        work = Work()
        if self.at_once:
            work.future.set_result(None)
        self.sent.append((len(buffers), work))
        return work

    allreduce_coalesced = allreduce


def merged_on(group: Any, device: torch.device, *, limit: int) -> MergedBuckets:
    """As on that device, but with futures that this build of torch has."""
    return MergedBuckets(group, device, BucketFutures(CPU), limit=limit)


@pytest.mark.parametrize(
    ("limit", "messages"), [(25 * MIB, [2, 2]), (MIB, [2, 2]), (700_000, [1, 1, 1, 1]), (0, [1, 1, 1, 1])]
)
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_neighbours_travel_together_unless_they_are_large(
    device: torch.device, limit: int, messages: list[int]
) -> None:
    group: Any = Group(at_once=True)
    merged = merged_on(group, device, limit=limit)
    buffers = [torch.full((200_000,), 2.0) for _ in range(4)]
    futures = [merged.reduce(buffer, index=number, last=number == 3) for number, buffer in enumerate(buffers)]
    assert [count for count, _ in group.sent] == messages
    assert all(future.value() is buffer for future, buffer in zip(futures, buffers, strict=True))
    assert all((buffer == 1.0).all() for buffer in buffers)
    assert not merged.under_way


class NeverKnown:
    """What this rank counts, where another one fails before it has said its number."""

    known = False

    def wait(self, failure: Any) -> None:
        raise failure() or AssertionError("nobody would end this wait")


def test_numbers_that_never_come_are_not_waited_for() -> None:
    """The other rank failed before this pass began: nothing ends this step but what ended the scheduler."""
    group, weight = cast(Any, Group(at_once=True)), cast(Any, NeverKnown())
    gone = RankFailedError(1, "it is gone")
    merged = MergedBuckets(group, CPU, BucketFutures(CPU), limit=0, weight=weight, failure=lambda: gone)
    with pytest.raises(RankFailedError):
        merged.reduce(torch.ones(4), index=0, last=True)


def test_on_a_gpu_ddp_waits() -> None:
    group: Any = Group()
    merged = merged_on(group, GPU, limit=0)
    futures = [merged.reduce(torch.ones(4), index=number, last=number == 1) for number in range(2)]
    assert merged.under_way
    assert not any(future.done() for future in futures)
    for _, work in group.sent:
        work.future.set_result(None)
    assert all(future.done() for future in futures)
    assert not merged.under_way
    assert merged.hideable_s == math.inf, "nobody knows"


def test_on_a_cpu_the_last_hook_waits_for_all() -> None:
    group: Any = Group()
    merged = merged_on(group, CPU, limit=0)
    assert merged.reduce(torch.ones(4), index=0, last=False).done(), "DDP waits for nothing"
    assert merged.under_way
    done: list[Any] = []
    last = threading.Thread(target=lambda: done.append(merged.reduce(torch.ones(4), index=1, last=True)))
    last.start()
    assert group.sent[0][1].waited_for.wait(WAIT)
    group.sent[0][1].future.set_result(None)
    until(lambda: len(group.sent) == 2)
    assert group.sent[1][1].waited_for.wait(WAIT)
    assert not done
    group.sent[1][1].future.set_result(None)
    last.join(WAIT)
    assert done
    assert not merged.under_way
    assert 0 <= merged.hideable_s < math.inf


def test_a_failure_elsewhere_wakes_whoever_waits() -> None:
    group: Any = Group()
    merged = merged_on(group, GPU, limit=0)
    arrived, open_ = (merged.reduce(torch.ones(4), index=number, last=False) for number in range(2))
    group.sent[0][1].future.set_result(None)
    merged.fail(RankFailedError(1, "boom"))
    assert torch.equal(arrived.wait(), torch.full((4,), 0.5))
    late = merged.reduce(torch.ones(4), index=2, last=True)
    for future in (open_, late):
        with pytest.raises(RankFailedError, match="boom"):
            future.wait()
    assert len(group.sent) == 2, "nothing more is sent"
    group.sent[1][1].future.set_result(None)  # what arrives after all does no harm
    assert not merged.under_way


def test_a_failure_elsewhere_wakes_the_last_hook() -> None:
    group: Any = Group()
    merged = merged_on(group, CPU, limit=0)
    raised: list[BaseException] = []

    def hook() -> None:
        try:
            merged.reduce(torch.ones(4), index=0, last=True)
        except RankFailedError as error:
            raised.append(error)

    waiting = threading.Thread(target=hook)
    waiting.start()
    until(lambda: bool(group.sent))
    assert group.sent[0][1].waited_for.wait(WAIT)
    merged.fail(RankFailedError(1, "boom"))
    waiting.join(WAIT)
    assert len(raised) == 1
    with pytest.raises(RankFailedError, match="boom"):
        merged.reduce(torch.ones(4), index=1, last=True)
    assert len(group.sent) == 1, "nothing more is sent"


def test_what_fails_itself_is_said() -> None:
    group: Any = Group()
    merged = merged_on(group, CPU, limit=0)
    merged.reduce(torch.ones(4), index=0, last=False)
    group.sent[0][1].future.set_exception(ValueError("connection closed"))  # type: ignore[arg-type]
    group.at_once = True
    with pytest.raises(ValueError, match="connection closed"):
        merged.reduce(torch.ones(4), index=1, last=True)


@pytest.mark.parametrize(
    ("device", "link", "expected"),
    [
        (GPU, None, 25 * MIB),
        (GPU, LinkEstimate(alpha=1e-4, beta=1e-9), 25 * MIB),
        (CPU, None, MIB),
        (CPU, LinkEstimate(alpha=1e-4, beta=1e-8), MIB),
        (CPU, LinkEstimate(alpha=2e-4, beta=1e-9), 2_000_000),
        (CPU, LinkEstimate(alpha=2e-2, beta=1.6e-8), 12_500_000),
        (CPU, LinkEstimate(alpha=1.0, beta=1e-9), 25 * MIB),
    ],
)
def test_messages_are_as_large_as_their_start_up_asks_for(
    device: torch.device, link: LinkEstimate | None, expected: int
) -> None:
    assert merged_bytes(device, link) == pytest.approx(expected, abs=1)
