"""Communication tasks: one operation on one tensor, cut into sub-tasks that are sent on their own.

The vocabulary is ByteScheduler's (seed 001, "Unified abstraction for communication tasks"): a task is
*partitioned*, becomes *ready* when its data exists, is *started* by the core, and has *finished* when its last
sub-task has arrived. Tasks know neither the transport nor the framework: ``launch`` is called with a sub-task that
names an offset and a size (in parameters) of the task's flat buffer, so partitioning copies nothing.

Life of a sub-task (a task follows its sub-tasks)::

    CREATED --notify_ready--> READY --start--> STARTED --notify_finish--> FINISHED
       \\_________________________\\______________\\________fail__________> FAILED

Lock order: ``ByteCore``'s lock may be held when a task's lock is taken, never the other way round; no callback is
called with a task's lock held.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Protocol

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError, TaskStateError

__all__ = ["CommTask", "SubCommTask", "TaskKey", "TaskState"]

TaskKey = tuple[int, int]
"""What names a task on every rank alike: (step, index within the step)."""


class TaskState(enum.Enum):
    """Where a task or sub-task stands."""

    CREATED = "created"
    READY = "ready"
    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


class TaskListener(Protocol):
    """What a task tells the core that holds it."""

    def sub_tasks_ready(self, task: CommTask, sub_tasks: list[SubCommTask]) -> None: ...

    def sub_task_ended(self, sub_task: SubCommTask) -> None: ...


class SubCommTask:
    """A contiguous part of a task's flat buffer; made by :meth:`CommTask.partition`, never by hand.

    Attributes:
        parent: The task this is a part of.
        index: Position among the parent's sub-tasks, from 0.
        offset: First parameter of the part within the parent's flat buffer.
        size: Length in parameters.
    """

    __slots__ = ("finished_at", "index", "offset", "parent", "ready_at", "size", "started_at", "state")

    def __init__(self, parent: CommTask, index: int, offset: int, size: int) -> None:
        self.parent = parent
        self.index = index
        self.offset = offset
        self.size = size
        self.state = TaskState.CREATED
        self.ready_at = 0.0
        self.started_at = 0.0
        self.finished_at = 0.0

    @property
    def name(self) -> str:
        """The parent's name with the position in brackets, for example ``bucket 3[1]``."""
        return f"{self.parent.name}[{self.index}]"

    @property
    def priority(self) -> int:
        """The parent's priority; a lower number starts first."""
        return self.parent.priority

    def notify_ready(self) -> None:
        """Say that this part's data exists.

        Raises:
            TaskStateError: If it is not in state CREATED, or the task was never enqueued.
        """
        self.parent._mark_ready(self)

    def start(self) -> None:
        """Send this part; called by the core once credit allows.

        Raises:
            TaskStateError: If the sub-task is not ready, or was started before.
        """
        self.parent._start(self)

    def notify_finish(self) -> None:
        """Say that this part has arrived.

        Raises:
            TaskStateError: If it was not started, or finished before.
        """
        self.parent._end(self, None)

    def fail(self, error: BaseException) -> None:
        """Say that this part will never arrive; the task fails with ``error``. Does nothing if it has ended."""
        self.parent._end(self, error)

    def __repr__(self) -> str:
        return f"<SubCommTask {self.name} size={self.size} priority={self.priority} {self.state.value}>"


