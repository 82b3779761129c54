"""In-memory transports, whose completions the tests decide on, and tasks that send on them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.scheduler import ByteCore, CommTask, SubCommTask, TaskState
from lightning_bytescheduler.scheduler import core as core_module
from tests.support.waiting import WAIT


@contextmanager
def restless_threads(seed: int) -> Iterator[None]:
    """Let threads that start in here pause at random instructions of the scheduler, so that races show.

    Left alone, Python switches too seldom to ever leave a thread inside a window of a few instructions.
    """
    chance = random.Random(seed)

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.endswith(("scheduler/core.py", "scheduler/task.py")):
            return None
        frame.f_trace_opcodes = True
        if chance.random() < 0.02:
            time.sleep(chance.choice((0, 0, 0, 0.0002)))  # gives up the interpreter lock
        return trace

    before = threading.gettrace()
    threading.settrace(trace)
    try:
        yield
    finally:
        threading.settrace(before)  # type: ignore[arg-type]


class ManualTransport:
    """Holds what was launched until the test lets it arrive."""

    def __init__(self) -> None:
        self.launched: list[SubCommTask] = []
        self._changed = threading.Condition()

    def __call__(self, sub: SubCommTask) -> None:
        with self._changed:
            self.launched.append(sub)
            self._changed.notify_all()

    @property
    def names(self) -> list[str]:
        return [sub.name for sub in self.launched]

    @property
    def in_flight(self) -> list[SubCommTask]:
        """What was launched and has not ended, oldest first."""
        return [sub for sub in self.launched if sub.state is TaskState.STARTED]

    def wait_for(self, count: int) -> list[SubCommTask]:
        """Wait until ``count`` sub-tasks were launched, and return all that were."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.launched) >= count, WAIT)
            assert arrived, f"Waited for {count} launches, saw {self.names}."
            return list(self.launched)


def settle(core: ByteCore, transport: ManualTransport) -> None:
    """Let everything that is ready be launched and arrive."""
    deadline = time.monotonic() + WAIT
    while True:
        for sub in transport.in_flight:
            sub.notify_finish()
        try:
            core.drain(0.002)
        except SchedulerTimeoutError:
            if time.monotonic() > deadline:
                raise
        else:
            return


class LinkTransport:
    """Completes what was launched on threads of its own, one at a time per thread, in random order."""

    def __init__(
        self,
        seed: int,
        *,
        threads: int = 1,
        on_launch: Callable[[SubCommTask], None],
        on_arrival: Callable[[SubCommTask], None],
    ) -> None:
        self._on_launch = on_launch
        self._on_arrival = on_arrival
        self._random = random.Random(seed)
        self._pending: list[SubCommTask] = []
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def __call__(self, sub: SubCommTask) -> None:
        self._on_launch(sub)
        with self._changed:
            self._pending.append(sub)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed, WAIT)
                if not self._pending:
                    return
                sub = self._pending.pop(self._random.randrange(len(self._pending)))
            self._on_arrival(sub)
            sub.notify_finish()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(WAIT)
            assert not thread.is_alive()

    def __enter__(self) -> LinkTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def running_core(**options: Any) -> Iterator[ByteCore]:
    """A core that is stopped without draining, whose thread must be gone afterwards.

    It does not look for work on its own every second as it does outside of tests, so that a lost wake-up shows.
    """
    with patch.object(core_module, "_IDLE_WAIT_S", 10 * WAIT):
        core = ByteCore(**{"partition_size": 10, "credit": 10, **options})
        try:
            yield core
        finally:
            core.shutdown(timeout=WAIT, drain=False)
            assert not core._dispatcher.is_alive()


def enqueue(
    core: ByteCore,
    launch: Callable[[SubCommTask], None],
    name: str,
    size: int = 10,
    *,
    ready: bool = True,
    **options: Any,
) -> CommTask:
    """Make a task, hand it to the core and say that its data exists."""
    task = CommTask(name, size, launch=launch, **options)
    core.enqueue(task)
    if ready and not task.immediate:
        task.notify_ready()
    return task


LOST = ConnectionError("the network is gone")


class Stuck:
    """A launch that blocks until it is let go, as a transport must not; opens windows for races."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.launched: list[str] = []

    def __call__(self, sub: SubCommTask) -> None:
        self.launched.append(sub.name)
        self.entered.set()
        assert self.let_go.wait(WAIT)
        sub.notify_finish()


def ready_at_once(*tasks: CommTask) -> None:
    """Under the core's lock, the dispatcher sees them all or none, so that it makes one batch of them."""
    for task in tasks:
        task.notify_ready()


def in_thread(function: Callable[[], Any]) -> Callable[[], BaseException | None]:
    """Run ``function`` on a thread; what this returns waits for its end and returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> BaseException | None:
        thread.join(WAIT)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return join
