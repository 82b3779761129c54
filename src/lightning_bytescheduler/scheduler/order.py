"""The order of launches: by priority, by priority with other collectives among them, or as another rank decided.

On links with high latency ``LaneChoice`` also selects a lane, so that urgent sub-tasks overtake those in flight.

The orders are plain data structures without locks; ``ByteCore`` calls them under its own lock. A popped sub-task is
*claimed*: it will be launched even if its task fails, as other ranks may have been told.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_bytescheduler.exceptions import LaunchOrderError
from lightning_bytescheduler.scheduler.task import ENDED, CommTask, SubCommTask, TaskKey, part_size

__all__ = ["LANES", "AnnouncedOrder", "Decision", "LaneChoice", "LaunchOrder", "MixedOrder", "PriorityOrder"]

LANES = 2
_MANY = 64  # sub-tasks on a lane before ended ones are removed


@dataclass(frozen=True, slots=True)
class Decision:
    """One launch decision, as sent from the deciding rank to the others.

    Attributes:
        key: The task's key, the same on every rank.
        partition_size: Partition size of the task on the deciding rank, in parameters.
        index: Index of the next sub-task.
        task_size: The task's size on the deciding rank, in parameters; ``None`` leaves it unchecked.
        lane: Lane of the sub-task, see ``LaneChoice``.
    """

    key: TaskKey
    partition_size: int
    index: int
    task_size: int | None = None
    lane: int = 0


class LaunchOrder(Protocol):
    """The order in which a core starts ready sub-tasks."""

    def admit(self, task: CommTask, partition_size: int) -> None:
        """Add a task that was just enqueued."""

    def ready(self, sub_tasks: Iterable[SubCommTask]) -> None:
        """Add sub-tasks whose data is complete."""

    def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
        """Claim and return the ready sub-task to start next, or return ``None`` if there is none.

        Args:
            credit_left: Whether a sub-task that takes credit may start.
            overtaking: Without credit left, one that is more urgent than this priority may start.
        """

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        """Called without the core's lock, before ``batch`` is started in this order."""

    def clear(self) -> None:
        """Drop everything that was not popped."""


class PriorityOrder:
    """Lowest priority number first; among equals the task enqueued first, its parts in order of offset.

    Source: the scheduling algorithm of ByteScheduler (Peng et al., SOSP 2019).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, SubCommTask]] = []
        self._admitted = 0

    def admit(self, task: CommTask, partition_size: int) -> None:
        """Partition ``task`` at once."""
        self._admitted += 1
        task._sequence = self._admitted
        task.partition(partition_size)

    def ready(self, sub_tasks: Iterable[SubCommTask]) -> None:
        """Queue sub-tasks by priority."""
        for sub in sub_tasks:
            heapq.heappush(self._heap, (sub.priority, sub.parent._sequence, sub.index, sub))

    def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
        """Claim and return the most urgent ready sub-task, skipping those that have failed."""
        while self._heap and (credit_left or (overtaking is not None and self._heap[0][0] < overtaking)):
            sub = heapq.heappop(self._heap)[-1]
            if sub.claim():
                return sub
        return None

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        """No other rank has to be told."""

    def clear(self) -> None:
        """Drop everything queued."""
        self._heap.clear()


class MixedOrder(PriorityOrder):
    """By priority, with *foreign* tasks among them: other code's collectives, without credit and priority.

    A foreign task is popped before all others once every rank has submitted it (:meth:`submitted_everywhere`). Until
    then no task admitted after it is popped, except those of later phases, which follow from tasks that have ended.
    ``collectives/launch_order.py`` explains why this cannot deadlock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._foreign: deque[CommTask] = deque()  # not popped yet, in order of admission
        self._foreign_popped = 0
        self._on_all = 0  # number of foreign tasks that all ranks have submitted
        self._later: list[SubCommTask] = []  # ready, and admitted after the first foreign task

    def admit(self, task: CommTask, partition_size: int) -> None:
        """See :class:`PriorityOrder`; a foreign task has one part."""
        super().admit(task, partition_size if task.takes_credit else task.size)
        if not task.takes_credit:
            self._foreign.append(task)

    def ready(self, sub_tasks: Iterable[SubCommTask]) -> None:
        """Queue sub-tasks by priority, or behind the first foreign task."""
        ours = [sub for sub in sub_tasks if sub.parent.takes_credit]
        if self._foreign:
            self._later += [sub for sub in ours if self._has_to_follow(sub.parent)]
            ours = [sub for sub in ours if not self._has_to_follow(sub.parent)]
        super().ready(ours)

    def _has_to_follow(self, task: CommTask) -> bool:
        return task.key.phase == 0 and task._sequence > self._foreign[0]._sequence

    def submitted_everywhere(self, count: int) -> None:
        """Record that all ranks have submitted the first ``count`` foreign tasks."""
        self._on_all = max(self._on_all, count)

    def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
        """Claim and return an allowed foreign sub-task, otherwise the most urgent other one."""
        while self._foreign and self._may_go(self._foreign[0]):
            task = self._foreign.popleft()
            self._foreign_popped += 1
            later, self._later = self._later, []
            self.ready(later)
            if task.sub_tasks[0].claim():
                return task.sub_tasks[0]
        return super().pop(credit_left=credit_left, overtaking=overtaking)

    def _may_go(self, task: CommTask) -> bool:
        return task.ready and self._on_all > self._foreign_popped

    def clear(self) -> None:
        """Drop everything queued."""
        super().clear()
        self._foreign.clear()
        self._later.clear()


