from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import LaunchOrderError, TaskStateError
from lightning_bytescheduler.scheduler import (
    AnnouncedOrder,
    ByteCore,
    CommTask,
    Decision,
    LaunchOrder,
    PriorityOrder,
    SubCommTask,
    TaskKey,
    TaskState,
)
from tests.scheduler.harness import ManualTransport, enqueue, running_core, settle
from tests.support.waiting import WAIT

FIRST, SECOND = TaskKey(0, bucket=0), TaskKey(0, bucket=1)


class Holder:
    """What a core does for its order, on the calling thread."""

    def __init__(self, order: LaunchOrder) -> None:
        self.order = order

    def now(self) -> float:
        return 0.0

    def sub_tasks_ready(self, task: CommTask, sub_tasks: list[SubCommTask]) -> None:
        self.order.ready(sub_tasks)

    def sub_task_ended(self, sub_task: SubCommTask) -> None: ...

    def task_ended(self, task: CommTask, callback_error: BaseException | None) -> None: ...

    def admit(self, name: str, size: int, *, part: int = 10, priority: int = 0, key: TaskKey = FIRST) -> CommTask:
        task = CommTask(name, size, launch=lambda sub: None, priority=priority, key=key)
        self.order.admit(task, part)
        task._attach(self)
        return task


def popped(order: LaunchOrder) -> list[str]:
    names: list[str] = []
    while (sub := order.pop()) is not None:
        names.append(sub.name)
    return names


# ---------------------------------------------------------------------- by priority


@given(
    tasks=st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 40)), min_size=1, max_size=8),
    seed=st.randoms(use_true_random=False),
)
def test_what_is_ready_is_popped_by_priority_then_arrival_then_offset(
    tasks: list[tuple[int, int]], seed: random.Random
) -> None:
    holder = Holder(PriorityOrder())
    admitted = [
        # Keys run against arrival: they must not matter.
        holder.admit(f"t{n}", size, priority=priority, key=TaskKey(0, bucket=-n))
        for n, (priority, size) in enumerate(tasks)
    ]
    waiting = [(task.priority, n, sub.index, sub) for n, task in enumerate(admitted) for sub in task.sub_tasks]
    seed.shuffle(waiting)
    ready: list[tuple[int, int, int, SubCommTask]] = []
    while waiting or ready:
        if waiting and seed.random() < 0.6:
            ready.append(waiting.pop())
            ready[-1][-1].notify_ready()
            continue
        expected = min(ready, default=None)
        sub = holder.order.pop()
        assert sub is (expected[-1] if expected else None)
        if expected:
            ready.remove(expected)
    assert holder.order.pop() is None


def test_what_is_popped_is_claimed_and_what_failed_is_skipped() -> None:
    holder = Holder(PriorityOrder())
    first, second = holder.admit("first", 20), holder.admit("second", 20, priority=1)
    first.notify_ready()
    second.notify_ready()
    assert holder.order.pop() is first.sub_tasks[0]
    assert first.sub_tasks[0].state is TaskState.STARTED
    first.fail(ValueError())
    assert popped(holder.order) == ["second[0]", "second[1]"]


def test_clear_forgets_what_is_queued() -> None:
    order = PriorityOrder()
    Holder(order).admit("t", 30).notify_ready()
    order.clear()
    assert order.pop() is None
    order.decided([])


# ---------------------------------------------------------------------- as announced


def announced(*decisions: Decision) -> tuple[Holder, AnnouncedOrder]:
    order = AnnouncedOrder()
    order.announce(decisions)
    return Holder(order), order


def test_a_follower_waits_for_the_decision_the_task_and_its_data() -> None:
    holder, order = announced()
    assert order.pop() is None  # no decision
    order.announce([Decision(SECOND, 10, 1), Decision(FIRST, 20, 0)])
    other = holder.admit("other", 20, key=FIRST)
    other.notify_ready()
    assert order.pop() is None  # the task that is named first is not here yet, and nothing may overtake it
    task = holder.admit("task", 20, key=SECOND, part=3)
    assert order.pop() is None  # its data is not here yet
    assert task.describe_outstanding() == "task (not partitioned, not ready)"
    task.notify_ready()
    assert popped(order) == ["task[1]", "other[0]"]
    assert [sub.size for sub in task.sub_tasks] == [10, 10]  # cut as announced, not as asked for here
    order.announce([Decision(SECOND, 10, 0)])
    assert popped(order) == ["task[0]"]
    # Everything about both is forgotten, so their keys are free again.
    holder.admit("task", 20, key=SECOND)
    holder.admit("other", 20, key=FIRST)


