r"""Communication tasks: one operation on one tensor, cut into sub-tasks that are sent separately.

The terms are those of ByteScheduler's unified abstraction (Peng et al., SOSP 2019). A task is *partitioned* into
sub-tasks, which are queued, sent and acknowledged one by one. It becomes *ready* when its data is complete, is
*started* by the core, and has *finished* when its last sub-task has arrived. Tasks know neither the transport nor the
framework: ``launch`` gets a sub-task with an offset and a size (in parameters) in the task's flat buffer. Nothing is
copied.

Lock order: a task's lock may be taken while ``ByteCore``'s lock is held, never the other way round. No code outside
this module is called with a task's lock held.

States of a sub-task (a task follows its sub-tasks)::

    CREATED --notify_ready--> READY --start--> STARTED --notify_finish--> FINISHED
       \_________________________\________________\________fail__________> FAILED
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from lightning_bytescheduler.checks import require_size
from lightning_bytescheduler.exceptions import SchedulerTimeoutError, TaskStateError

__all__ = [
    "ENDED",
    "CommTask",
    "SubCommTask",
    "TaskKey",
    "TaskListener",
    "TaskState",
    "part_size",
]


class TaskState(enum.Enum):
    """State of a task or sub-task."""

    CREATED = "created"
    READY = "ready"
    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


class SubCommTask:
    """A contiguous part of a task's flat buffer; made by :meth:`CommTask.partition`, never by hand.

    Attributes:
        parent: The task.
        index: Position among the parent's sub-tasks, from 0.
        offset: First parameter of the part in the parent's flat buffer.
        size: Length in parameters.
        state: State; written under the parent's lock.
        ready_at: When its data was complete, in seconds of the core's clock; 0 until then.
        started_at: When it was sent; 0 until then.
        finished_at: When it finished or failed; 0 until then.
        encoded_bytes: Bytes sent, if they differ from the task's ``wire_bytes``; for accounting, set by the sender.
        lane: Its lane, see ``LaneChoice``; chosen by the deciding rank and sent to the others.
        charge: What it takes of the credit: its size, or less if its task has larger parts.
    """

    __slots__ = (
        "_claimed",
        "charge",
        "encoded_bytes",
        "finished_at",
        "index",
        "lane",
        "offset",
        "parent",
        "ready_at",
        "size",
        "started_at",
        "state",
    )

    def __init__(self, parent: CommTask, index: int, offset: int, size: int) -> None:
        self.parent = parent
        self.index = index
        self.offset = offset
        self.size = size
        self.state = TaskState.CREATED
        self.ready_at = 0.0
        self.started_at = 0.0
        self.finished_at = 0.0
        self.encoded_bytes: int | None = None
        self.lane = 0
        self.charge = size if parent.takes_credit else 0
        self._claimed = False  # chosen to be sent next, not launched yet

    @property
    def name(self) -> str:
        """The parent's name with the position in brackets, for example ``bucket 3[1]``."""
        return f"{self.parent.name}[{self.index}]"

    @property
    def priority(self) -> int:
        """The parent's priority; a lower number starts first."""
        return self.parent.priority

    def notify_ready(self) -> None:
        """Record that this part's data is complete. Does nothing if the task has ended.

        Raises:
            TaskStateError: If it is not in state CREATED, or the task was never enqueued.
        """
        self.parent._mark_ready(self)

    def claim(self) -> bool:
        """Choose this part to be sent next, for orders. It is then sent even if its task fails, unless the core stops.

        Returns:
            Whether it was ready and not claimed.
        """
        return self.parent._claim(self)

    def start(self) -> None:
        """Send this part; called by the core once credit allows.

        Raises:
            TaskStateError: If the sub-task is not ready, or was started before.
            BaseException: The error of the task's ``launch``, with which the task has failed.
        """
        self.parent._start(self)

    def notify_finish(self) -> None:
        """Record that this part has arrived.

        Raises:
            TaskStateError: If it was not started, or has finished or failed before.
        """
        self.parent._end(self, None)

    def fail(self, error: BaseException) -> None:
        """Fail the task with ``error``, as this part will never arrive; does nothing if it has ended."""
        self.parent._end(self, error)

    def __repr__(self) -> str:
        return f"<SubCommTask {self.name} size={self.size} priority={self.priority} {self.state.value}>"


