"""What the scheduler itself costs: sub-tasks enqueued, ordered, started and finished on a transport that does nothing.

Processor time is that of one core.
"""

from __future__ import annotations

import argparse
import gc
import queue
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

from benchmarks.record import Results, record
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey

TASKS = 100
PARTS = 100
_WAIT_S = 30.0


class _NullTransport:
    """Ends each sub-task on a thread of its own, as a real transport does, and at once."""

    def __init__(self) -> None:
        self._started: queue.SimpleQueue[SubCommTask | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._end, name="null-transport", daemon=True)
        self._thread.start()

    def start(self, sub_task: SubCommTask) -> None:
        """The ``launch`` of a task."""
        self._started.put(sub_task)

    def close(self) -> None:
        """End the thread."""
        self._started.put(None)
        self._thread.join(_WAIT_S)

    def _end(self) -> None:
        while (sub_task := self._started.get()) is not None:
            sub_task.notify_finish()


def train_steps(core: ByteCore, launch: Callable[[SubCommTask], None], steps: int, *, tasks: int, parts: int) -> None:
    """Send ``tasks`` tasks of ``parts`` parts in each of ``steps`` steps, the last layer's first."""
    for step in range(steps):
        size = parts * core.partition_size
        sent = [CommTask(f"{n}", size, launch=launch, priority=-n, key=TaskKey(step, bucket=n)) for n in range(tasks)]
        for task in sent:
            core.enqueue(task)
            task.notify_ready()
        for task in sent:
            task.wait(_WAIT_S)


def processor_seconds(*, tasks: int = TASKS, parts: int = PARTS) -> float:
    """Processor time of all threads for ``tasks * parts`` sub-tasks, under a window of four."""
    transport = _NullTransport()
    try:
        with ByteCore(partition_size=1000, credit=4000) as core:
            began = time.process_time()
            train_steps(core, transport.start, 1, tasks=tasks, parts=parts)
            return time.process_time() - began
    finally:
        transport.close()


def bytes_kept_per_step(steps: int = 200) -> float:
    """What a step leaves in memory."""
    transport = _NullTransport()
    tracemalloc.start()
    try:
        with ByteCore(partition_size=1000, credit=4000) as core:
            kept = []
            for _ in range(2):
                train_steps(core, transport.start, steps, tasks=4, parts=4)
                gc.collect()
                kept.append(tracemalloc.get_traced_memory()[0])
            return (kept[1] - kept[0]) / steps
    finally:
        tracemalloc.stop()
        transport.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """This benchmark has no options."""


def measure(options: argparse.Namespace) -> Iterator[Results]:
    """Measure both."""
    values: dict[str, float | list[float]] = {
        "processor [s]": [processor_seconds() for _ in range(5)],
        "kept in a step [B]": bytes_kept_per_step(),
    }
    what = f"{TASKS * PARTS:,} sub-tasks"
    yield what, [record("scheduler_overhead", what, {"tasks": TASKS, "parts": PARTS}, values)]
