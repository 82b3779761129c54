r"""Sub-tasks: the parts of a communication task that are queued, sent and acknowledged one by one.

Life of a sub-task (a task follows its sub-tasks)::

    CREATED --notify_ready--> READY --start--> STARTED --notify_finish--> FINISHED
       \_________________________\________________\________fail__________> FAILED
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightning_bytescheduler.scheduler.task import CommTask

__all__ = ["SubCommTask", "TaskListener", "TaskState"]


class TaskState(enum.Enum):
    """Where a task or sub-task stands."""

    CREATED = "created"
    READY = "ready"
    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


class SubCommTask:
    """A contiguous part of a task's flat buffer; made by :meth:`CommTask.partition`, never by hand.

    Attributes:
        parent: The task this is a part of.
        index: Position among the parent's sub-tasks, from 0.
        offset: First parameter of the part within the parent's flat buffer.
        size: Length in parameters.
        state: Where it stands; written under the parent's lock.
        ready_at: When its data existed, in seconds of the core's clock; 0 until then.
        started_at: When it was sent; 0 until then.
        finished_at: When it finished or failed; 0 until then.
    """

    __slots__ = (
        "_claimed",
        "finished_at",
        "index",
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
        self._claimed = False  # chosen to be sent next, but not launched yet

    @property
    def name(self) -> str:
        """The parent's name with the position in brackets, for example ``bucket 3[1]``."""
        return f"{self.parent.name}[{self.index}]"

    @property
    def priority(self) -> int:
        """The parent's priority; a lower number starts first."""
        return self.parent.priority

    def notify_ready(self) -> None:
        """Say that this part's data exists. Does nothing if the task has ended: its owner learns that.

        Raises:
            TaskStateError: If it is not in state CREATED, or the task was never enqueued.
        """
        self.parent._mark_ready(self)

    def claim(self) -> bool:
        """Choose this part to be sent next; called by orders. Once claimed, it is sent even if its task fails.

        Returns:
            Whether it still can be sent: it was ready, and nobody has claimed it.
        """
        return self.parent._claim(self)

    def start(self) -> None:
        """Send this part; called by the core once credit allows.

        Raises:
            TaskStateError: If the sub-task is not ready, or was started before.
            BaseException: Whatever the task's ``launch`` raised; the task has failed with it.
        """
        self.parent._start(self)

    def notify_finish(self) -> None:
        """Say that this part has arrived.

        Raises:
            TaskStateError: If it was not started, or has finished or failed before.
        """
        self.parent._end(self, None)

    def fail(self, error: BaseException) -> None:
        """Say that this part will never arrive, so the task fails with ``error``; nothing if it has ended."""
        self.parent._end(self, error)

    def __repr__(self) -> str:
        return f"<SubCommTask {self.name} size={self.size} priority={self.priority} {self.state.value}>"


class TaskListener(Protocol):
    """What a task tells the core that holds it; nothing is called with the task's lock held."""

    def now(self) -> float:
        """Seconds of the core's clock."""

    def sub_tasks_ready(self, task: CommTask, sub_tasks: list[SubCommTask]) -> None:
        """The data of these parts, or of a task that is not partitioned yet, exists."""

    def sub_task_ended(self, sub_task: SubCommTask) -> None:
        """A part has finished or failed; called before its task's callback."""

    def credit_returned(self) -> None:
        """All who had to know of a part's end have been told; called last."""

    def task_ended(self, task: CommTask, callback_error: BaseException | None) -> None:
        """The outcome is known, the callback has run (or raised ``callback_error``), waiters are awake."""
