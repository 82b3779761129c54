"""Waits for collectives in the order they were launched, and says so to their sub-tasks; on a CPU.

One thread, named ``bytescheduler-completion``, owned by the transport. It blocks inside ``Work.wait`` without the GIL,
in slices of half a second so that it can be stopped; a collective that nobody else joins does not keep it alive. Gloo's
messages cannot be waited for in slices: whoever stops the thread while it waits for one breaks the group's connections.

Why no rank waits forever, also where an operation has a second half that this thread begins: take the oldest operation
whose first half has not been dealt with everywhere. Second halves of all older ones have been sent, as they are begun
when the first is dealt with, so older ones end on every rank, and give it credit to launch this one. On each rank only
those are before it in the queue: so its turn comes, and it waits for nothing but launches and codec threads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.failures.messages import brief, is_communication_error, is_timeout
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns
from lightning_bytescheduler.scheduler.task import SubCommTask

__all__ = ["CompletionThread", "naming", "wait_in_slices"]

_WAIT_SLICE = timedelta(seconds=0.5)


class Place:
    """A place in the order of what is waited for, taken when something is launched that has to be encoded first.

    So results are dealt with in the order of launches, which is the same on all ranks. Otherwise a rank could wait for
    a younger collective, which others have no credit for yet, while they wait for what follows from an older message.
    """

    def __init__(self) -> None:
        self._filled = threading.Event()
        self._started: StartedOperation | None = None

    def fill(self, started: StartedOperation | None) -> None:
        """It has been started; ``None`` if it never will."""
        self._started = started
        self._filled.set()

    def take(self, stopping: threading.Event) -> StartedOperation | None:
        """What has been started, or ``None`` if there will be nothing, or ``stopping`` was set meanwhile."""
        while not self._filled.wait(_WAIT_SLICE.total_seconds()):
            if stopping.is_set():
                return None
        return self._started


Pending = tuple[StartedOperation | Place, SubCommTask]


def wait_in_slices(work: dist.Work, stopping: threading.Event) -> bool:
    """Wait for one collective; ``False`` if ``stopping`` was set before it ended.

    Raises:
        RuntimeError: What the collective failed with.
    """
    while not work.is_completed():
        try:
            work.wait(_WAIT_SLICE)
        except RuntimeError:
            # The slice ran out or the collective failed. It may even have ended between the two, so it is asked, and
            # what it failed with is what it says below.
            if not work.is_completed() and stopping.is_set():
                return False
    work.wait(_WAIT_SLICE)
    return True


class CompletionThread:
    """Turns finished collectives into ``notify_finish``.

    Args:
        on_error: Called once with the first error of a collective, on the completion thread, before the sub-task
            fails; returns the error to fail with (for example one that names the rank at fault).
        group: The data group, broken when the thread is stopped while it waits for a message.
        name: Of the thread, after ``bytescheduler-``.
        telling: Held while a sub-task is told, where several of these threads share one: callbacks run one by one.
        closing: Waits for second halves in this one's place, which goes on to the next first half at once.
    """

    def __init__(
        self,
        on_error: Callable[[BaseException], BaseException],
        group: dist.ProcessGroup | None = None,
        name: str = "completion",
        telling: threading.Lock | None = None,
        closing: CompletionThread | None = None,
    ) -> None:
        self._telling = threading.Lock() if telling is None else telling
        self._on_error = on_error
        self._group = group
        self._awaits_message = False
        self._elsewhere = closing
        self._closing: deque[tuple[StartedOperation, SubCommTask]] = deque()
        self._behind: Pending | None = None  # taken from those that wait, and to follow what closes
        self._pending: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"bytescheduler-{name}", daemon=True)
        self._thread.start()

    def watch(self, started: StartedOperation, sub_task: SubCommTask) -> None:
        """Notify ``sub_task`` when ``started`` is done."""
        self._pending.put((started, sub_task))

    def reserve(self, sub_task: SubCommTask) -> Place:
        """Take the place in the order of launches of what will be started later; see :class:`Place`."""
        place = Place()
        self._pending.put((place, sub_task))
        return place

    def stop(self, timeout: float) -> bool:
        """End the thread; what it still watched is left alone. Returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._pending.put(None)
        deadline = time.monotonic() + timeout
        self._thread.join(min(timeout, 2 * _WAIT_SLICE.total_seconds()))
        if self._thread.is_alive() and self._awaits_message and self._group is not None:
            break_connections(self._group)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        prefer_short_turns()
        failed: BaseException | None = None
        while True:
            item = self._next()
            if item is None:
                return
            started, sub_task = item
            if isinstance(started, Place):
                taken = started.take(self._stopping)
                if taken is None:
                    continue  # its sub-task has failed, or None is next
                started = taken
            if failed is None:
                try:
                    outcome = self._await(started, sub_task)
                    if outcome is None:
                        continue  # its second half is under way
                    if not outcome:
                        return
                except BaseException as error:
                    failed = self._on_error(naming(sub_task, error))
            with self._telling:
                if failed is None:
                    sub_task.notify_finish()
                else:
                    sub_task.fail(failed)

    def _next(self) -> Pending | None:
        """What is to be waited for next: second halves, but one encoded part's first half goes before the last of them.

        Else a part that was sent in fewer bytes as it is urgent would wait here for long ones that were sent later.
        """
        if not self._closing:
            behind, self._behind = self._behind, None
            return self._pending.get() if behind is None else behind  # woken by stop(), which puts None
        if len(self._closing) == 1 and self._behind is None:
            with suppress(queue.Empty):
                item = self._pending.get_nowait()
                if item is None or isinstance(item[0], Place):
                    return item
                self._behind = item
        return self._closing.popleft()

    def _await(self, started: StartedOperation, sub_task: SubCommTask) -> bool | None:
        """Wait for one operation; ``False`` if stopped meanwhile, ``None`` if its end is waited for later."""
        following: StartedOperation | None = started
        while following is not None:
            if following is not started and following.closing:
                half = replace(following, closing=False)
                if self._elsewhere is None:
                    self._closing.append((half, sub_task))
                else:
                    self._elsewhere.watch(half, sub_task)
                return None
            if following.messages:
                if not self._await_messages(following.works):
                    return False
            elif not all(wait_in_slices(work, self._stopping) for work in following.works):
                return False
            following = None if following.finish is None else following.finish()
        return True

    def _await_messages(self, works: Sequence[Any]) -> bool:
        """Wait for messages, for as long as the group allows; ``False`` if stopped meanwhile."""
        self._awaits_message = True
        try:
            for work in works:
                if self._stopping.is_set():
                    return False
                work.wait()  # ends with the group's timeout, or when stop() breaks the group's connections
        except RuntimeError:
            if self._stopping.is_set():
                return False
            raise
        finally:
            self._awaits_message = False
        return True


def naming(sub_task: SubCommTask, error: BaseException) -> BaseException:
    """Say what is missing when a collective's time is up: torch does not know."""
    if not is_communication_error(error) or not is_timeout(error):
        return error
    missing = SchedulerTimeoutError(
        f"{sub_task.name} ({sub_task.size:,} parameters) did not arrive in time: {brief(error)}."
    )
    missing.__cause__ = error
    return missing
