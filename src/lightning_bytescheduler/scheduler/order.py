"""Which sub-task is sent next: by priority, by priority with somebody else's among them, or as another rank decided.

Over long ways also on which lane, so that what is urgent overtakes what is under way (``LaneChoice``).

Both orders are plain data structures that ``ByteCore`` calls under its own lock; they have no lock of their
own. What an order pops is *claimed*: it will be launched even if its task fails meanwhile, as other ranks may
have been told.
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
_MANY = 64  # under way on a lane, of which most have ended


@dataclass(frozen=True, slots=True)
class Decision:
    """One launch decision, as it travels from the deciding rank to the others.

    Attributes:
        key: The task's key, the same on every rank.
        partition_size: The size the deciding rank partitioned the task with, in parameters.
        index: Which sub-task is next.
        task_size: The task's size on the deciding rank, in parameters; ``None`` leaves it unchecked.
        lane: On which the sub-task travels, see ``LaneChoice``.
    """

    key: TaskKey
    partition_size: int
    index: int
    task_size: int | None = None
    lane: int = 0


class LaunchOrder(Protocol):
    """The order in which a core starts ready sub-tasks."""

    def admit(self, task: CommTask, partition_size: int) -> None:
        """Take in a task that was just enqueued."""

    def ready(self, sub_tasks: Iterable[SubCommTask]) -> None:
        """Take in sub-tasks whose data exists now."""

    def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
        """Claim and return the ready sub-task to start next, or return ``None`` when there is none.

        Args:
            credit_left: Whether it may be one that takes credit.
            overtaking: Where no credit is left: it may be one that is more urgent than this priority.
        """

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        """Called without the core's lock, before ``batch`` is started in this order."""

    def clear(self) -> None:
        """Forget everything that was not popped."""


class PriorityOrder:
    """Lowest priority number first; among equals, the task enqueued first, its parts in order of offset.

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
        """Claim and return the most urgent ready sub-task, skipping those that failed while they waited."""
        while self._heap and (credit_left or (overtaking is not None and self._heap[0][0] < overtaking)):
            sub = heapq.heappop(self._heap)[-1]
            if sub.claim():
                return sub
        return None

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        """Nobody has to be told."""

    def clear(self) -> None:
        """Forget everything queued."""
        self._heap.clear()


class MixedOrder(PriorityOrder):
    """By priority, with *foreign* tasks among them: collectives of others, which take no credit and have no priority.

    A foreign task is popped, before all else, as soon as every rank has submitted it (:meth:`submitted_everywhere`).
    Until then no task that was admitted after it is popped, but those of later phases: they follow from what has ended.
    Why nobody waits forever then is said in ``collectives/launch_order.py``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._foreign: deque[CommTask] = deque()  # that were not popped, in the order in which they were admitted
        self._foreign_popped = 0
        self._on_all = 0  # how many all ranks have submitted
        self._later: list[SubCommTask] = []  # ready, and admitted after the first of the foreign ones

    def admit(self, task: CommTask, partition_size: int) -> None:
        """See :class:`PriorityOrder`; a foreign task is of one part."""
        super().admit(task, partition_size if task.takes_credit else task.size)
        if not task.takes_credit:
            self._foreign.append(task)

    def ready(self, sub_tasks: Iterable[SubCommTask]) -> None:
        """Queue sub-tasks by priority, or behind the first of the foreign ones."""
        ours = [sub for sub in sub_tasks if sub.parent.takes_credit]
        if self._foreign:
            self._later += [sub for sub in ours if self._has_to_follow(sub.parent)]
            ours = [sub for sub in ours if not self._has_to_follow(sub.parent)]
        super().ready(ours)

    def _has_to_follow(self, task: CommTask) -> bool:
        return task.key.phase == 0 and task._sequence > self._foreign[0]._sequence

    def submitted_everywhere(self, count: int) -> None:
        """All ranks have submitted the first ``count`` foreign tasks."""
        self._on_all = max(self._on_all, count)

    def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
        """Claim and return a foreign sub-task that may go, or else the most urgent other one."""
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
        """Forget everything queued."""
        super().clear()
        self._foreign.clear()
        self._later.clear()


class AnnouncedOrder:
    """Exactly the order another rank decided on; each sub-task waits only for its own data here.

    A task is partitioned when the first decision about it arrives, with the size that decision carries, so
    the deciding rank may change its partition size at any time without an agreement.
    """

    def __init__(self) -> None:
        self._tasks: dict[TaskKey, CommTask] = {}
        self._popped: dict[TaskKey, int] = {}
        self._decisions: deque[Decision] = deque()

    def admit(self, task: CommTask, partition_size: int) -> None:
        """Hold ``task`` until it is named by a decision; ``partition_size`` is the deciding rank's affair.

        Raises:
            LaunchOrderError: If a task with the same key is held already.
        """
        if task.key in self._tasks:
            raise LaunchOrderError(f"A task of {task.key} is held already: {self._tasks[task.key].name!r}.")
        self._tasks[task.key] = task

    def ready(self, sub_tasks: Iterable[SubCommTask]) -> None:
        """Readiness is read from the task when its turn comes."""

    def announce(self, decisions: Iterable[Decision]) -> None:
        """Append decisions of the deciding rank, in its order."""
        self._decisions.extend(decisions)

    def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
        """Claim and return the next announced sub-task if its data exists here.

        Args:
            credit_left: Whether it may be one that takes credit.
            overtaking: Given where what overtakes may go without; whether it does, the deciding rank has seen to.

        Raises:
            LaunchOrderError: If the decision does not fit the task that carries its key on this rank.
            BaseException: What that task has failed with here: it can no longer be sent, and sending what
                comes after it instead would pair it with another tensor on the other ranks.
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
        """What ``decision`` names here, or ``None`` if ``task`` is not what the deciding rank has."""
        size = decision.partition_size
        if size < 1 or decision.task_size not in (None, task.size):
            return None
        sub_tasks = task.sub_tasks or task.partition(size)
        if sub_tasks[0].size != part_size(task.size, size) or not 0 <= decision.index < len(sub_tasks):
            return None
        return sub_tasks[decision.index]

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        """The decision came from elsewhere; nobody has to be told."""

    def clear(self) -> None:
        """Forget all tasks and decisions."""
        self._tasks.clear()
        self._popped.clear()
        self._decisions.clear()


class LaneChoice:
    """Chooses lanes, for one sub-task after the other as they are launched; under the core's launching lock.

    A *lane* is a set of connections between all ranks. What is sent on one lane leaves in that order. Over a long way
    much has to be under way, lest the link stands idle: an urgent sub-task would wait a tenth of a second behind it. On
    another lane it shares the link with it, as connections do. So what is more urgent than the one launched before it
    goes to the lane on which less is under way, and what follows stays there. It may also take a second credit, as it
    would wait for the first. Four workers, 500 Mbit/s, 20 ms there and back: steps took 1.09 times their bound with one
    lane, 1.08 with two, and 1.05 with the second credit, too.

    Only the deciding rank chooses. Its choice travels with the decision: each lane has one order of launches on all
    ranks.
    """

    def __init__(self) -> None:
        self._under_way: list[list[SubCommTask]] = [[] for _ in range(LANES)]
        self._lane = 0
        self._last_priority: float = -math.inf

    def choose(self, sub_task: SubCommTask) -> int:
        """The lane of what is launched next."""
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
        """What is under way on a lane, in parameters; forgets what has ended."""
        self._under_way[lane] = [sub for sub in self._under_way[lane] if sub.state not in ENDED]
        return sum(sub.charge for sub in self._under_way[lane])