def test_two_tasks_of_one_key_are_refused() -> None:
    holder, _ = announced()
    holder.admit("first", 20, key=TaskKey(3, bucket=1))
    with pytest.raises(LaunchOrderError, match=r"A task of step 3, phase 0, bucket 1 is held already: 'first'."):
        holder.admit("second", 20, key=TaskKey(3, bucket=1))


@pytest.mark.parametrize(
    "decisions",
    [
        [Decision(FIRST, 10, 2)],  # a part that is not here
        [Decision(FIRST, 10, -1)],
        [Decision(FIRST, 10, 0), Decision(FIRST, 6, 1)],  # cut again, otherwise
        [Decision(FIRST, 10, 1), Decision(FIRST, 10, 1)],  # twice
        [Decision(FIRST, 0, 0)],
        [Decision(FIRST, -5, 0)],
        [Decision(FIRST, 10, 0, task_size=21)],  # larger there
        [Decision(FIRST, 20, 0, task_size=15)],  # smaller there, cut alike
        [Decision(FIRST, 50, 0, task_size=50)],  # in one piece on both sides
    ],
)
def test_decisions_that_do_not_fit_the_model_here_are_refused(decisions: list[Decision]) -> None:
    holder, order = announced(*decisions)
    task = holder.admit("bucket 0", 20, key=FIRST)
    task.notify_ready()
    for _ in decisions[:-1]:
        order.pop()
    for _ in range(2):  # it does not go away
        with pytest.raises(
            LaunchOrderError,
            match=r"part -?\d of the task of step 0, phase 0, bucket 0, cut at .* 'bucket 0' with 20 parameters",
        ):
            order.pop()


def test_a_decision_that_says_the_right_size_fits() -> None:
    holder, order = announced(Decision(FIRST, 10, 1, task_size=20), Decision(FIRST, 10, 0, task_size=20))
    holder.admit("t", 20, key=FIRST).notify_ready()
    assert popped(order) == ["t[1]", "t[0]"]


@pytest.mark.parametrize("when", ["held", "ready", "half sent"])
def test_a_task_that_failed_here_stops_the_follower(when: str) -> None:
    holder, order = announced(
        Decision(FIRST, 10, 0),
        Decision(FIRST, 10, 1),
        Decision(SECOND, 10, 0),
    )
    task, other = holder.admit("t", 20, key=FIRST), holder.admit("other", 10, key=SECOND)
    other.notify_ready()
    if when != "held":
        task.notify_ready()
    if when == "half sent":
        assert order.pop() is task.sub_tasks[0]
    cause = ConnectionError("unplugged")
    task.fail(cause)
    with pytest.raises(ConnectionError, match="unplugged") as caught:
        order.pop()  # "other" would meet rank 0's task here
    assert caught.value is cause


def test_clear_forgets_tasks_and_decisions() -> None:
    holder, order = announced(Decision(FIRST, 10, 0))
    holder.admit("t", 20, key=FIRST).notify_ready()
    order.pop()
    order.clear()
    assert order.pop() is None
    holder.admit("t", 20, key=FIRST).notify_ready()
    order.announce([Decision(FIRST, 20, 0)])
    assert popped(order) == ["t[0]"]
    order.ready([])
    order.decided([])


def test_a_core_stops_on_a_decision_that_does_not_fit() -> None:
    order, transport = AnnouncedOrder(), ManualTransport()
    with running_core(order=order, credit=100) as core:
        fits = enqueue(core, transport, "fits", 10, key=FIRST)
        task = enqueue(core, transport, "t", 20, key=SECOND)
        # The first is chosen in the call in which the second is refused.
        core.update_order(lambda: order.announce([Decision(FIRST, 10, 0), Decision(SECOND, 10, 7)]))
        for waiting in (fits, task):
            with pytest.raises(LaunchOrderError, match="part 7"):
                waiting.wait(WAIT)
        with pytest.raises(LaunchOrderError, match="part 7"):
            core.drain(WAIT)
    assert core.in_flight == 0
    assert transport.launched == []


def test_a_key_that_is_taken_leaves_the_core_as_it_was() -> None:
    order, transport = AnnouncedOrder(), ManualTransport()
    with running_core(order=order) as core:
        held = enqueue(core, transport, "held", key=FIRST)
        late = CommTask("late", 10, launch=transport, key=FIRST)
        with pytest.raises(LaunchOrderError):
            core.enqueue(late)
        with pytest.raises(TaskStateError, match="enqueue it first"):
            late.notify_ready()
        core.update_order(partial(order.announce, [Decision(FIRST, 10, 0)]))
        transport.wait_for(1)
        settle(core, transport)
        held.wait(WAIT)
        core.enqueue(late)  # the key is free by now


