"""All-reduces of steps as DDP's on the timeline: bytes, step and moments, on a GPU those when the device comes by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_bytescheduler.ddp import steps as steps_module
from lightning_bytescheduler.ddp.fit_report import Record
from lightning_bytescheduler.ddp.sample_weights import StepWeight
from lightning_bytescheduler.ddp.steps import MergedStep
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, Span, Timeline, read_timeline


class Group:
    """Of four ranks; its messages arrive when they are told to."""

    def __init__(self) -> None:
        self.futures: list[torch.futures.Future[Any]] = []

    def size(self) -> int:
        return 4

    def allreduce(self, buffers: list[torch.Tensor]) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.futures.append(future)
        return SimpleNamespace(get_future=lambda: future)

    allreduce_coalesced = allreduce


class Streams:
    """Of a device that comes by a mark when it is told to."""

    def __init__(self) -> None:
        self.marks: list[Callable[[], None]] = []

    def when_ready(self, mark: object, then: Callable[[], None]) -> None:
        self.marks.append(then)


class Steps:
    """A step as DDP's, with a clock of its own."""

    def __init__(self, path: Path, streams: Streams | None = None) -> None:
        self.now = 0.0
        self.path = path
        self.group = Group()
        when_ready = (lambda mark, then: then()) if streams is None else streams.when_ready
        self.timeline = Timeline(path, clock=lambda: 0.0, wall_clock=lambda: 0.0)
        group: Any = self.group
        group._get_backend = lambda _: SimpleNamespace(name=lambda: "any")
        route = SimpleNamespace(group=group, streams=None, when_ready=when_ready, wire_share=1.5)
        fit: Any = SimpleNamespace(
            device=torch.device("cpu"),
            own_failure=lambda: None,
            record=Record(self.timeline, clock=lambda: self.now),
            reduction=lambda number, overlaps: None,
            static_graph=False,
            weight=StepWeight(4),
            weights=SimpleNamespace(by_samples=False),
            wire=SimpleNamespace(route=route),
        )
        self._merged = MergedStep(fit, 7)

    def send(self, *buffers: torch.Tensor) -> None:
        """All of them in one message."""
        self._merged._waiting = list(buffers)
        self._merged._send_waiting()

    def spans(self) -> list[Span]:
        self.timeline.close()
        return read_timeline(self.path).select(COMMUNICATION)


def test_each_message_is_there_when_it_has_arrived(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "t.json")
    steps.send(torch.zeros(10))
    steps.now = 1.0
    steps.send(torch.zeros(10), torch.zeros(40))
    for now, future in zip((3.0, 5.0), steps.group.futures, strict=True):
        steps.now = now
        future.set_result(None)
    first, second = steps.spans()
    assert (first.start, first.end) == pytest.approx((0.0, 3.0))
    assert (second.start, second.end) == pytest.approx((1.0, 5.0))
    assert first.args == {"bytes": 60.0, "step": 7, "task": 0, "partition": 0, "buckets": 1}
    assert second.args["bytes"] == 1.5 * 200
    assert second.args["buckets"] == 2


def test_what_fails_is_not_sent(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "t.json")
    steps.send(torch.zeros(10))
    steps.group.futures[0].set_exception(RuntimeError("gone"))  # type: ignore[arg-type]
    assert steps.spans() == []


def test_on_a_gpu_it_is_the_device_that_comes_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "ReadyMark", lambda device: None)
    streams = Streams()
    steps = Steps(tmp_path / "t.json", streams)
    steps.send(torch.zeros(10))
    steps.group.futures[0].set_result(None)  # as NCCL's are, as soon as all is enqueued
    begins, ends = streams.marks
    for now, then in ((2.0, begins), (6.0, ends)):
        steps.now = now
        then()
    (span,) = steps.spans()
    assert span.end - span.start == pytest.approx(4.0)
