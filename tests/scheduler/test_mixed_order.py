"""When a foreign collective may be launched, among tasks by priority."""

from __future__ import annotations

from lightning_bytescheduler.scheduler import CommTask, MixedOrder, TaskKey
from tests.scheduler.test_order import Holder, popped


def foreign(holder: Holder, number: int) -> CommTask:
    task = CommTask(f"f{number}", 3, launch=lambda sub: None, key=TaskKey(-1, bucket=number), takes_credit=False)
    holder.order.admit(task, 1)
    task._attach(holder)
    task.notify_ready()
    return task


def test_it_goes_once_all_ranks_have_submitted_it_before_what_is_more_urgent() -> None:
    order = MixedOrder()
    holder = Holder(order)
    holder.admit("older", 20, priority=-1).notify_ready()
    foreign(holder, 1)
    assert popped(order) == ["older[0]", "older[1]"]
    holder.admit("another", 10).notify_ready()
    order.submitted_everywhere(1)
    assert popped(order) == ["f1[0]", "another[0]"]
    foreign(holder, 2)
    order.submitted_everywhere(1)  # said before
    assert popped(order) == []


def test_what_was_submitted_later_does_not_overtake_it() -> None:
    order = MixedOrder()
    holder = Holder(order)
    older = holder.admit("older", 10)
    foreign(holder, 1)
    holder.admit("younger", 10, priority=-1).notify_ready()
    foreign(holder, 2)
    holder.admit("youngest", 10, priority=-2).notify_ready()
    assert popped(order) == []
    older.notify_ready()
    assert popped(order) == ["older[0]"]
    order.submitted_everywhere(1)
    assert popped(order) == ["f1[0]", "younger[0]"]
    order.submitted_everywhere(2)
    assert popped(order) == ["f2[0]", "youngest[0]"]


def test_what_follows_from_what_has_ended_waits_for_none() -> None:
    """A rank may wait for it before it submits the foreign one."""
    order = MixedOrder()
    holder = Holder(order)
    holder.admit("scatter", 10).notify_ready()
    assert popped(order) == ["scatter[0]"]
    foreign(holder, 1)
    holder.admit("gather", 10, key=TaskKey(0, phase=2)).notify_ready()
    assert popped(order) == ["gather[0]"]


def test_it_takes_no_credit_and_is_of_one_part() -> None:
    order = MixedOrder()
    holder = Holder(order)
    task = foreign(holder, 1)
    order.submitted_everywhere(1)
    sub = order.pop(credit_left=False)
    assert sub is task.sub_tasks[0]
    assert sub.charge == 0
    assert len(task.sub_tasks) == 1


def test_nothing_is_left_when_all_is_forgotten() -> None:
    order = MixedOrder()
    holder = Holder(order)
    holder.admit("older", 20)
    foreign(holder, 1)
    holder.admit("younger", 10).notify_ready()
    order.clear()
    assert popped(order) == []
    foreign(holder, 2)
    order.submitted_everywhere(2)
    assert popped(order) == ["f2[0]"]
