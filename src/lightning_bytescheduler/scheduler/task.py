r"""Communication tasks: one operation on one tensor, cut into sub-tasks that are sent on their own.

The vocabulary is that of ByteScheduler's unified abstraction (Peng et al., SOSP 2019): a task is *partitioned* into
sub-tasks, which are queued, sent and acknowledged one by one; becomes *ready* when its data exists; is *started* by the
core; and has *finished* when its last sub-task has arrived. Tasks know neither the transport nor the framework:
``launch`` is called with a sub-task that names an offset and a size (in parameters) of the task's flat buffer; nothing
is copied.

Lock order: ``ByteCore``'s lock may be held when a task's lock is taken, never the other way round; nothing
outside this module is called with a task's lock held.

Life of a sub-task (a task follows its sub-tasks)::

    CREATED --notify_ready--> READY --start--> STARTED --notify_finish--> FINISHED
       \_________________________\________________\________fail__________> FAILED
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from lightning_bytescheduler.checks import require_size
from lightning_bytescheduler.exceptions import SchedulerTimeoutError, TaskStateError

__all__ = [
    "ENDED",
    "CommTask",
    "NodePassage",
    "Passage",
    "SubCommTask",
    "TaskKey",
    "TaskListener",
    "TaskState",
    "part_size",
]


class TaskState(enum.Enum):
    """Where a task or sub-task stands."""

    CREATED = "created"
    READY = "ready"
    STARTED = "started"
    FINISHED = "finished"
    FAILED = "failed"


class Passage:
    """Of a part by way of a parameter server, for timelines: its stages, and when; in seconds of the core's clock.

    Args:
        server: Who adds it up.
        pushed: Bytes that go there; 0 where the server is in this process.
        pulled: Bytes that come back, at most.

    Attributes:
        server: As given.
        pushed: As given.
        pulled: Bytes that have come back.
        push: From when to when the part was on its way; nothing if it was not.
        began: When a sum that is formed in this process was begun.
        came: When the sum was there; 0 where nothing was done after that.
    """

    __slots__ = ("began", "came", "pulled", "push", "pushed", "server")

    def __init__(self, server: int, *, pushed: int, pulled: int) -> None:
        self.server = server
        self.pushed = pushed
        self.pulled = pulled
        self.push: tuple[float, float] | None = None
        self.began = time.perf_counter()
        self.came = 0.0

    @property
    def where(self) -> dict[str, int]:
        """Who has it elsewhere, for timelines."""
        return {"server": self.server}

    def sent(self, start: float, end: float) -> None:
        """The push has left, from ``start`` to ``end``."""
        self.push = start, end

    def stages(self, finished: float) -> Iterator[tuple[str, float, float, int]]:
        """(name, start, end, bytes) of each; for a part that was there at ``finished``.

        A pull begins when the push has left, and so has in it what the server waits for other workers.
        """
        came = self.came or finished
        if not self.pushed:
            yield "sum", self.began, came, 0
            return
        start, end = self.push or (self.began, came)
        end = min(end, came)  # who sends may be told later than who receives
        yield "push", min(start, end), end, self.pushed
        yield "pull", end, came, self.pulled


class NodePassage(Passage):
    """Of a part that the ranks of a node add up before one of them, the pusher, pushes the sum.

    Args:
        moved: Bytes that travel within the node before the push; and after the pull, if nothing else is said.
        server: See :class:`Passage`; of the pusher.
        pushed: See :class:`Passage`; of the pusher.
        pulled: See :class:`Passage`; of the pusher.
        pusher: Who that is, on the other ranks.

    Attributes:
        reduced: When the node's sum was there; on a rank that does not push, when its own part had left.
        returned: Bytes that travel within the node after the pull.
    """

    __slots__ = ("_moved", "_pusher", "reduced", "returned")

    def __init__(
        self, *, moved: int, server: int = -1, pushed: int = 0, pulled: int = 0, pusher: int | None = None
    ) -> None:
        super().__init__(server, pushed=pushed, pulled=pulled)
        self._moved = self.returned = moved
        self._pusher = pusher
        self.reduced = 0.0

    @property
    def where(self) -> dict[str, int]:
        """See :class:`Passage`."""
        return super().where if self._pusher is None else {"pusher": self._pusher}

    def stages(self, finished: float) -> Iterator[tuple[str, float, float, int]]:
        """See :class:`Passage`. A broadcast begins, where nothing is pushed, when the own part has left."""
        reduced = min(self.reduced or self.began, finished)
        yield "local reduce", self.began, reduced, self._moved
        if self._pusher is None:
            self.began = reduced
            yield from super().stages(finished)
        yield "local broadcast", (self.came or finished) if self._pusher is None else reduced, finished, self.returned


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
        encoded_bytes: What was sent, where that is another number than the task's ``wire_bytes`` makes it; for
            accounting, set by whoever sends.
        lane: On which it travels, see ``LaneChoice``; set by the deciding rank, and told to the others with it.
        charge: What it takes of the credit: its size, or less where its task has larger parts.
        passage: By way of a parameter server, if that is what it goes; set by whoever sends.
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
        "passage",
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
        self.passage: Passage | None = None
        self.charge = -(-size // parent.fold) if parent.takes_credit else 0
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


class TaskKey(NamedTuple):
    """What names a task on every rank alike, and travels with each decision to send a part of it.

    Keys are in the order of their steps, of a step's phases, and of a phase's buckets.

    Attributes:
        step: That the task is part of, the same on all ranks.
        phase: Of the step: which of its operations this is, where several are done to the same data.
        bucket: What the operation is done to.
    """

    step: int
    phase: int = 0
    bucket: int = 0

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase}, bucket {self.bucket}"


_ANY = TaskKey(0)
ENDED = (TaskState.FINISHED, TaskState.FAILED)


def part_size(size: int, largest: int) -> int:
    """Size of the equal parts of a tensor of ``size``; none exceeds ``largest``, the last may be a little smaller."""
    return -(-size // -(-size // largest))


def _equal_parts(size: int, largest: int) -> Iterator[int]:
    """Sizes of the equal parts of a tensor of ``size``, see :func:`part_size`."""
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
        key: What names this task on every rank alike; needed when ranks must agree on one order.
        immediate: Bypass queue and credit.
        wire_bytes: What each rank sends for one parameter of the tensor, in bytes; for accounting.
        on_end: Called once, on the thread that ended the task, after it has finished or failed
            (``task.error``). What it raises fails the task and aborts the core.
        fold: How many times as large as others its parts are. Each takes as much credit as one of those: for what
            travels in fewer bytes.
        takes_credit: Whether it waits for credit, and takes some. What does not is of one part, and somebody else's: it
            has its place in the order all the same, see ``MixedOrder`` in ``order.py``.

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
        fold: int = 1,
        takes_credit: bool = True,
    ) -> None:
        self.name = name
        self.takes_credit = takes_credit
        self.size = require_size("size", size)
        self.fold = fold
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
            return TaskState.READY if self._ready or TaskState.READY in states else TaskState.CREATED

    @property
    def error(self) -> BaseException | None:
        """Why the task failed, or ``None``."""
        return self._error

    def partition(self, size: int) -> tuple[SubCommTask, ...]:
        """Cut the task into sub-tasks no larger than ``size`` parameters, without copying.

        As few parts as that takes, and all of about the same size: a small rest would cost a message's start-up time
        for next to nothing. Every rank that uses the same size makes the same parts.

        Args:
            size: Largest part, in parameters.

        Returns:
            The parts, in order of offset.

        Raises:
            OptionError: If ``size`` is not a positive whole number.
            TaskStateError: If the task is partitioned already, or has ended.
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
        """Say that the whole task's data exists. Does nothing if it has ended: its owner learns that.

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
        """Whether any of the task's data exists that has not arrived, or its end is not known to all yet."""
        if self._ended or self._ready:
            return not self.done()
        return any(sub.state in (TaskState.READY, TaskState.STARTED) for sub in self._sub_tasks)

    def describe_outstanding(self) -> str:
        """What has not finished, in words, for error messages."""
        with self._lock:
            if not self._sub_tasks:
                return f"{self.name} (not partitioned, {'ready' if self._ready else 'not ready'})"
            open_subs = [s for s in self._sub_tasks if s.state not in ENDED]
            shown = ", ".join(f"{s.name} {s.state.value}" for s in open_subs[:4])
            shown += f" and {len(open_subs) - 4} more" if len(open_subs) > 4 else ""
            return shown or f"the callback of {self.name}"

    def fail(self, error: BaseException) -> None:
        """End the task with ``error``; sub-tasks that were not sent fail with it. Nothing if it has ended.

        What the core has chosen already is sent all the same: other ranks may have been told to expect it.
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
                return  # aborted meanwhile: the owner learns it from wait()
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
        """Give up on ``sub`` if it was chosen but never launched."""
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
        listener = self._listener  # read once: an enqueueing that does not succeed takes it away again
        with self._lock:
            launched = not sub._claimed
            if error is None and (sub.state is not TaskState.STARTED or not launched):
                state = sub.state.value if launched else "ready"
                raise TaskStateError(f"Cannot finish {sub.name}: it is {state}, not started.")
            if sub.state in ENDED:
                return
            if launched:  # else it is launched all the same, see fail(), and ends then
                sub.state = TaskState.FINISHED if error is None else TaskState.FAILED
            decided = error is not None and self._decide(error)
        # Parts may end on several threads at once; the task finishes when the listener knows of all of them, so
        # that whoever waited finds all credit returned.
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
        """Settle the outcome; called with the lock held. Returns whether it was open."""
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
        # The core has dealt with an ordinary exception; the thread that ended the task is not at fault.
        if failure is not None and (listener is None or not isinstance(failure, Exception)):
            raise failure

    def __repr__(self) -> str:
        return f"<CommTask {self.name!r} size={self.size} priority={self.priority} {self.state.value}>"
