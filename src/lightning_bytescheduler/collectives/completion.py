"""Waits for collectives in launch order and notifies their sub-tasks; on a CPU.

One thread, named ``bytescheduler-completion``, owned by the route. It blocks inside ``Work.wait`` without the GIL, in
slices of half a second so that it can be stopped; a collective that no other rank joins does not keep it alive. Gloo's
point-to-point messages cannot be awaited in slices: to stop the thread while it waits for one, the group's connections
are broken. For operations with a second half there is one more thread, ``bytescheduler-completion-2``, which waits for
these while the first goes on.

An operation that must be encoded first is awaited from its launch on (``Coming``). So results are handled in launch
order, which is the same on all ranks. Otherwise a rank could wait for a younger collective for which others have no
credit yet, while they wait for the second half of an older one.

Why no rank waits forever, also where an operation has a second half that this thread begins: take the oldest operation
whose first half has not been handled on all ranks. Second halves of all older ones have been sent, as they begin when
the first half is handled. So older ones end on every rank and return credit to launch this one. On each rank, only the
older ones precede it in the queue. So its turn comes, and it waits only for launches and codec threads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_bytescheduler.collectives.operations import Coming, StartedOperation
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import brief, is_communication_error, is_timeout
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.task import SubCommTask
from lightning_bytescheduler.scheduler.threads import start_thread

__all__ = ["CompletionThread", "naming", "wait_in_slices"]

_SLICE_S = 0.5
_WAIT_SLICE = timedelta(seconds=_SLICE_S)


def wait_in_slices(work: dist.Work, stopping: threading.Event) -> bool:
    """Wait for one collective; ``False`` if ``stopping`` was set before it ended.

    Raises:
        RuntimeError: The collective's error.
    """
    while not work.is_completed():
        try:
            work.wait(_WAIT_SLICE)
        except RuntimeError:
            # The slice ran out, or the collective failed or has ended since. The wait below raises its error.
            if not work.is_completed() and stopping.is_set():
                return False
    work.wait(_WAIT_SLICE)
    return True


class CompletionThread:
    """Calls ``notify_finish`` for finished collectives.

    Args:
        on_error: Called on this thread with the first error that it meets, before the sub-task fails; returns the
            error to fail with (for example, an error that names the failed rank).
        group: The data group; its connections, or those of an operation's own group, are broken if the thread is
            stopped while it waits for a message.
        telling: Held while a sub-task is notified. Threads that share it run their callbacks one by one.
    """

    def __init__(
        self,
        on_error: Callable[[BaseException], BaseException],
        group: dist.ProcessGroup | None = None,
        name: str = "completion",
        telling: threading.Lock | None = None,
    ) -> None:
        self._name = name
        self._telling = threading.Lock() if telling is None else telling
        self._on_error = on_error
        self._group = group
        self._awaited: dist.ProcessGroup | None = None  # the group of the message that is waited for
        self._seconds: CompletionThread | None = None  # waits for second halves, while this one goes on
        self._pending: queue.SimpleQueue[tuple[StartedOperation, SubCommTask] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = start_thread(name, self._run)

    def watch(self, started: StartedOperation, sub_task: SubCommTask) -> None:
        """Notify ``sub_task`` when ``started`` is done."""
        self._pending.put((started, sub_task))

    def stop(self, timeout: float) -> bool:
        """End the thread without finishing its work; returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._pending.put(None)
        deadline = time.monotonic() + timeout
        # More than once: a connection that is ending already does not end the others.
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            self._thread.join(min(left, 2 * _SLICE_S))
            if self._thread.is_alive() and (awaited := self._awaited) is not None:
                break_connections(awaited)
        seconds = self._seconds is None or self._seconds.stop(max(0.1, deadline - time.monotonic()))
        return seconds and not self._thread.is_alive()

    def _run(self) -> None:
        failed: BaseException | None = None
        while True:
            item = self._pending.get()  # stop() puts None to wake it
            if item is None:
                return
            started, sub_task = item
            if failed is None:
                try:
                    outcome = self._await(started, sub_task)
                    if outcome is None:
                        continue  # its second half is in flight
                    if not outcome:
                        return
                except BaseException as error:
                    failed = self._on_error(naming(sub_task, error))
            with self._telling:
                if failed is None:
                    sub_task.notify_finish()
                else:
                    sub_task.fail(failed)

    def _await(self, started: StartedOperation, sub_task: SubCommTask) -> bool | None:
        following: StartedOperation | None = started
        while following is not None:
            if following is not started and following.closing:
                if self._seconds is None:
                    self._seconds = CompletionThread(self._on_error, self._group, f"{self._name}-2", self._telling)
                self._seconds.watch(replace(following, closing=False), sub_task)
                return None
            if following.messages:
                if not self._await_messages(following.works, following.group or self._group):
                    return False
            elif not all(wait_in_slices(work, self._stopping) for work in following.works):
                return False
            following = None if following.finish is None else following.finish()
        return True

    def _await_messages(self, works: Sequence[Any], group: dist.ProcessGroup | None) -> bool:
        self._awaited = group
        try:
            for work in works:
                while isinstance(work, Coming) and not self._stopping.is_set() and not work.known.wait(_SLICE_S):
                    pass
                if self._stopping.is_set():
                    return False
                work.wait()  # ends with the group's timeout, or when stop() breaks the group's connections
        except RuntimeError:
            if self._stopping.is_set():
                return False
            raise
        finally:
            self._awaited = None
        return True


def naming(sub_task: SubCommTask, error: BaseException) -> BaseException:
    """Name the sub-task when a collective times out, as torch does not know it."""
    if not is_communication_error(error) or not is_timeout(error):
        return error
    missing = SchedulerTimeoutError(
        f"{sub_task.name} ({sub_task.size:,} parameters) did not arrive in time: {brief(error)}."
    )
    missing.__cause__ = error
    return missing
