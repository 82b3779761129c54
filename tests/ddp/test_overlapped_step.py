"""What a step tells, and with which locks, without a fit around it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.deferred_optimizer import DueStep
from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.reads import SeenReads
from lightning_bytescheduler.ddp.reduction import GradientBucket
from lightning_bytescheduler.ddp.steps import BucketUpdate, OverlappedStep, UpdateState
from lightning_bytescheduler.scheduler.task import CommTask, TaskKey
from tests.ddp.routes import idle_wire


class Listener(SeenReads):
    """Notes what it is told, and whether another thread can get at the steps at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.fit: Fit | None = None
        self.told: list[tuple[str, bool]] = []

    def _note(self, what: str) -> None:
        fit = self.fit
        assert fit is not None

        def others_get_on() -> bool:
            taken = fit.lock.acquire(timeout=0.2)
            if taken:
                fit.lock.release()
            return taken

        with ThreadPoolExecutor(1) as another:
            self.told.append((what, another.submit(others_get_on).result()))

    def waited(self, why: str) -> None:
        self._note(why)

    def waited_early(self) -> None:
        self._note("early")


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.fixture
def step(parameter: nn.Parameter) -> OverlappedStep:
    core: Any = SimpleNamespace(abort=lambda error: None)
    wire = idle_wire(core, join=lambda task, timeout: task.wait(timeout))
    fit = Fit(wire, [parameter], torch.device("cpu"))
    listener = Listener()
    listener.fit, fit.reads.seen = fit, listener
    return OverlappedStep(fit, 2)


def arrived(step: OverlappedStep, parameter: nn.Parameter) -> BucketUpdate:
    """An update of ``step`` whose gradient, of ones, is here."""
    task = CommTask("bucket 0", 3, launch=lambda _: None, key=TaskKey(step.number))
    task._conclude()
    buffer = torch.ones(3)
    update = BucketUpdate(step, GradientBucket(0, [parameter], buffer, 0), task)
    parameter.grad = buffer.view(3)
    step.updates.append(update)
    step.transforms.complete = True
    return update


def due(step: OverlappedStep, parameter: nn.Parameter) -> BucketUpdate:
    """One whose gradient is here and whose update is due: of SGD, with a rate of 1."""
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    update = arrived(step, parameter)
    update.close_gate()
    step.take(optimizer, optimizer.step)
    return update


def told(step: OverlappedStep) -> list[tuple[str, bool]]:
    listener = step.fit.reads.seen
    assert isinstance(listener, Listener)
    return listener.told


def test_a_touch_updates_and_opens_and_tells_without_the_lock(step: OverlappedStep, parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    update = arrived(step, parameter)
    update.close_gate()
    assert step.take(optimizer, optimizer.step) is None
    assert update.state is UpdateState.DUE
    assert (parameter + 0).tolist() == [0.0, 0.0, 0.0]
    assert update.state.value == "done"
    assert type(parameter) is nn.Parameter
    assert told(step) == [("early", True)]


def test_a_step_that_is_taken_while_somebody_waits_is_the_trainings(
    step: OverlappedStep, parameter: nn.Parameter
) -> None:
    """On a GPU the waiting thread may use a stream of its own."""
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    update = arrived(step, parameter)
    update.close_gate()
    step.take(optimizer, optimizer.step)
    entered: list[object] = []

    class Stream:
        @contextmanager
        def entered(self) -> Iterator[None]:
            entered.append(update.state)
            yield
            entered.append(update.state)

    step.fit.stream = Stream()  # type: ignore[assignment]
    step.step_while_waiting(CommTask("bucket 1", 3, launch=lambda _: None, key=TaskKey(step.number)))
    assert entered == [UpdateState.OPENING, UpdateState.OPENING]
    assert update.state is UpdateState.STEPPED


def test_a_step_that_is_taken_whole_says_so_without_the_lock(step: OverlappedStep, parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.register_step_post_hook(lambda *_: None)
    update = arrived(step, parameter)
    step.take(optimizer, optimizer.step)
    assert update.state is UpdateState.REDUCED
    assert parameter.tolist() == [0.0, 0.0, 0.0]
    assert told(step) == [("SGD has step hooks, which expect whole steps (remove them to keep the overlap)", True)]


def test_a_bucket_is_stepped_as_the_type_was_when_it_was_due(step: OverlappedStep, parameter: nn.Parameter) -> None:
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    update = arrived(step, parameter)
    update.close_gate()
    step.take(optimizer, optimizer.step)
    assert isinstance(step.due, DueStep)
    torch.set_default_dtype(torch.float64)
    try:
        step.flush()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[parameter]["step"].dtype is torch.float32


def test_the_default_dtype_is_left_alone_on_other_threads(
    step: OverlappedStep, parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the training's, too, whose forward pass may have set it."""
    due(step, parameter)
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(1) as another, monkeypatch.context() as changing:
            changing.setattr(torch, "set_default_dtype", lambda dtype: pytest.fail(f"{dtype} for all threads"))
            another.submit(step.flush).result()
    finally:
        torch.set_default_dtype(torch.float32)
    assert parameter.tolist() == [0.0, 0.0, 0.0]


def test_a_flush_in_the_middle_of_an_update_leaves_that_to_be_finished(
    step: OverlappedStep, parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a signal's handler, on the same thread."""
    due(step, parameter)
    monkeypatch.setattr(step.transforms, "apply", lambda bucket: step.flush())
    step.open_all("a test")
    assert parameter.tolist() == [0.0, 0.0, 0.0]
    step.flush()
    assert step.due is None


def test_a_fork_in_the_middle_of_an_update_leaves_that_to_be_finished(
    step: OverlappedStep, parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a signal's handler, between what says that it is under way and what it is."""
    due(step, parameter)
    own = BucketUpdate.update

    def interrupted(update: BucketUpdate) -> None:
        step.before_fork()
        own(update)

    monkeypatch.setattr(BucketUpdate, "update", interrupted)
    step.flush()
    assert parameter.tolist() == [0.0, 0.0, 0.0]
    assert step.due is None


def test_nothing_leads_to_a_step_that_is_finished(step: OverlappedStep, parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    arrived(step, parameter)
    step.take(optimizer, optimizer.step)
    assert step.is_pending
    step.finish()
    assert not step.is_pending
    assert step.due is None
    assert step.tasks_in_flight() == []