class TaskListener(Protocol):
    """What a task tells the core that holds it; nothing is called with the task's lock held."""

    def now(self) -> float:
        """Seconds of the core's clock."""

    def sub_tasks_ready(self, task: CommTask, sub_tasks: list[SubCommTask]) -> None:
        """The data of these parts, or of a task that is not partitioned yet, is complete."""

    def sub_task_ended(self, sub_task: SubCommTask) -> None:
        """A part has finished or failed; called before its task's callback."""

    def credit_returned(self) -> None:
        """All others have been told of a part's end; called last."""

    def task_ended(self, task: CommTask, callback_error: BaseException | None) -> None:
        """The outcome is known, the callback has run (or raised ``callback_error``), waiters are awake."""


class TaskKey(NamedTuple):
    """Names a task alike on every rank, and travels with each decision to send a part of it.

    Keys are ordered by step, then phase, then bucket.

    Attributes:
        step: Number of the step, the same on all ranks.
        phase: Operation within the step, if there are several on the same data.
        bucket: Index of the bucket.
    """

    step: int
    phase: int = 0
    bucket: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase}, bucket {self.bucket}"


_ANY = TaskKey(0)
ENDED = (TaskState.FINISHED, TaskState.FAILED)


def part_size(size: int, largest: int) -> int:
    """Return the size of the equal parts of a tensor: at most ``largest``; the last part may be a little smaller."""
    return -(-size // -(-size // largest))


def _equal_parts(size: int, largest: int) -> Iterator[int]:
    part = part_size(size, largest)
    return (min(part, size - offset) for offset in range(0, size, part))


class CommTask:
    """One communication operation on one tensor.

    Args:
        name: Shown in logs and timelines.
        size: Length of the tensor in parameters.
        launch: Called with each sub-task when it may be sent; must not block on the network, and must lead to
            ``notify_finish()`` or ``fail()`` of that sub-task, on any thread.
        priority: A lower number starts first; ByteScheduler uses the position in the forward pass.
        key: Names this task alike on every rank; needed if ranks must agree on one order.
        immediate: Bypass queue and credit.
        wire_bytes: Bytes that each rank sends per parameter of the tensor; for accounting.
        on_end: Called once, on the thread that ended the task, after it has finished or failed (``task.error``). An
            error in it fails the task and aborts the core.
        takes_credit: Whether it waits for credit and takes some. A task without credit has one part and belongs to
            other code; it still has a place in the order, see ``MixedOrder`` in ``order.py``.

    Raises:
        OptionError: If ``size`` is not a positive whole number.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        launch: Callable[[SubCommTask], None],
        priority: int = 0,
        key: TaskKey = _ANY,
        immediate: bool = False,
        wire_bytes: float = 0.0,
        on_end: Callable[[CommTask], None] | None = None,
        takes_credit: bool = True,
    ) -> None:
        self.name = name
        self.takes_credit = takes_credit
        self.size = require_size("size", size)
        self.priority = priority
        self.key = key
        self.immediate = immediate
        self.wire_bytes = wire_bytes
        self._launch = launch
        self._on_end = on_end
        self._lock = threading.Lock()
        self._done = threading.Event()  # set last, after callbacks; waiters wake on it
        self._ended = False  # decided under the lock, so that a task ends exactly once
        self._error: BaseException | None = None
        self._listener: TaskListener | None = None
        self._ready = False
        self._ready_at = 0.0
        self._sequence = 0  # position among the tasks of its order; breaks ties
        self._sub_tasks: tuple[SubCommTask, ...] = ()
        self._outstanding = 0

    @property
    def sub_tasks(self) -> tuple[SubCommTask, ...]:
        """The parts, in order of offset; empty until the task is partitioned."""
        return self._sub_tasks

    @property
    def ready(self) -> bool:
        """Whether the whole task's data is complete."""
        return self._ready

    @property
    def state(self) -> TaskState:
        """FINISHED or FAILED once it has ended, otherwise the state of its most advanced sub-task."""
        with self._lock:
            if self._ended:
                return TaskState.FAILED if self._error is not None else TaskState.FINISHED
            states = {sub.state for sub in self._sub_tasks}
            if TaskState.STARTED in states or TaskState.FINISHED in states:
                return TaskState.STARTED
            return TaskState.READY if self._ready or TaskState.READY in states else TaskState.CREATED

    @property
    def error(self) -> BaseException | None:
        """Why the task failed, or ``None``."""
        return self._error

    def partition(self, size: int) -> tuple[SubCommTask, ...]:
        """Cut the task into sub-tasks of at most ``size`` parameters, without copying.

        It makes as few parts as possible, of about equal size: a small rest would cost a message's start-up time. Every
        rank that uses the same size makes the same parts.

        Args:
            size: Largest part, in parameters.

        Returns:
            The parts, in order of offset.

        Raises:
            OptionError: If ``size`` is not a positive whole number.
            TaskStateError: If the task is already partitioned, or has ended.
        """
        require_size("partition_size", size)
        with self._lock:
            if self._sub_tasks:
                raise TaskStateError(f"Cannot partition task {self.name!r}: it is partitioned already.")
            if self._ended:
                raise TaskStateError(f"Cannot partition task {self.name!r}: it has ended.")
            sizes = tuple(_equal_parts(self.size, size))
            offsets = itertools.accumulate(sizes, initial=0)
            self._sub_tasks = tuple(
                SubCommTask(self, index, offset, part)
                for index, (offset, part) in enumerate(zip(offsets, sizes, strict=False))
            )
            self._outstanding = len(self._sub_tasks)
            if self._ready:
                for sub in self._sub_tasks:
                    sub.state = TaskState.READY
                    sub.ready_at = self._ready_at
            return self._sub_tasks

    def notify_ready(self) -> None:
        """Record that the whole task's data is complete. Does nothing if the task has ended.

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
            BaseException: The task's error.
        """
        if not self._done.wait(timeout):
            outstanding = self.describe_outstanding()
            raise SchedulerTimeoutError(
                f"Task {self.name!r} did not finish within {timeout:g} s; outstanding: {outstanding}."
            )
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether the task has finished or failed."""
        return self._done.is_set()

    def any_ready(self) -> bool:
        """Whether some complete data has not arrived, or waiters have not been told of the end."""
        if self._ended or self._ready:
            return not self.done()
        return any(sub.state in (TaskState.READY, TaskState.STARTED) for sub in self._sub_tasks)

    def describe_outstanding(self) -> str:
        """Return what has not finished, in words, for error messages."""
        with self._lock:
            if not self._sub_tasks:
                return f"{self.name} (not partitioned, {'ready' if self._ready else 'not ready'})"
            open_subs = [s for s in self._sub_tasks if s.state not in ENDED]
            shown = ", ".join(f"{s.name} {s.state.value}" for s in open_subs[:4])
            shown += f" and {len(open_subs) - 4} more" if len(open_subs) > 4 else ""
            return shown or f"the callback of {self.name}"

    def fail(self, error: BaseException) -> None:
        """End the task with ``error``; unsent sub-tasks fail with it. Does nothing if it has ended.

        Claimed sub-tasks are still sent, unless the core stops, as other ranks may have been told to expect them.
        """
        with self._lock:
            decided = self._decide(error)
        if decided:
            self._conclude()

    def _attach(self, listener: TaskListener) -> None:
        with self._lock:
            if self._listener is not None:
                raise TaskStateError(f"Cannot enqueue task {self.name!r}: it was enqueued before.")
            if self._ended:
                raise TaskStateError(f"Cannot enqueue task {self.name!r}: it has ended.")
            self._listener = listener

    def _mark_ready(self, sub: SubCommTask | None) -> None:
        listener = self._listener
        if listener is None:
            raise TaskStateError(f"Cannot mark {self.name!r} ready: enqueue it first.")
        now = listener.now()
        with self._lock:
            if self._ended:
                return  # aborted: wait() raises the error
            became = list(self._sub_tasks) if sub is None else [sub]
            wrong = next((s for s in became if s.state is not TaskState.CREATED), None)
            if wrong is not None or (sub is None and self._ready):
                what = repr(self.name) if wrong is None else f"{wrong.name} ({wrong.state.value})"
                raise TaskStateError(f"Cannot mark {what} ready: it was ready before.")
            for each in became:
                each.state = TaskState.READY
                each.ready_at = now
            self._ready_at = now
            self._ready = all(s.state is not TaskState.CREATED for s in self._sub_tasks)
        listener.sub_tasks_ready(self, became)

    def _claim(self, sub: SubCommTask) -> bool:
        with self._lock:
            if sub.state is not TaskState.READY:
                return False
            sub._claimed, sub.state = True, TaskState.STARTED
            return True

    def _withdraw(self, sub: SubCommTask, error: BaseException) -> None:
        """Fail ``sub`` if it was chosen but never launched."""
        with self._lock:
            if not sub._claimed:
                return
            sub._claimed = False
        self._end(sub, error)

    def _start(self, sub: SubCommTask) -> None:
        with self._lock:
            if not sub._claimed and sub.state is not TaskState.READY:
                raise TaskStateError(f"Cannot start {sub.name}: it is {sub.state.value}, not ready.")
            sub._claimed, sub.state = False, TaskState.STARTED
        try:
            self._launch(sub)
        except BaseException as error:
            self._end(sub, error)
            raise

    def _end(self, sub: SubCommTask, error: BaseException | None) -> None:
        listener = self._listener  # read once, as a failed enqueue() resets it
        with self._lock:
            launched = not sub._claimed
            if error is None and (sub.state is not TaskState.STARTED or not launched):
                state = sub.state.value if launched else "ready"
                raise TaskStateError(f"Cannot finish {sub.name}: it is {state}, not started.")
            if sub.state in ENDED:
                return
            if launched:  # otherwise it is still launched, see fail(), and ends then
                sub.state = TaskState.FINISHED if error is None else TaskState.FAILED
            decided = error is not None and self._decide(error)
        # Parts may end on several threads at once. The task finishes when the listener knows of all of them, so that
        # all credit is returned when a waiter wakes.
        try:
            if launched and listener is not None:
                listener.sub_task_ended(sub)
        finally:
            with self._lock:
                self._outstanding -= launched
                decided = decided or (self._outstanding == 0 and self._decide(None))
            try:
                if decided:
                    self._conclude()
            finally:
                if launched and listener is not None:
                    listener.credit_returned()

    def _decide(self, error: BaseException | None) -> bool:
        """Set the outcome; called with the lock held. Returns whether it was open."""
        if self._ended:
            return False
        self._error = error
        self._ended = True
        for sub in self._sub_tasks:
            if sub.state not in ENDED and sub.state is not TaskState.STARTED:
                sub.state = TaskState.FAILED
        return True

    def _conclude(self) -> None:
        listener = self._listener
        failure: BaseException | None = None
        try:
            if self._on_end is not None:
                self._on_end(self)
        except BaseException as error:
            failure = error
            self._error = self._error or error
        self._done.set()
        if listener is not None:
            listener.task_ended(self, failure)
        # The core has handled an ordinary exception; the thread that ended the task goes on.
        if failure is not None and (listener is None or not isinstance(failure, Exception)):
            raise failure

    def __repr__(self) -> str:
        return f"<CommTask {self.name!r} size={self.size} priority={self.priority} {self.state.value}>"
