"""A simulated GPU: an event takes the time at which a stream reaches it; the test moves the clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_bytescheduler.ddp.sample_weights import DeviceTime, SampleCounter, SampleWeights

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Device:
    """Work is enqueued by the host, and done later."""

    def __init__(self) -> None:
        self.enqueued: list[Any] = []
        self.now = 0.0  # ms

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def current_stream(self, device: torch.device) -> Device:
        return self

    def computes(self, milliseconds: float) -> None:
        """Have the stream compute, or wait, for so long."""
        self.enqueued.append(milliseconds)

    def run(self) -> None:
        """Do all that was enqueued."""
        for what in self.enqueued:
            if isinstance(what, Event):
                what.at = self.now
            else:
                self.now += what
        self.enqueued.clear()


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at: float | None = None

    def record(self, stream: Device) -> None:
        stream.enqueued.append(self)

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.at is not None
        assert later.at is not None
        return later.at - self.at


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def timed(device: Device) -> DeviceTime:
    return DeviceTime(torch.device("cpu"), cuda=device)


def test_a_pass_ends_with_its_last_gradient(device: Device, timed: DeviceTime) -> None:
    device.computes(100.0)  # the forward pass, and what it waits for
    timed.begin()
    device.computes(5.0)
    timed.gradient_exists()
    device.computes(4.0)
    timed.gradient_exists()
    device.computes(70.0)  # a synchronised step waits behind its last gradient
    timed.end(samples=8)
    device.computes(30.0)
    assert timed.latest() == [0, 0], "the GPU has not come there"
    device.run()
    assert timed.latest() == [8, 9_000_000]
    assert timed.latest() == [0, 0], "told once"


def test_the_last_pass_that_is_over_is_told(device: Device, timed: DeviceTime) -> None:
    for samples in (4, 5, 6):
        if samples == 6:
            device.run()
        timed.begin()
        device.computes(samples)
        timed.gradient_exists()
        timed.end(samples)
    assert timed.latest() == [5, 5_000_000]
    device.run()
    assert timed.latest() == [6, 6_000_000]


def test_a_pass_that_sends_nothing_ends_when_it_returns(device: Device, timed: DeviceTime) -> None:
    timed.begin()
    device.computes(5.0)
    timed.end(samples=2)
    device.run()
    assert timed.latest() == [2, 5_000_000]


def test_a_pass_that_was_not_begun_is_none(device: Device, timed: DeviceTime) -> None:
    timed.gradient_exists()
    timed.end(samples=1)
    device.run()
    assert timed.latest() == [0, 0]


def test_ranks_are_told_what_the_gpu_took(device: Device, timed: DeviceTime) -> None:
    posted: list[list[int]] = []

    class Exchange:
        def post(self, numbers: list[int]) -> None:
            posted.append(numbers)

    sizes: Any = SimpleNamespace(size_of=lambda batch: 3)
    exchange: Any = Exchange()
    weights = SampleWeights(SampleCounter(len, 0), exchange, clock=lambda: 0.0, device_time=timed)
    weights._sizes = sizes
    for _ in range(3):
        weights.begin_batch([1, 2, 3])
        device.computes(20.0)
        with weights.backward(torch.zeros(())):
            device.computes(6.0)
            weights.gradient_exists()
        weights.end_backward()
        if posted[1:]:
            device.run()
    weights.begin_batch([1, 2, 3])
    assert posted == [[3, 0, 0], [3, 0, 0], [3, 3, 6_000_000], [3, 3, 6_000_000]]


@on_cuda
def test_a_gpu_tells_how_long_it_computed() -> None:
    timed = DeviceTime(torch.device("cuda"))
    work = torch.randn(4096, 4096, device="cuda")
    work @ work  # the first product takes a tenth of a second to begin
    torch.cuda.synchronize()
    for sends in (False, True):
        timed.begin()
        for _ in range(20):
            work @ work
        if sends:
            timed.gradient_exists()
            for _ in range(100):  # behind the last gradient
                work @ work
        timed.end(samples=1)
        torch.cuda.synchronize()
        found = timed.latest()
        if not sends:
            alone = found[1]
    assert 0.5 * alone < found[1] < 2.0 * alone
