"""Streams on a GPU, with one that is not there: every order of kernels that the streams allow gives the right weights,
takes nothing from the host but what it is for, and each wait that is left out shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from lightning_bytescheduler.collectives import device_streams, operations
from lightning_bytescheduler.collectives.device_streams import DeviceStreams, ReadyMark
from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.ddp.fit import TrainingStream
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, TaskKey
from tests.support.fake_device import FakeBuffer, FakeDevice, FakeGroup, FakeStream
from tests.support.waiting import WAIT, until

CUDA = torch.device("cuda", 0)
BACKENDS = ["nccl", "gloo"]
STEPS, LAYERS = 4, 3
RIGHT = [[float(layer + sum(10 * s + layer for s in range(step))) for layer in range(LAYERS)] for step in range(STEPS)]


all_reduce = partial(operations.all_reduce, factor=0.5)


class Training:
    """Some layers of one number each, trained as the engine does it: backward, collective, gate, update, forward."""

    def __init__(self, backend: str, seed: int) -> None:
        self.cuda = FakeDevice(seed)
        self.group = FakeGroup(self.cuda, backend)
        self.errors: list[BaseException] = []
        group: Any = self.group
        self.streams = DeviceStreams(group, CUDA, self._note, cuda=self.cuda)
        self.core = ByteCore(partition_size=10, credit=15)
        self.buckets = [FakeBuffer(self.cuda) for _ in range(LAYERS)]
        self.weights = [float(layer) for layer in range(LAYERS)]
        self.read: list[list[float]] = []
        self.step = 0

    def _note(self, error: BaseException) -> BaseException:
        self.errors.append(error)
        self.core.abort(error)
        return error

    def __enter__(self) -> Training:
        self.cuda.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.group.link_open.set()
        self.core.shutdown(timeout=WAIT, drain=False)
        assert self.streams.stop(WAIT)
        self.cuda.__exit__()

    def ready(self) -> ReadyMark:
        mark = ReadyMark(torch.device("cpu"))
        event = self.cuda.Event()
        event.record(self.cuda.current_stream())
        mark.event = event  # type: ignore[assignment]
        return mark

    def enqueue(self, layer: int, mark: ReadyMark, operation: Any = all_reduce) -> CommTask:
        bucket: Any = self.buckets[layer]
        task = CommTask(
            f"bucket {layer}",
            10,
            launch=lambda sub: self.streams.send(bucket, sub, operation, 1, mark),
            priority=layer,
            key=TaskKey(self.step, bucket=layer),
            on_end=self.streams.forget,
        )
        self.streams.expect(task)
        self.core.enqueue(task)
        self.streams.when_ready(mark, task.notify_ready)
        return task

    def backward(self) -> list[CommTask]:
        tasks = []
        for layer in reversed(range(LAYERS)):
            gradient = float(10 * self.step + layer)
            self.buckets[layer].do(lambda _, gradient=gradient: gradient)  # type: ignore[misc]
            tasks.append(self.enqueue(layer, self.ready()))
        self.step += 1
        return tasks[::-1]

    def update(self, layer: int) -> None:
        def add() -> None:
            self.weights[layer] += self.buckets[layer].value

        self.cuda.current_stream().enqueue(add)

    def use(self, layer: int, into: list[float]) -> None:
        self.cuda.current_stream().enqueue(lambda: into.append(self.weights[layer]))

    def forward(self, tasks: list[CommTask]) -> None:
        read: list[float] = []
        self.read.append(read)
        for layer in range(LAYERS):
            if tasks:
                self.streams.join(tasks[layer], WAIT)
                self.update(layer)
            self.use(layer, read)

    def run(self) -> list[list[float]]:
        tasks: list[CommTask] = []
        for _ in range(STEPS):
            self.forward(tasks)
            tasks = self.backward()
        self.settle()
        return self.read

    def settle(self) -> None:
        until(self.cuda.idle)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_right_in_any_order_of_kernels(backend: str) -> None:
    for seed in range(12):
        with Training(backend, seed) as training:
            assert training.run() == RIGHT, seed
            assert not training.errors


def launch_at_once(streams: DeviceStreams, mark: ReadyMark, then: Callable[[], None]) -> None:
    then()


@contextmanager
def no_wait_for_the_gradient(patch: pytest.MonkeyPatch, training: Training) -> Iterator[None]:
    """The operation is launched at once, and its stream does not wait for the backward pass."""
    patch.setattr(DeviceStreams, "when_ready", launch_at_once)
    send = DeviceStreams.send
    patch.setattr(DeviceStreams, "send", lambda streams, *args: send(streams, *args[:-1], None))
    yield


@contextmanager
def no_wait_for_the_collective(patch: pytest.MonkeyPatch, training: Training) -> Iterator[None]:
    """The training goes on without waiting for the stream on which results arrive."""
    patch.setattr(training.cuda.training, "wait_event", lambda _: None)
    yield


@contextmanager
def no_wait_for_the_backend(patch: pytest.MonkeyPatch, training: Training) -> Iterator[None]:
    """The stream on which results arrive does not wait for them."""
    patch.setattr(device_streams._SentPart, "take_in", lambda _: True)
    patch.setattr(device_streams._SentPart, "raise_failure", lambda _: None)
    yield


@pytest.mark.parametrize(
    ("backend", "sabotage"),
    [
        ("nccl", no_wait_for_the_gradient),
        ("nccl", no_wait_for_the_collective),
        ("nccl", no_wait_for_the_backend),
        ("gloo", no_wait_for_the_gradient),
        ("gloo", no_wait_for_the_collective),
        ("gloo", no_wait_for_the_backend),
    ],
)
def test_every_wait_is_needed(backend: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(seed: int) -> list[list[float]]:
        with Training(backend, seed) as training, monkeypatch.context() as patch, sabotage(patch, training):
            return training.run()

    assert any(trained(seed) != RIGHT for seed in range(200)), "in no order of kernels, though one is soon found"


@pytest.mark.parametrize("backend", BACKENDS)
def test_priority_decides_among_the_gradients_that_exist(backend: str) -> None:
    """The host runs ahead of the device: what has not been computed yet must not be launched before what has."""
    with Training(backend, 0) as training:
        computed = threading.Event()
        training.buckets[2].do(lambda _: 1.0)
        training.enqueue(2, training.ready())
        training.cuda.training.enqueue(lambda: None, computed.is_set)
        training.buckets[0].do(lambda _: 1.0)
        first = training.enqueue(0, training.ready())
        open_tasks = training.core._open_tasks
        until(lambda: not any(task.name == "bucket 2" for task in list(open_tasks.values())))
        assert not first.ready
        assert len(training.group.works) == 1
        computed.set()
        first.wait(WAIT)


def test_a_gate_waits_for_the_launch_only() -> None:
    with Training("nccl", 0) as training:
        training.group.link_open.clear()
        tasks = training.backward()
        read: list[float] = []
        # Credit lets two of three go; the gates of these two are passed although nothing arrives.
        sent = [task for task in tasks if task.priority in _launched(training, 2)]
        for task in sent:
            training.streams.join(task, WAIT)
            training.update(task.priority)
            training.use(task.priority, read)
        assert not any(task.done() for task in tasks)
        assert read == []
        training.group.link_open.set()
        training.settle()
        assert read == [training.weights[task.priority] for task in sent]
        assert all(training.weights[task.priority] == 2.0 * task.priority for task in sent)


def _launched(training: Training, count: int) -> set[int]:
    """Layers whose communication was launched, once there are ``count``."""
    enqueued = training.streams._enqueued
    until(lambda: sum(known.known.is_set() for known in list(enqueued.values())) >= count)
    return {task.priority for task, known in list(enqueued.items()) if known.known.is_set()}


def test_credit_returns_when_the_device_is_done() -> None:
    with Training("nccl", 0) as training:
        training.group.link_open.clear()
        tasks = training.backward()
        assert len(_launched(training, 2)) == 2
        training.core.launch_allowed()
        assert training.core.in_flight == 20
        assert len(training.group.works) == 2
        training.group.link_open.set()
        for task in tasks:
            task.wait(WAIT)
        assert training.core.in_flight == 0


def test_with_gloo_a_gate_waits_until_the_result_is_on_its_way_to_the_device() -> None:
    with Training("gloo", 0) as training:
        training.group.link_open.clear()
        tasks = training.backward()
        with pytest.raises(SchedulerTimeoutError, match=r"'bucket 0' was not sent within 0.05 s"):
            training.streams.join(tasks[0], 0.05)
        training.group.link_open.set()
        training.streams.join(tasks[0], WAIT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_kept_for_the_streams_that_use_it(backend: str) -> None:
    with Training(backend, 0) as training:
        training.run()
        names = {training.streams._launching.name, training.streams._arriving.name}
        assert all(bucket.recorded == names for bucket in training.buckets)
        assert len(names) == (2 if backend == "nccl" else 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_follows_an_operation_is_part_of_it(backend: str) -> None:
    with Training(backend, 3) as training:
        finished: list[str] = []

        def twice(group: Any, part: Any, number: int) -> StartedOperation:
            def finish() -> StartedOperation:
                finished.append(threading.current_thread().name)
                part.mul_(3.0)
                return StartedOperation([group.allreduce([part])], lambda: part.mul_(5.0))

            return StartedOperation([group.allreduce([part])], finish)

        training.buckets[0].do(lambda _: 1.0)
        task = training.enqueue(0, training.ready(), operation=twice)
        training.streams.join(task, WAIT)
        training.update(0)
        task.wait(WAIT)
        training.settle()
        assert training.weights[0] == 2 * 3 * 2 * 5
        assert (finished == ["bytescheduler-device"]) == (backend == "gloo")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_reaches_those_that_wait_and_all_that_comes_after(backend: str) -> None:
    failure = RuntimeError("NCCL error: remote process exited")
    with Training(backend, 0) as training:
        training.group.link_open.clear()
        tasks = training.backward()
        until(lambda: bool(training.group.works))
        training.group.works[0].fail(failure)
        training.group.link_open.set()
        for task in tasks:
            with pytest.raises(RuntimeError, match="remote process exited"):
                task.wait(WAIT)
            with pytest.raises(RuntimeError, match="remote process exited"):
                training.streams.join(task, WAIT)
        assert training.errors == [failure]
        assert not training.streams._enqueued


def test_an_abort_wakes_a_gate_whose_task_was_never_sent() -> None:
    with Training("nccl", 0) as training:
        task = training.enqueue(0, never(training))
        threading.Timer(0.05, training.core.abort, [ValueError("enough")]).start()
        with pytest.raises(ValueError, match="enough"):
            training.streams.join(task, WAIT)


def never(training: Training) -> ReadyMark:
    training.cuda.training.enqueue(lambda: None, lambda: False)
    return training.ready()


def test_what_a_tasks_end_calls_runs_beside_the_queues() -> None:
    where: list[FakeStream] = []
    with Training("nccl", 1) as training:
        training.buckets[0].do(lambda _: 1.0)
        bucket: Any = training.buckets[0]
        task = CommTask(
            "scatter",
            10,
            launch=lambda sub: training.streams.send(bucket, sub, all_reduce, 1, None),
            on_end=lambda _: where.append(training.cuda.current_stream()),
        )
        training.core.enqueue(task)
        task.notify_ready()
        task.wait(WAIT)
        assert where == [training.streams._side]
        assert where[0] not in (training.streams._launching, training.streams._arriving)


def test_the_thread_ends_although_the_device_never_gets_there() -> None:
    training = Training("nccl", 0)
    training.enqueue(0, never(training))
    assert training.streams.stop(WAIT)
    training.core.shutdown(timeout=WAIT, drain=False)


def test_an_error_while_something_is_told_is_not_lost() -> None:
    with Training("nccl", 0) as training:
        training.streams.when_ready(training.ready(), partial(divmod, 1, 0))
        until(lambda: bool(training.errors))
        assert isinstance(training.errors[0], ZeroDivisionError)


def test_a_step_belongs_to_the_trainings_stream_and_its_reader_waits() -> None:
    """A gate opened on another stream: what it wrote is read there, and by the training's, only after the step."""
    for seed in range(8):
        with Training("nccl", seed) as training:
            cuda = training.cuda
            training_stream = TrainingStream(CUDA, cuda=cuda)
            training_stream.is_here()
            task = training.backward()[2]
            read: list[float] = []
            side = cuda.Stream()
            with cuda.stream(side):
                with training_stream.entered():
                    assert cuda.current_stream() is cuda.training
                    training.streams.join(task, WAIT)
                    training.update(2)
                training.use(2, read)
            training.use(2, read)
            training.settle()
            assert read == [RIGHT[1][2]] * 2


def test_on_a_cpu_there_are_no_streams() -> None:
    training_stream = TrainingStream(torch.device("cpu"), cuda=None)
    training_stream.is_here()
    with training_stream.entered():
        assert training_stream.entered() is training_stream.entered()
