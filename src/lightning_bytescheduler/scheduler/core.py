"""The core: a queue of ready sub-tasks and a window of credit in front of the network.

The algorithm is ByteScheduler's (Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
Acceleration", SOSP 2019): a sub-task starts while credit remains and takes its size from the credit; its end returns
it. As in the paper, the check is "credit left > 0". So at most one sub-task may exceed the credit, and a sub-task
larger than the whole credit can be sent.

Threads: one dispatcher, named ``<name>-dispatcher``, owned by the core; ``shutdown`` ends it within a bound. It starts
sub-tasks that have become ready. A thread that returns credit or brings decisions starts what these allow itself, as
waking another thread would cost more than the launch. Only one thread launches at a time. It holds the *launching* lock
and also starts what other threads allow in the meantime, so there is one order of launches.

Lock order: the launching lock, then the core's, then a task's (see ``task.py``). ``launch`` and ``decided`` are called
with only the launching lock held. ``on_end`` and observers are called on the thread that ended the sub-task, which
holds the launching lock only if ``launch`` itself ended it. If one of them raises, the core aborts, which ends all
waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

from lightning_bytescheduler.checks import require_bool, require_size
from lightning_bytescheduler.exceptions import SchedulerClosedError, SchedulerTimeoutError
from lightning_bytescheduler.scheduler.order import LaunchOrder, PriorityOrder
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskState
from lightning_bytescheduler.scheduler.threads import prefer_short_turns

__all__ = ["ByteCore"]

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0  # bounds the delay of a lost wake-up; normally a notification wakes the thread


class ByteCore:
    """Priority queue and credit window.

    Args:
        partition_size: Largest sub-task, in parameters. Clamped to ``credit``.
        credit: Most that may be in flight, in parameters.
        one_at_a_time: Start a sub-task only when nothing is in flight, whatever the credit.
        overtaking: Give sub-tasks more urgent than all in flight a second credit, see ``LaneChoice``.
        order: Order of ready sub-tasks; by priority if ``None``.
        observer: Called with each finished sub-task, with its times (``ready_at``, ``started_at``, ``finished_at``,
            seconds of ``clock``).
        name: Prefix of the thread's name.
        clock: Returns seconds; replaced by tests.

    Raises:
        OptionError: If ``partition_size`` or ``credit`` is not a positive whole number.
    """

    def __init__(
        self,
        *,
        partition_size: int,
        credit: int,
        one_at_a_time: bool = False,
        overtaking: bool = False,
        order: LaunchOrder | None = None,
        observer: Callable[[SubCommTask], None] | None = None,
        name: str = "bytescheduler",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._partition_size = require_size("partition_size", partition_size)
        self._credit = require_size("credit", credit)
        self._one_at_a_time = require_bool("one_at_a_time", one_at_a_time)
        self._overtaking = require_bool("overtaking", overtaking)
        self._order: LaunchOrder = PriorityOrder() if order is None else order
        self._observer = observer
        self._clock = clock
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # for the dispatcher
        self._ended = threading.Condition(self._lock)  # for drain()
        self._launching = threading.Lock()
        self._launcher: int | None = None  # id of the thread that holds the launching lock
        self._woken = False  # there may be work for the dispatcher
        self._look_again = False  # a thread asks for a launch, and no launching thread has looked since
        self._open_tasks: dict[int, CommTask] = {}  # enqueued and not concluded, in order of arrival
        self._in_flight: set[SubCommTask] = set()  # includes immediate ones, which take no credit
        self._in_flight_size = 0
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
        self._partition_size = require_size("partition_size", value)

    @property
    def credit(self) -> int:
        """Most that may be in flight, in parameters. A change keeps what is in flight accounted for."""
        return self._credit

    @credit.setter
    def credit(self, value: int) -> None:
        with self._lock:
            self._credit = require_size("credit", value)
            self._wake()

    @property
    def in_flight(self) -> int:
        """What was started under credit and has not finished, in parameters."""
        return self._in_flight_size

    @property
    def abort_cause(self) -> BaseException | None:
        """Why the core was aborted, or ``None``."""
        return self._abort_cause

    def enqueue(self, task: CommTask, *, cut_like: CommTask | None = None) -> None:
        """Enqueue a task; it is sent once ready.

        An *immediate* task is partitioned, marked ready and started on this thread, without queue and credit.

        Args:
            task: A task that was never enqueued.
            cut_like: An earlier task of the same size whose parts ``task`` has to match, whatever the partition size is
                now. If another rank decides, that rank ensures this.

        Raises:
            SchedulerClosedError: If the core was shut down.
            TaskStateError: If the task was enqueued or partitioned before, or has ended.
            LaunchOrderError: If the order cannot take it.
            BaseException: The cause of an abort, if the core was aborted; the error of an immediate task's ``launch``.
        """
        with self._lock:
            if self._abort_cause is not None:
                raise self._abort_cause
            if self._closed:
                raise SchedulerClosedError("Cannot enqueue a task, as the scheduler has been shut down.")
            task._attach(self)
            partition_size = self.partition_size
            if cut_like is not None and cut_like.sub_tasks:
                partition_size = cut_like.sub_tasks[0].size
            try:
                if task.immediate:
                    task.partition(partition_size)
                else:
                    self._order.admit(task, partition_size)
            except BaseException:
                task._listener = None
                raise
            self._open_tasks[id(task)] = task
        if not task.immediate:
            return
        task.notify_ready()
        for sub in task.sub_tasks:
            with self._lock:
                if self._stopped or not sub.claim():
                    return  # failed or aborted: wait() raises the error
                self._in_flight.add(sub)
            sub.started_at = self._clock()
            sub.start()

    def update_order(self, update: Callable[[], None]) -> None:
        """Run ``update``, which changes the order, under the core's lock; then start what that allows."""
        with self._lock:
            update()
        self._launch_allowed()

    def launch_allowed(self) -> None:
        """Start on this thread what is ready and allowed; must not be called from a callback."""
        self._launch_allowed()

    def drain(self, timeout: float) -> None:
        """Wait until everything that became ready has ended, with its callbacks.

        Tasks that never became ready are not awaited. A callback must not call this, as it would wait for itself.

        Args:
            timeout: Longest wait in seconds.

        Raises:
            SchedulerTimeoutError: Names what has not ended.
            BaseException: The cause of an abort.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                if self._abort_cause is not None:
                    raise self._abort_cause
                waiting_for = [t for t in self._open_tasks.values() if t.any_ready()]
                if not waiting_for and not self._in_flight:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    waiting_for += {s.parent for s in self._in_flight}.difference(waiting_for)
                    names = "; ".join(t.describe_outstanding() for t in waiting_for[:4])
                    raise SchedulerTimeoutError(f"Communication did not drain within {timeout:g} s: {names}.")
                self._ended.wait(min(left, _IDLE_WAIT_S))

    def abort(self, cause: BaseException) -> None:
        """Fail every open task with ``cause``; later calls raise it too. What is in flight may still end."""
        with self._lock:
            if self._stopped:
                return
            self._abort_cause = cause
            open_tasks = self._take_open_tasks()
        for task in open_tasks:
            task.fail(cause)

    def shutdown(self, *, timeout: float, drain: bool = True) -> None:
        """Stop the dispatcher; afterwards nothing is launched. Idempotent.

        Args:
            timeout: Bound on the whole call, in seconds.
            drain: Let everything that is ready finish first. Tasks that cannot finish fail with
                ``SchedulerClosedError``.

        Raises:
            SchedulerTimeoutError: If draining, or the dispatcher, did not end in time.
            BaseException: The cause of an abort during draining. The core is closed in each case.
        """
        deadline = time.monotonic() + timeout
        late: BaseException | None = None
        try:
            if drain and not self._stopped:
                self.drain(timeout)
        except BaseException as error:
            late = error
        with self._lock:
            self._closed = True
            open_tasks = self._take_open_tasks()
        for task in open_tasks:
            task.fail(_unfinished(task))
        if threading.current_thread() is not self._dispatcher:
            self._dispatcher.join(max(0.1, deadline - time.monotonic()))
            if self._dispatcher.is_alive() and late is None:
                late = SchedulerTimeoutError(f"{self._dispatcher.name!r} did not stop within {timeout:g} s.")
        if self._launcher != threading.get_ident():  # wait for a launch on another thread
            if self._launching.acquire(timeout=max(0.1, deadline - time.monotonic())):
                self._launching.release()
            elif late is None:
                late = SchedulerTimeoutError(f"A launch on another thread did not end within {timeout:g} s.")
        if late is not None:
            raise late

    def __enter__(self) -> ByteCore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown(timeout=10.0, drain=error is None)

    # Called by tasks (TaskListener), not by users.

    def now(self) -> float:
        """Seconds of the core's clock."""
        return self._clock()

    def sub_tasks_ready(self, task: CommTask, sub_tasks: list[SubCommTask]) -> None:
        """Queue sub-tasks that have become ready."""
        with self._lock:
            if not task.immediate and not self._stopped:
                self._order.ready(sub_tasks)
                self._wake()

    def sub_task_ended(self, sub_task: SubCommTask) -> None:
        """Return the credit of a sub-task that has finished or failed."""
        sub_task.finished_at = self._clock()
        with self._lock:
            if sub_task in self._in_flight:
                self._in_flight.remove(sub_task)
                if not sub_task.parent.immediate:
                    self._in_flight_size -= sub_task.charge
            self._ended.notify_all()
        try:
            if self._observer is not None and sub_task.state is TaskState.FINISHED:
                self._observer(sub_task)
        except Exception as error:
            self._callback_failed(f"observer of {sub_task.name}", error)

    def task_ended(self, task: CommTask, callback_error: BaseException | None) -> None:
        """Drop a task whose callback and waiters have been told."""
        with self._lock:
            self._open_tasks.pop(id(task), None)
            self._ended.notify_all()
        if callback_error is not None:
            self._callback_failed(f"callback of {task.name}", callback_error)

    def credit_returned(self) -> None:
        """Start what the end of a sub-task allows, on the thread that ended it."""
        self._launch_allowed()

    def _callback_failed(self, what: str, error: BaseException) -> None:
        log.error("The %s failed; the scheduler stops.", what, exc_info=error)
        self.abort(error)

    def _wake(self) -> None:
        self._woken = True
        self._work.notify()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._abort_cause is not None

    def _take_open_tasks(self) -> list[CommTask]:
        self._order.clear()
        open_tasks = list(self._open_tasks.values())
        self._open_tasks.clear()
        self._work.notify_all()
        self._ended.notify_all()
        return open_tasks

    def _dispatch(self) -> None:
        prefer_short_turns()
        while True:
            with self._lock:
                if not self._woken and not self._closed:
                    self._work.wait(_IDLE_WAIT_S)
                if self._closed:
                    return
                self._woken = False
            self._launch_allowed()

    def _launch_allowed(self) -> None:
        """Start what credit allows, unless another thread is launching, which then starts this too.

        That thread looks once more after it has released the launching lock, so it sees every change made before
        :attr:`_look_again` was set.
        """
        self._look_again = True
        while self._look_again and self._launching.acquire(blocking=False):
            self._launcher = threading.get_ident()
            try:
                self._look_again = False
                while batch := self._select():
                    self._launch(batch)
            finally:
                self._launcher = None
                self._launching.release()

    def _select(self) -> list[SubCommTask]:
        batch: list[SubCommTask] = []
        with self._lock:
            try:
                while not self._stopped:
                    credit = 1 if self._one_at_a_time else self._credit
                    sub = self._order.pop(credit_left=self._in_flight_size < credit, overtaking=self._overtaken(credit))
                    if sub is None:
                        break
                    self._in_flight.add(sub)
                    self._in_flight_size += sub.charge
                    batch.append(sub)
                return batch
            except BaseException as error:
                failure = error
        self._cannot_launch(batch, failure)
        return []

    def _overtaken(self, credit: int) -> int | None:
        """Return the most urgent priority in flight while the second credit lasts, otherwise ``None``."""
        if not self._overtaking or not credit <= self._in_flight_size < 2 * credit:
            return None
        return min((sub.priority for sub in self._in_flight if sub.parent.takes_credit), default=None)

    def _launch(self, batch: list[SubCommTask]) -> None:
        try:
            self._start(batch)
        except BaseException as error:
            self._cannot_launch(batch, error)
        else:
            if self._stopped:
                self._withdraw(batch)

    def _cannot_launch(self, batch: list[SubCommTask], error: BaseException) -> None:
        """Abort after an error during a launch, so that all waits end."""
        log.debug("launching failed", exc_info=error)
        self.abort(error)
        self._withdraw(batch)

    def _start(self, batch: list[SubCommTask]) -> None:
        self._order.decided(batch)
        for sub in batch:
            if self._stopped:
                return
            log.debug("start %r in_flight=%d credit=%d", sub, self._in_flight_size, self._credit)
            sub.started_at = self._clock()
            sub.start()

    def _withdraw(self, batch: list[SubCommTask]) -> None:
        """Return the credit of claimed sub-tasks that will not be launched."""
        for sub in batch:
            sub.parent._withdraw(sub, self._abort_cause or _unfinished(sub.parent))


def _unfinished(task: CommTask) -> SchedulerClosedError:
    return SchedulerClosedError(f"Task {task.name!r} did not finish: the scheduler has been shut down.")
