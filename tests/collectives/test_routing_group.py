"""Collectives of DDP's group on a GPU that is not there; with real processes over gloo: ``parity/test_routed.py``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from lightning_bytescheduler.collectives import routing_group
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.scheduler import ByteCore, CommTask, MixedOrder
from tests.support.fake_device import FakeBuffer, FakeDevice, FakeGroup, FakeStream
from tests.support.waiting import WAIT, until


class Ended:
    """A work on the group of reports."""

    def is_completed(self) -> bool:
        return True


class Routed:
    """A routing group over one that is not there, and what it needs."""

    def __init__(self, device: FakeDevice, *, timeout: float = WAIT) -> None:
        self.order = MixedOrder()
        self.core = ByteCore(partition_size=10, credit=10, order=self.order)
        self.carrier = FakeGroup(device, "nccl")
        default = SimpleNamespace(
            rank=lambda: 0,
            size=lambda: 2,
            bound_device_id=None,
            _device_types=[],
            _get_backend=lambda _: SimpleNamespace(name=lambda: "nccl"),
        )
        self.group: Any = RoutingGroup(
            cast("Any", default),
            cast("Any", self.carrier),
            cast("Any", SimpleNamespace(barrier=Ended)),
            core=self.core,
            order=self.order,
            device=torch.device("cuda"),
            on_error=pytest.fail,
            timeout=timeout,
            cuda=device,
        )
        self.group.in_order = True

    def all_have_called(self, count: int) -> None:
        self.core.update_order(lambda: self.order.submitted_everywhere(count))

    def close(self) -> None:
        self.core.shutdown(timeout=WAIT, drain=False)
        self.group.uninstall(failed=True, timeout=WAIT)


def reduced(seed: int) -> float:
    """What the training stream reads behind an all-reduce of what it has written before."""
    device = FakeDevice(seed)
    routed = Routed(device)
    buffer, read = FakeBuffer(device), FakeBuffer(device)
    for _ in range(3):
        buffer.do(lambda value: value + 1)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(routed.group.allreduce, [buffer])
        until(lambda: routed.group._foreign.submitted == 1)
        assert not routed.carrier.works
        routed.all_have_called(1)
        work = called.result(WAIT)
    assert work.wait()
    read.do(lambda _: buffer.value)
    with device:
        until(device.idle)
    routed.close()
    return read.value


def test_streams_wait_for_what_was_written_and_for_the_result() -> None:
    assert [reduced(seed) for seed in range(12)] == [6.0] * 12


def test_without_that_wait_the_result_is_another_one() -> None:
    waits: Callable[..., None] = FakeStream.wait_event

    def hurried(stream: FakeStream, event: Any) -> None:
        if stream.name != "stream 2":  # that of launches: the communicator's is the first
            waits(stream, event)

    with patch.object(FakeStream, "wait_event", hurried):
        assert any(reduced(seed) != 6.0 for seed in range(200)), "in no order of kernels, though one is soon found"


def test_the_host_waits_for_a_turn_only_as_long_as_there_is_hope() -> None:
    routed = Routed(FakeDevice(0), timeout=0.2)
    with pytest.raises(SchedulerTimeoutError, match=r"'allreduce 1'"):
        routed.group.allreduce([FakeBuffer(FakeDevice(0))])
    routed.core.abort(RankFailedError(1, "it is gone"))
    with pytest.raises(RankFailedError, match="it is gone"):
        routed.group.allreduce([FakeBuffer(FakeDevice(0))])
    assert not routed.carrier.works
    routed.close()


def test_what_a_call_is_refused_for_is_told_to_the_caller_alone() -> None:
    device = FakeDevice(0)
    routed = Routed(device)
    routed.all_have_called(2)
    with pytest.raises(TypeError):
        routed.group.allreduce(None)
    assert routed.group.allreduce([FakeBuffer(device)]).wait()
    routed.close()


def test_what_waits_for_its_turn_or_went_out_directly_is_under_way() -> None:
    routed = Routed(FakeDevice(0))
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(routed.group.allreduce, [FakeBuffer(FakeDevice(0))])
        until(lambda: routed.group._foreign.submitted == 1)
        assert not routed.group.idle, "it is launched later"
        routed.core.abort(RankFailedError(1, "it is gone"))
        with pytest.raises(RankFailedError):
            called.result(WAIT)
    routed.close()
    assert not routed.group.idle
    device = FakeDevice(0)
    direct = Routed(device)
    direct.group.in_order = False
    assert direct.group.idle
    work = direct.group.allreduce([FakeBuffer(device)])
    assert not direct.group.idle
    with device:
        until(work.is_completed)
    assert direct.group.idle
    direct.close()


def test_a_call_that_starts_nothing_leaves_nothing_under_way() -> None:
    """A backend may do so for a call without tensors."""
    direct = Routed(FakeDevice(0))
    direct.group.in_order = False
    assert direct.group._route("allreduce", lambda _: None) is None  # type: ignore[arg-type, return-value, func-returns-value]
    assert direct.group.idle
    direct.close()


def test_what_is_called_off_is_known_before_its_caller_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    broken: list[Any] = []
    monkeypatch.setattr(routing_group, "break_connections", broken.append)
    routed = Routed(device)
    routed.all_have_called(1)
    wait = CommTask.wait

    def then_another_rank_fails(task: CommTask, timeout: float) -> None:
        wait(task, timeout)
        routed.group.call_off()  # the caller has not got its work yet

    monkeypatch.setattr(CommTask, "wait", then_another_rank_fails)
    routed.group.allreduce([FakeBuffer(device)])
    assert broken == [routed.carrier]
    routed.close()


def test_what_goes_out_directly_follows_what_was_launched() -> None:
    device = FakeDevice(0)
    routed = Routed(device)
    routed.all_have_called(1)
    work = routed.group.allreduce([FakeBuffer(device)])
    routed.group.in_order = False
    assert len(routed.carrier.works) == 1
    routed.group.allreduce([FakeBuffer(device)])
    assert len(routed.carrier.works) == 2
    assert work.wait()
    routed.close()
