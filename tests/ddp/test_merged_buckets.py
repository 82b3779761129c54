"""What is sent together, who waits for it, and what becomes of it when another rank fails."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_bytescheduler.ddp.fit_report import Record
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.ddp.steps import MergedStep, merged_bytes
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures.standstill import BATCH, wait_of
from lightning_bytescheduler.tuning.sizes import LinkEstimate
from tests.support.waiting import WAIT, until

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 1024 * 1024


class Work:
    """Ends when its future does; to wait for it without a limit blocks a stream, not the host, as on NCCL."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.waited_for = threading.Event()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def is_completed(self) -> bool:
        return self.future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited_for.set()
        if timeout is None and not self.future.done():
            return
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


def merged_on(group: Any, device: torch.device, *, limit: int, **more: Any) -> MergedStep:
    fit: Any = SimpleNamespace(
        device=device,
        own_failure=more.get("failure", lambda: None),
        record=more.get("record", Record()),
        reduction=lambda number, overlaps: None,
        static_graph=False,
        weight=more.get("weight", StepWeight(2)),
        weights=SimpleNamespace(by_samples="weight" in more),
        wire=SimpleNamespace(route=SimpleNamespace(group=group, streams=None, wire_share=1.0)),
    )
    return MergedStep(fit, 2, limit=limit)


def send(merged: MergedStep, *buffers: torch.Tensor) -> None:
    for buffer in buffers:
        merged._send(cast(Any, None), buffer)


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
    send(merged, *buffers)
    merged._await_all()
    assert [count for count, _ in group.sent] == messages
    assert all((buffer == 1.0).all() for buffer in buffers)
    assert not merged.under_way


class NeverKnown:
    """What this rank counts, where another one fails before it has said its number."""

    def wait(self, failure: Any) -> None:
        raise failure() or AssertionError("nothing would end this wait")


def test_numbers_that_never_come_are_not_waited_for() -> None:
    """The other rank failed before this pass began: nothing ends this step but what ended the scheduler."""
    group, weight = cast(Any, Group(at_once=True)), cast(Any, NeverKnown())
    gone = RankFailedError(1, "it is gone")
    merged = merged_on(group, CPU, limit=0, weight=weight, failure=lambda: gone)
    with pytest.raises(RankFailedError):
        send(merged, torch.ones(4))
    assert not group.sent


@pytest.mark.parametrize(("at_the_end", "exposed"), [(False, 3.0), (True, 0.0)])
def test_a_wait_for_other_ranks_samples_is_no_computing(at_the_end: bool, exposed: float) -> None:
    """Batches are shared out by what each rank computes. The wait at the end of a pass is counted as a whole."""
    now, said = [1.0], []

    def wait(failure: Any) -> None:
        now.append(now[-1] + 3.0)
        said.append(wait_of(threading.get_ident()))

    weight: Any = SimpleNamespace(factor=0.5, wait=wait)
    record, group = Record(clock=lambda: now[-1]), cast(Any, Group(at_once=True))
    merged = merged_on(group, CPU, limit=0, weight=weight, record=record)
    merged.waits_from = now[-1] if at_the_end else 0.0
    send(merged, torch.ones(4), torch.ones(4))
    assert len(said) == 1, "it is known for all messages of the step"
    assert said[0] is not None
    assert said[0] == BATCH, "a rank that waits for one with fewer batches is found out by that"
    assert record.statistics.exposed_s == exposed


def test_on_a_gpu_the_stream_waits() -> None:
    group: Any = Group()
    merged = merged_on(group, GPU, limit=0)
    send(merged, torch.ones(4), torch.ones(4))
    assert merged._await_all() == math.inf, "the host cannot know"
    assert all(work.waited_for.is_set() for _, work in group.sent)
    assert merged.under_way
    for _, work in group.sent:
        work.future.set_result(None)
    assert not merged.under_way


def test_on_a_cpu_the_host_waits_for_all() -> None:
    group: Any = Group()
    merged = merged_on(group, CPU, limit=0)
    send(merged, torch.ones(4), torch.ones(4))
    assert merged.under_way
    done: list[float] = []
    last = threading.Thread(target=lambda: done.append(merged._await_all()))
    last.start()
    assert group.sent[0][1].waited_for.wait(WAIT)
    group.sent[0][1].future.set_result(None)
    assert group.sent[1][1].waited_for.wait(WAIT)
    assert not done
    group.sent[1][1].future.set_result(None)
    last.join(WAIT)
    assert not merged.under_way
    assert 0 <= done[0] < math.inf


def test_a_failure_elsewhere_wakes_the_last_hook() -> None:
    group: Any = Group()
    failures: list[BaseException] = []
    merged = merged_on(group, CPU, limit=0, failure=lambda: next(iter(failures), None))
    raised: list[BaseException] = []

    def hook() -> None:
        try:
            send(merged, torch.ones(4))
            merged._await_all()
        except RankFailedError as error:
            raised.append(error)

    waiting = threading.Thread(target=hook)
    waiting.start()
    until(lambda: bool(group.sent))
    assert group.sent[0][1].waited_for.wait(WAIT)
    failures.append(RankFailedError(1, "boom"))
    waiting.join(WAIT)
    assert len(raised) == 1
    with pytest.raises(RankFailedError, match="boom"):
        send(merged, torch.ones(4))
    assert len(group.sent) == 1, "nothing more is sent"


def test_what_fails_itself_is_said() -> None:
    group: Any = Group()
    merged = merged_on(group, CPU, limit=0)
    send(merged, torch.ones(4))
    group.sent[0][1].future.set_exception(ValueError("connection closed"))  # type: ignore[arg-type]
    group.at_once = True
    send(merged, torch.ones(4))
    with pytest.raises(ValueError, match="connection closed"):
        merged._await_all()


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
