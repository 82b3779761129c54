"""A thread that encodes what is to be sent, so that neither the training nor a launch waits for that.

One thread, named ``bytescheduler-codec``, owned by the transport and started with the first thing there is to encode.
It works in the order in which sub-tasks are launched and holds no lock while it does; the completion thread, which
decodes, takes up what is encoded in that order. Whatever it does ends by itself: arithmetic on one partition, and
messages that are begun and not waited for. :meth:`CodecThread.stop` therefore waits for one partition at most.

Why no rank waits forever: what travels encoded are messages between two ranks, which carry the number of the operation,
and numbers are given at the launch, in one order on all ranks. When a message is begun does not matter.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from lightning_bytescheduler.collectives.completion import naming
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns
from lightning_bytescheduler.scheduler.task import SubCommTask

__all__ = ["CodecThread"]


class CodecThread:
    """Runs what encodes and sends one sub-task after the other.

    Args:
        on_error: Called with what could not be encoded or sent, on the codec thread, before the sub-task fails; returns
            the error to fail with.
    """

    def __init__(self, on_error: Callable[[BaseException], BaseException]) -> None:
        self._on_error = on_error
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], SubCommTask] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], None], sub_task: SubCommTask) -> None:
        """Do ``work`` for ``sub_task`` after all that was given before; for whoever holds the launching lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bytescheduler-codec", daemon=True)
            self._thread.start()
        self._waiting.put((work, sub_task))

    def stop(self, timeout: float) -> bool:
        """End the thread; what waits is left alone. Returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._waiting.put(None)
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        prefer_short_turns()
        while True:
            item = self._waiting.get()  # woken by stop(), which puts None
            if item is None or self._stopping.is_set():
                return
            work, sub_task = item
            try:
                work()
            except BaseException as error:
                sub_task.fail(self._on_error(naming(sub_task, error)))