class AnnouncedOrder:
    """The order that another rank decided; each sub-task waits only for its own data here.

    A task is partitioned when the first decision about it arrives, with the partition size in that decision. So the
    deciding rank may change its partition size at any time without an agreement.
    """

    def __init__(self) -> None:
        self._tasks: dict[TaskKey, CommTask] = {}
        self._popped: dict[TaskKey, int] = {}
        self._decisions: deque[Decision] = deque()

    def admit(self, task: CommTask, partition_size: int) -> None:
        """Hold ``task`` until a decision names it; ``partition_size`` is ignored.

        Raises:
            LaunchOrderError: If a task with the same key is already held.
        """
        if task.key in self._tasks:
            raise LaunchOrderError(f"A task of {task.key} is held already: {self._tasks[task.key].name!r}.")
        self._tasks[task.key] = task

    def ready(self, sub_tasks: Iterable[SubCommTask]) -> None:
        """Do nothing: readiness is read from the task when its turn comes."""

    def announce(self, decisions: Iterable[Decision]) -> None:
        """Append decisions of the deciding rank, in its order."""
        self._decisions.extend(decisions)

    def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
        """Claim and return the next announced sub-task if its data is complete here.

        Args:
            credit_left: Whether a sub-task that takes credit may start.
            overtaking: Not ``None`` if an overtaking one may start without credit; the deciding rank has chosen it.

        Raises:
            LaunchOrderError: If the decision does not fit the task with its key on this rank.
            BaseException: The error of that task. It cannot be sent, and sending a later one instead would pair it with
                another tensor on the other ranks.
        """
        if not self._decisions:
            return None
        decision = self._decisions[0]
        task = self._tasks.get(decision.key)
        if task is None:
            return None
        if task.error is not None:
            raise task.error
        if not task.ready or (task.takes_credit and not credit_left and overtaking is None):
            return None
        sub = self._part(task, decision)
        if not task.takes_credit and sub is None:
            raise LaunchOrderError(
                f"As collective {decision.key.bucket} of DDP's process group, rank 0 launches another one than this "
                f"rank, where it is {task.name!r}. Every rank must call the same collectives in the same order."
            )
        if sub is None or not sub.claim():
            raise task.error or LaunchOrderError(
                f"Rank 0 launches part {decision.index} of the task of {decision.key}, cut at "
                f"{decision.partition_size} parameters, but here it is {task.name!r} with {task.size} "
                f"parameters in {len(task.sub_tasks)} parts, {self._popped.get(decision.key, 0)} of them "
                "launched. Every rank must build the same model and use the same bucket sizes."
            )
        sub.lane = decision.lane
        self._decisions.popleft()
        popped = self._popped.pop(decision.key, 0) + 1
        if popped == len(task.sub_tasks):
            del self._tasks[decision.key]
        else:
            self._popped[decision.key] = popped
        return sub

    @staticmethod
    def _part(task: CommTask, decision: Decision) -> SubCommTask | None:
        """Return the sub-task that ``decision`` names, or ``None`` if ``task`` differs from the deciding rank's."""
        size = decision.partition_size
        if size < 1 or decision.task_size not in (None, task.size):
            return None
        sub_tasks = task.sub_tasks or task.partition(size)
        if sub_tasks[0].size != part_size(task.size, size) or not 0 <= decision.index < len(sub_tasks):
            return None
        return sub_tasks[decision.index]

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        """Another rank decided, so no rank has to be told."""

    def clear(self) -> None:
        """Drop all tasks and decisions."""
        self._tasks.clear()
        self._popped.clear()
        self._decisions.clear()


class LaneChoice:
    """Chooses lanes for sub-tasks one by one, as they are launched; under the core's launching lock.

    A *lane* is a set of connections between all ranks, on which sub-tasks are sent in order. With high latency much has
    to be in flight to fill the link, and an urgent sub-task would wait behind all of it. On another lane it shares the
    link. So a sub-task that is more urgent than the one launched before it goes to the lane with less in flight, and
    later ones stay there. It may also take a second credit instead of waiting for the first.

    Only the deciding rank chooses. Its choice travels with the decision, so each lane has one order of launches on all
    ranks.
    """

    def __init__(self) -> None:
        self._under_way: list[list[SubCommTask]] = [[] for _ in range(LANES)]
        self._lane = 0
        self._last_priority: float = -math.inf

    def choose(self, sub_task: SubCommTask) -> int:
        """Return the lane of the next launch."""
        if sub_task.priority < self._last_priority:
            loads = [self._load(lane) for lane in range(LANES)]
            least = min(range(LANES), key=loads.__getitem__)
            if loads[least] + sub_task.charge < loads[self._lane]:
                self._lane = least
        self._last_priority = sub_task.priority
        if len(self._under_way[self._lane]) >= _MANY:
            self._load(self._lane)
        self._under_way[self._lane].append(sub_task)
        return self._lane

    def _load(self, lane: int) -> int:
        """Return what is in flight on a lane, in parameters; removes ended sub-tasks."""
        self._under_way[lane] = [sub for sub in self._under_way[lane] if sub.state not in ENDED]
        return sum(sub.charge for sub in self._under_way[lane])