class CommTask:
    """One communication operation on one tensor.

    Args:
        name: Shown in logs and timelines.
        size: Length of the tensor in parameters.
        launch: Called with each sub-task when it may be sent; must not block on the network, and must lead to
            ``notify_finish()`` or ``fail()`` of that sub-task, on any thread.
        priority: A lower number starts first; ByteScheduler uses the position in the forward pass.
        key: What names this task on every rank alike; needed when ranks must agree on one order.
        immediate: Bypass queue and credit.
        on_end: Called once, on the thread that ended the task, after it has finished or failed (``task.error``).

    Raises:
        OptionError: If ``size`` is not a positive whole number.
    """

    __slots__ = (
        "_done",
        "_ended",
        "_error",
        "_launch",
        "_listener",
        "_lock",
        "_on_end",
        "_outstanding",
        "_ready",
        "_sub_tasks",
        "immediate",
        "key",
        "name",
        "priority",
        "size",
    )

    def __init__(
        self,
        name: str,
        size: int,
        *,
        launch: Callable[[SubCommTask], None],
        priority: int = 0,
        key: TaskKey = (0, 0),
        immediate: bool = False,
        on_end: Callable[[CommTask], None] | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError("size", size, "a positive whole number of parameters")
        self.name = name
        self.size = size
        self.priority = priority
        self.key = key
        self.immediate = immediate
        self._launch = launch
        self._on_end = on_end
        self._lock = threading.Lock()
        self._done = threading.Event()  # set last, after callbacks; waiters wake on it
        self._ended = False  # decided under the lock, so that a task ends exactly once
        self._error: BaseException | None = None
        self._listener: TaskListener | None = None
        self._ready = False
        self._sub_tasks: tuple[SubCommTask, ...] = ()
        self._outstanding = 0

    @property
    def sub_tasks(self) -> tuple[SubCommTask, ...]:
        """The parts, in order of offset; empty until the task is partitioned."""
        return self._sub_tasks

    @property
    def ready(self) -> bool:
        """Whether the whole task's data exists."""
        return self._ready

    @property
    def state(self) -> TaskState:
        """FINISHED or FAILED once it has ended, else how far its foremost sub-task has come."""
        with self._lock:
            if self._ended:
                return TaskState.FAILED if self._error is not None else TaskState.FINISHED
            states = {sub.state for sub in self._sub_tasks}
            if TaskState.STARTED in states or TaskState.FINISHED in states:
                return TaskState.STARTED
            return TaskState.READY if self._ready else TaskState.CREATED

    @property
    def error(self) -> BaseException | None:
        """Why the task failed, or ``None``."""
        return self._error

    def partition(self, size: int) -> tuple[SubCommTask, ...]:
        """Cut the task into sub-tasks no larger than ``size`` parameters, without copying.

        Cuts are at multiples of ``size``, so every rank that uses the same size makes the same parts.

        Args:
            size: Largest part, in parameters.

        Returns:
            The parts, in order of offset.

        Raises:
            OptionError: If ``size`` is not a positive whole number.
            TaskStateError: If the task is partitioned already.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError("partition size", size, "a positive whole number of parameters")
        with self._lock:
            if self._sub_tasks:
                raise TaskStateError(f"Cannot partition task {self.name!r}: it is partitioned already.")
            if self._ended:
                raise TaskStateError(f"Cannot partition task {self.name!r}: it has ended.")
            self._sub_tasks = tuple(
                SubCommTask(self, index, offset, min(size, self.size - offset))
                for index, offset in enumerate(range(0, self.size, size))
            )
            self._outstanding = len(self._sub_tasks)
            if self._ready:
                for sub in self._sub_tasks:
                    sub.state = TaskState.READY
            return self._sub_tasks

    def notify_ready(self) -> None:
        """Say that the whole task's data exists.

        Raises:
            TaskStateError: If the task was never enqueued, or any of it was ready before.
        """
        self._mark_ready(None)

    def wait(self, timeout: float) -> None:
        """Block until the task has finished.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            SchedulerTimeoutError: If it did not finish in time.
            BaseException: Whatever the task failed with.
        """
        if not self._done.wait(timeout):
            raise SchedulerTimeoutError(
                f"Task {self.name!r} did not finish within {timeout:g} s; outstanding: {self.describe_outstanding()}."
            )
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the task has finished or failed."""
        return self._done.is_set()

    def any_ready(self) -> bool:
        """Whether any of the task's data exists."""
        return self._ready or any(s.state is not TaskState.CREATED for s in self._sub_tasks)

    def all_ended(self) -> bool:
        """Whether the outcome is decided, even if callbacks and waiters have not run yet."""
        return self._ended

    def describe_outstanding(self) -> str:
        """What has not finished, in words, for error messages."""
        with self._lock:
            if not self._sub_tasks:
                return f"{self.name} (not partitioned, {'ready' if self._ready else 'not ready'})"
            open_subs = [s for s in self._sub_tasks if s.state not in (TaskState.FINISHED, TaskState.FAILED)]
            shown = ", ".join(f"{s.name} {s.state.value}" for s in open_subs[:4])
            return shown + (f" and {len(open_subs) - 4} more" if len(open_subs) > 4 else "")

    def fail(self, error: BaseException) -> None:
        """End the task with ``error``; sub-tasks that were not sent fail with it. Does nothing if it has ended."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            for sub in self._sub_tasks:
                if sub.state in (TaskState.CREATED, TaskState.READY):
                    sub.state = TaskState.FAILED
            self._error = error
        self._conclude()

    def _attach(self, listener: TaskListener) -> None:
        with self._lock:
            if self._listener is not None:
                raise TaskStateError(f"Cannot enqueue task {self.name!r}: it was enqueued before.")
            if self._ended:
                raise TaskStateError(f"Cannot enqueue task {self.name!r}: it has ended.")
            self._listener = listener

    def _mark_ready(self, sub: SubCommTask | None) -> None:
        with self._lock:
            listener = self._listener
            if listener is None:
                raise TaskStateError(f"Cannot mark {self.name!r} ready: enqueue it first.")
            if self._ended:
                return  # aborted meanwhile: the owner learns it from wait()
            became = list(self._sub_tasks) if sub is None else [sub]
            wrong = next((s for s in became if s.state is not TaskState.CREATED), None)
            if wrong is not None or (sub is None and self._ready):
                what = self.name if wrong is None else f"{wrong.name} ({wrong.state.value})"
                raise TaskStateError(f"Cannot mark {what} ready: it was ready before.")
            for each in became:
                each.state = TaskState.READY
            self._ready = all(s.state is not TaskState.CREATED for s in self._sub_tasks)
        listener.sub_tasks_ready(self, became)

    def _start(self, sub: SubCommTask) -> None:
        with self._lock:
            if sub.state is not TaskState.READY:
                raise TaskStateError(f"Cannot start {sub.name}: it is {sub.state.value}, not ready.")
            sub.state = TaskState.STARTED
        try:
            self._launch(sub)
        except BaseException as error:
            self._end(sub, error)
            raise

    def _end(self, sub: SubCommTask, error: BaseException | None) -> None:
        finished = failed = False
        with self._lock:
            if sub.state is not TaskState.STARTED:
                if error is not None and sub.state in (TaskState.FINISHED, TaskState.FAILED):
                    return
                if error is None:
                    raise TaskStateError(f"Cannot finish {sub.name}: it is {sub.state.value}, not started.")
            sub.state = TaskState.FINISHED if error is None else TaskState.FAILED
            self._outstanding -= 1
            if not self._ended:
                failed = error is not None
                finished = not failed and self._outstanding == 0
                self._ended = failed or finished
                if failed:
                    self._error = error
                    for other in self._sub_tasks:
                        if other.state in (TaskState.CREATED, TaskState.READY):
                            other.state = TaskState.FAILED
        # The listener learns of the credit before waiters wake, so that a drained core has all its credit back.
        if self._listener is not None:
            self._listener.sub_task_ended(sub)
        if finished or failed:
            self._conclude()

    def _conclude(self) -> None:
        try:
            if self._on_end is not None:
                self._on_end(self)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._done.set()

    def __repr__(self) -> str:
        return f"<CommTask {self.name!r} size={self.size} priority={self.priority} {self.state.value}>"
