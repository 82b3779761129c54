"""The core: a queue of ready sub-tasks and a window of credit in front of the network.

Seed 000, "Scheduling Algorithm": a sub-task starts while credit remains, taking its size from the credit; finishing
returns it. As in the published loop, the check is "credit left > 0", so what is in flight may exceed the credit by
less than one sub-task, and a sub-task larger than the whole credit can still be sent.

Threads: one dispatcher, named ``<name>-dispatcher``, owned by the core; ``shutdown`` ends it within a bound.
Lock order: the core's condition, then a task's lock (see ``task.py``). ``launch``, ``decided`` and observers are
called with no lock held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from lightning_bytescheduler.exceptions import (
    OptionError,
    SchedulerClosedError,
    SchedulerTimeoutError,
)
from lightning_bytescheduler.scheduler.order import LaunchOrder, PriorityOrder
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["ByteCore"]

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0  # only bounds how long a lost wake-up could stay unnoticed; work arrives by notification


def _positive(option: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(option, value, "a positive whole number of parameters")
    return value


class ByteCore:
    """Priority queue and credit window.

    Args:
        partition_size: Largest sub-task, in parameters. Clamped to ``credit``.
        credit: How much may be in flight, in parameters.
        order: Which ready sub-task is next; by priority unless given.
        observer: Called with each sub-task that has finished, its times (``ready_at``, ``started_at``,
            ``finished_at``, seconds of ``clock``) filled in.
        name: Prefix of the thread's name.
        clock: Seconds; injected by tests.
        debug: Log each decision at level DEBUG.

    Raises:
        OptionError: If ``partition_size`` or ``credit`` is not a positive whole number.
    """

    def __init__(
        self,
        *,
        partition_size: int,
        credit: int,
        order: LaunchOrder | None = None,
        observer: Callable[[SubCommTask], None] | None = None,
        name: str = "bytescheduler",
        clock: Callable[[], float] = time.perf_counter,
        debug: bool = False,
    ) -> None:
        self._partition_size = _positive("partition_size", partition_size)
        self._credit = _positive("credit", credit)
        self._order: LaunchOrder = PriorityOrder() if order is None else order
        self._observer = observer
        self._clock = clock
        self._debug = debug
        self._changed = threading.Condition()
        self._open_tasks: dict[int, CommTask] = {}  # enqueued, not ended; in order of arrival
        self._in_flight: set[SubCommTask] = set()
        self._in_flight_size = 0
        self._immediate_in_flight: set[SubCommTask] = set()
        self._closed = False
        self._abort_cause: BaseException | None = None
        self._dispatcher = threading.Thread(target=self._dispatch, name=f"{name}-dispatcher", daemon=True)
        self._dispatcher.start()

    @property
    def partition_size(self) -> int:
        """Largest sub-task of tasks enqueued from now on, in parameters; never above the credit."""
        return min(self._partition_size, self._credit)

    @partition_size.setter
    def partition_size(self, value: int) -> None:
        value = _positive("partition_size", value)
        with self._changed:
            self._partition_size = value

    @property
    def credit(self) -> int:
        """How much may be in flight, in parameters. What is in flight when it changes stays accounted for."""
        return self._credit

    @credit.setter
    def credit(self, value: int) -> None:
        value = _positive("credit", value)
        with self._changed:
            self._credit = value
            self._changed.notify_all()

    @property
    def in_flight(self) -> int:
        """What was started under credit and has not finished, in parameters."""
        return self._in_flight_size

    @property
    def abort_cause(self) -> BaseException | None:
        """Why the core was aborted, or ``None``."""
        return self._abort_cause

    def enqueue(self, task: CommTask) -> None:
        """Hand a task to the core; it is sent once ready.

        An *immediate* task is partitioned, declared ready and started on this thread, past queue and credit.

        Raises:
            SchedulerClosedError: If the core was shut down.
            TaskStateError: If the task was enqueued before.
            BaseException: The cause of an abort, if the core was aborted.
        """
        with self._changed:
            self._check_open()
            task._attach(self)
            self._open_tasks[id(task)] = task
            if task.immediate:
                task.partition(self.partition_size)
                self._immediate_in_flight.update(task.sub_tasks)
            else:
                self._order.admit(task, self.partition_size)
        if task.immediate:
            task.notify_ready()
            for sub in task.sub_tasks:
                sub.started_at = self._clock()
                sub.start()

    def update_order(self, update: Callable[[], None]) -> None:
        """Run ``update``, which changes the order, under the core's lock; then look for work again."""
        with self._changed:
            update()
            self._changed.notify_all()

    def drain(self, timeout: float) -> None:
        """Wait until everything that was made ready has ended. What never became ready is not waited for.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            SchedulerTimeoutError: Names what is still outstanding.
            BaseException: The cause of an abort.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if self._abort_cause is not None:
                    raise self._abort_cause
                waiting_for = [t for t in self._open_tasks.values() if t.any_ready()]
                waiting_for += [s.parent for s in self._in_flight if s.parent not in waiting_for]
                if not waiting_for:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    names = "; ".join(t.describe_outstanding() for t in waiting_for[:4])
                    raise SchedulerTimeoutError(f"Communication did not drain within {timeout:g} s: {names}.")
                self._changed.wait(min(left, _IDLE_WAIT_S))

    def abort(self, cause: BaseException) -> None:
        """Fail every open task with ``cause`` now; later calls raise it too. What is in flight is left to end."""
        with self._changed:
            if self._abort_cause is not None or self._closed:
                return
            self._abort_cause = cause
            self._order.clear()
            open_tasks = list(self._open_tasks.values())
            self._open_tasks.clear()
            self._changed.notify_all()
        for task in open_tasks:
            task.fail(cause)

    def shutdown(self, *, timeout: float, drain: bool = True) -> None:
        """Stop the dispatcher; idempotent.

        Args:
            timeout: Bound on the whole call, in seconds.
            drain: Let everything that is ready finish first. Tasks that cannot finish fail with
                ``SchedulerClosedError``.

        Raises:
            SchedulerTimeoutError: If draining, or the dispatcher, did not end in time. The core is closed all the same.
        """
        deadline = time.monotonic() + timeout
        late: BaseException | None = None
        if drain and self._abort_cause is None and not self._closed:
            try:
                self.drain(timeout)
            except BaseException as error:
                late = error
        with self._changed:
            self._closed = True
            self._order.clear()
            open_tasks = list(self._open_tasks.values())
            self._open_tasks.clear()
            self._changed.notify_all()
        for task in open_tasks:
            task.fail(SchedulerClosedError(f"Task {task.name!r} was not sent: the scheduler has been shut down."))
        if threading.current_thread() is not self._dispatcher:
            self._dispatcher.join(max(0.1, deadline - time.monotonic()))
            if self._dispatcher.is_alive() and late is None:
                late = SchedulerTimeoutError(f"Thread {self._dispatcher.name!r} did not stop within {timeout:g} s.")
        if late is not None:
            raise late

    def __enter__(self) -> ByteCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown(timeout=10.0, drain=error is None)

    def sub_tasks_ready(self, task: CommTask, sub_tasks: list[SubCommTask]) -> None:
        """Called by tasks; not for users."""
        now = self._clock()
        for sub in sub_tasks:
            sub.ready_at = now
        if task.immediate:
            return
        with self._changed:
            self._order.ready(sub_tasks)
            self._changed.notify_all()

    def sub_task_ended(self, sub_task: SubCommTask) -> None:
        """Called by tasks; not for users."""
        sub_task.finished_at = self._clock()
        with self._changed:
            started = sub_task in self._in_flight
            if started:
                self._in_flight.discard(sub_task)
                self._in_flight_size -= sub_task.size
            self._immediate_in_flight.discard(sub_task)
            if sub_task.parent.all_ended():
                self._open_tasks.pop(id(sub_task.parent), None)
            self._changed.notify_all()
        if self._observer is not None:
            self._observer(sub_task)

    def _check_open(self) -> None:
        if self._abort_cause is not None:
            raise self._abort_cause
        if self._closed:
            raise SchedulerClosedError("Cannot enqueue a task, as the scheduler has been shut down.")

    def _select(self) -> list[SubCommTask]:
        """Pop what credit allows; called with the lock held."""
        batch: list[SubCommTask] = []
        while self._in_flight_size < self._credit:
            sub = self._order.pop()
            if sub is None:
                break
            self._in_flight.add(sub)
            self._in_flight_size += sub.size
            batch.append(sub)
        return batch

    def _dispatch(self) -> None:
        while True:
            try:
                with self._changed:
                    batch = [] if self._closed or self._abort_cause else self._select()
                    while not batch:
                        if self._closed:
                            return
                        self._changed.wait(_IDLE_WAIT_S)
                        if self._abort_cause is None and not self._closed:
                            batch = self._select()
                self._order.decided(batch)
                for sub in batch:
                    if self._debug:
                        log.debug(
                            "start %s size=%d priority=%d in_flight=%d credit=%d",
                            sub.name, sub.size, sub.priority, self._in_flight_size, self._credit,
                        )  # fmt: skip
                    sub.started_at = self._clock()
                    sub.start()
            except BaseException as error:
                # Whatever went wrong while launching, nobody may be left waiting for it.
                log.debug("dispatcher failed", exc_info=True)
                self.abort(error)
