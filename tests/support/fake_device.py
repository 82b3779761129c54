"""A simulated GPU: streams, events and kernels as CUDA defines them, run by a thread, in any order allowed.

What is enqueued on one stream runs in order; streams run in an order that is drawn at random, unless events say
otherwise. So what is right by luck on a real GPU goes wrong here. Kernels are Python functions.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

__all__ = ["FakeBuffer", "FakeDevice", "FakeEvent", "FakeGroup", "FakeStream"]


class FakeEvent:
    """As ``torch.cuda.Event``: complete while it was never recorded; a wait is for what was recorded by then."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.passed: list[bool] = [True]

    def record(self, stream: FakeStream) -> None:
        passed = self.passed = [False]

        def pass_it() -> None:
            passed[0] = True

        stream.enqueue(pass_it)

    def query(self) -> bool:
        return self.passed[0]

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


class FakeStream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def enqueue(self, kernel: Callable[[], None], when: Callable[[], bool] = lambda: True) -> None:
        with self._device.lock:
            self.queue.append((when, kernel))

    def wait_event(self, event: FakeEvent) -> None:
        passed = event.passed
        self.enqueue(lambda: None, lambda: passed[0])

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self._device)
        event.record(other)
        self.wait_event(event)


class FakeDevice:
    """Stands in for ``torch.cuda``; runs what is enqueued while it is entered.

    Args:
        seed: Seed of the order in which streams run.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self.rounds = 0
        self.training = self._new_stream("training")
        self.streams = [self.training]
        self._random = random.Random(seed)
        self._current = threading.local()
        self._off = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)

    # What is used of torch.cuda.

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        stream = self._new_stream(f"stream {len(self.streams)}")
        with self.lock:
            self.streams.append(stream)
        return stream

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: Any = None) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self.training)
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    # What runs it.

    def __enter__(self) -> FakeDevice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._off.set()
        self._thread.join(10.0)

    def idle(self) -> bool:
        with self.lock:
            return not any(stream.queue for stream in self.streams)

    def _new_stream(self, name: str) -> FakeStream:
        return FakeStream(self, name)

    def _run(self) -> None:
        while not self._off.wait(0.0 if self._run_one() else 1e-4):
            pass

    def _run_one(self) -> bool:
        with self.lock:
            self.rounds += 1
            able = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
            if not able:
                return False
            _, kernel = self._random.choice(able).queue.popleft()
            kernel()
            return True


class FakeBuffer:
    """A tensor of one number on the device: everything that is done to it is a kernel on the current stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.value = 0.0
        self.recorded: set[str] = set()

    def do(self, kernel: Callable[[float], float]) -> None:
        def run() -> None:
            self.value = kernel(self.value)

        self._device.current_stream().enqueue(run)

    def mul_(self, factor: float) -> None:
        self.do(lambda value: value * factor)

    def record_stream(self, stream: FakeStream) -> None:
        self.recorded.add(stream.name)


class _FakeWork:
    """The all-reduce of two ranks that have the same gradients, so that the mean of halves is the sum."""

    def __init__(self, device: FakeDevice, buffer: FakeBuffer, allowed: Callable[[], bool], own: FakeStream) -> None:
        self._device = device
        self._own = own
        self._error: BaseException | None = None
        own.wait_stream(device.current_stream())
        own.enqueue(lambda: None, allowed)
        with device.stream(own):
            buffer.do(lambda value: value * 2)
        self.ended = FakeEvent(device)
        self.ended.record(own)

    def fail(self, error: BaseException) -> None:
        self._error = error

    def is_completed(self) -> bool:
        return self._error is not None or self.ended.query()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


class FakeNcclWork(_FakeWork):
    """Waiting is the current stream's affair; only a timeout makes the host wait, and break the communicator."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._device.current_stream().wait_event(self.ended)
        if timeout is not None and not self.is_completed():
            raise AssertionError("NCCL would block the host, and abort its communicator when the time is up")
        self._raise()
        return True


class FakeGlooWork(_FakeWork):
    """The host has to wait for the network; from then on the copy back is the current stream's affair."""

    def __init__(self, device: FakeDevice, buffer: FakeBuffer, allowed: Callable[[], bool], own: FakeStream) -> None:
        self._device = device
        self._own = own
        self._error = None
        self._arrived = False
        self._host = 0.0
        self.ended = FakeEvent(device)
        own.wait_stream(device.current_stream())
        own.enqueue(lambda: None, allowed)

        def copy_to_host_and_back() -> None:
            self._host = buffer.value * 2
            slow = device.rounds + 20
            own.enqueue(lambda: None, lambda: device.rounds > slow)
            with device.stream(own):
                buffer.do(lambda _: self._host)
            self.ended.record(own)
            self._arrived = True  # not over on the device, but for the host

        own.enqueue(copy_to_host_and_back)

    def is_completed(self) -> bool:
        return self._error is not None or self._arrived

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.is_completed():
            raise AssertionError("gloo would block the host")
        self._raise()
        self._device.current_stream().wait_event(self.ended)
        return True


class FakeGroup:
    """A process group of two.

    Args:
        device: Where tensors are.
        backend: ``"nccl"``, whose operations run on one stream, or ``"gloo"``, which has one for each.
    """

    def __init__(self, device: FakeDevice, backend: str) -> None:
        self._device = device
        self._backend = backend
        self._communicator = device.Stream()
        self.link_open = threading.Event()  # nothing gets through before
        self.link_open.set()
        self.works: list[Any] = []

    def _get_backend(self, device: Any) -> FakeGroup:
        return self

    def name(self) -> str:
        return self._backend

    def size(self) -> int:
        return 2

    def allreduce(self, buffers: list[FakeBuffer]) -> Any:
        kind, own = (
            (FakeNcclWork, self._communicator) if self._backend == "nccl" else (FakeGlooWork, self._device.Stream())
        )
        self.works.append(kind(self._device, buffers[0], self.link_open.is_set, own))
        return self.works[-1]