# ---------------------------------------------------------------------- a leader and its follower


class Telling(PriorityOrder):
    """Tells a follower what it has decided, as rank 0 does."""

    def __init__(self) -> None:
        super().__init__()
        self.follower: tuple[ByteCore, AnnouncedOrder] | None = None

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        assert self.follower is not None
        core, order = self.follower
        decisions = [Decision(s.parent.key, s.parent.sub_tasks[0].size, s.index, s.parent.size) for s in batch]
        core.update_order(lambda: order.announce(decisions))


class Collectives:
    """Pairs launches of two ranks by position, as a process group does; a pair ends when both have joined."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.launched: tuple[list[SubCommTask], list[SubCommTask]] = ([], [])
        self.mismatches: list[str] = []

    def launch(self, rank: int, sub: SubCommTask) -> None:
        with self._lock:
            position = len(self.launched[rank])
            self.launched[rank].append(sub)
            others = self.launched[1 - rank]
            other = others[position] if position < len(others) else None
        if other is None:
            return
        if _identity(sub) != _identity(other):
            self.mismatches.append(f"{sub!r} met {other!r}")
        sub.notify_finish()
        other.notify_finish()


def _identity(sub: SubCommTask) -> tuple[TaskKey, int, int, int]:
    return (sub.parent.key, sub.index, sub.offset, sub.size)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=10),
    partitions=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    credits_=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    data=st.data(),
)
def test_a_follower_launches_exactly_the_leaders_sequence(
    sizes: list[int], partitions: list[int], credits_: tuple[int, int], data: st.DataObject
) -> None:
    priorities = [data.draw(st.integers(0, 3)) for _ in sizes]
    ready_orders = [data.draw(st.permutations(range(len(sizes)))) for _ in range(2)]
    collectives = Collectives()
    orders: tuple[Telling, AnnouncedOrder] = (Telling(), AnnouncedOrder())
    with (
        running_core(partition_size=partitions[0], credit=credits_[0], order=orders[0]) as leader,
        running_core(partition_size=7, credit=credits_[1], order=orders[1]) as follower,
    ):
        orders[0].follower = (follower, orders[1])
        tasks: list[list[CommTask]] = [[], []]
        failures: list[BaseException] = []

        def run(rank: int, core: ByteCore) -> None:
            try:
                for n, size in enumerate(sizes):
                    if rank == 0:
                        core.partition_size = partitions[n % len(partitions)]
                    task = CommTask(
                        f"bucket {n}",
                        size,
                        launch=partial(collectives.launch, rank),
                        # Only the leader's priorities may count.
                        priority=priorities[n] if rank == 0 else -priorities[n],
                        key=TaskKey(1, bucket=n),
                    )
                    core.enqueue(task)
                    tasks[rank].append(task)
                for n in ready_orders[rank]:
                    tasks[rank][n].notify_ready()
                for task in tasks[rank]:
                    task.wait(WAIT)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=rank) for rank in enumerate((leader, follower))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT)
        assert failures == []
        assert collectives.mismatches == []
        sequences = [[_identity(sub) for sub in launched] for launched in collectives.launched]
        assert sequences[0] == sequences[1]
        sent = sorted(
            (key.bucket, parameter)
            for key, _, offset, size in sequences[0]
            for parameter in range(offset, offset + size)
        )
        assert sent == [(n, parameter) for n, size in enumerate(sizes) for parameter in range(size)]
        assert leader.in_flight == follower.in_flight == 0


@pytest.mark.parametrize(("here", "there"), [(20, 21), (21, 20), (5, 6), (20, 40), (40, 20)])
def test_ranks_with_different_models_find_out(here: int, there: int) -> None:
    order = AnnouncedOrder()
    leading = Telling()
    transport = ManualTransport()
    with (
        running_core(order=order, credit=100) as follower,
        running_core(order=leading, credit=100, partition_size=10) as leader,
    ):
        leading.follower = (follower, order)
        enqueue(leader, transport, "there", there, key=FIRST)
        task = enqueue(follower, transport, "here", here, key=FIRST)
        with pytest.raises(LaunchOrderError, match="Every rank must build the same model"):
            task.wait(WAIT)
        assert all(sub.parent.name == "there" for sub in transport.launched)
