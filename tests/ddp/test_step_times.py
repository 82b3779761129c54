"""Steps are timed by the clock on a CPU, and on a GPU by its own events, which are read only once they have passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_bytescheduler.ddp.decided_fit import StepTimer


class Event:
    """One of a GPU that has got as far as ``Cuda.passed``; every event is a second after the one before."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.at = -1

    def record(self, stream: str) -> None:
        assert stream == "training"
        self.at = self._cuda.recorded
        self._cuda.recorded += 1

    def query(self) -> bool:
        return self.at < self._cuda.passed

    def synchronize(self) -> None:
        self._cuda.waited_for.append(self.at)
        self._cuda.passed = max(self._cuda.passed, self.at + 1)

    def elapsed_time(self, end: Event) -> float:
        assert end.query()
        return 1000.0 * (end.at - self.at)


class Cuda:
    def __init__(self) -> None:
        self.recorded = self.passed = 0
        self.waited_for: list[int] = []

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def current_stream(self, device: torch.device) -> str:
        return "training"


def test_on_a_cpu() -> None:
    now, notes = [10.0], []
    times = StepTimer(torch.device("cpu"), lambda: now[0])
    for step in range(1, 4):
        now[0] += step
        times.begin(step, lambda *note: notes.append(note))
    assert notes == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_on_a_gpu_that_lags_behind() -> None:
    cuda, notes = Cuda(), []

    def note(step: int, seconds: float) -> None:
        notes.append((step, seconds))

    times = StepTimer(torch.device("cuda", 0), lambda: pytest.fail("the host's clock"), cuda=cuda)
    for step in range(1, 6):
        times.begin(step, note)
        cuda.passed = max(0, step - 2)
    assert notes == [(1, 1.0)]
    assert cuda.waited_for == []
    cuda.passed = 5
    times.begin(6, note)
    assert notes == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert cuda.waited_for == []


def test_what_is_not_read_does_not_pile_up() -> None:
    cuda = Cuda()
    times: Any = StepTimer(torch.device("cuda", 0), lambda: 0.0, cuda=cuda)
    for step in range(1, 500):
        times.begin(step, lambda *_: None)
        cuda.passed = cuda.recorded
    assert len(times._unread) <= 1
