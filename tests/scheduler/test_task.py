from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError, TaskStateError
from lightning_bytescheduler.scheduler import CommTask, SubCommTask, TaskKey, TaskState
from tests.scheduler.harness import restless_threads
from tests.support.waiting import WAIT

NOT_SIZES = [0, -1, True, False, 1.0, 2.5, float("nan"), float("inf"), "7", None, [3]]


class Listener:
    """Stands in for the core; checks that it is never called with the task's lock held."""

    def __init__(self) -> None:
        self.alone = True  # else the lock may be held by another thread
        self.readied: list[str] = []
        self.ended: list[str] = []
        self.concluded: list[tuple[str, BaseException | None]] = []
        self.told_last = 0
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def sub_tasks_ready(self, task: CommTask, sub_tasks: list[SubCommTask]) -> None:
        assert not (self.alone and task._lock.locked())
        self.readied += [sub.name for sub in sub_tasks]

    def sub_task_ended(self, sub_task: SubCommTask) -> None:
        task = sub_task.parent
        assert not (self.alone and task._lock.locked())
        assert not task.done() or task.error is not None, "waiters woke before the credit was returned"
        self.ended.append(sub_task.name)

    def credit_returned(self) -> None:
        self.told_last += 1

    def task_ended(self, task: CommTask, callback_error: BaseException | None) -> None:
        assert not (self.alone and task._lock.locked())
        assert task.done()
        self.concluded.append((task.name, callback_error))


def attached(
    parts: int = 2, *, ready: bool = False, launch: Callable[[SubCommTask], None] | None = None, **options: Any
) -> tuple[CommTask, Listener]:
    """A task of ``parts`` sub-tasks of 10 parameters, held by a listener."""
    task = CommTask("t", parts * 10, launch=launch or (lambda sub: None), **options)
    listener = Listener()
    task._attach(listener)
    task.partition(10)
    if ready:
        task.notify_ready()
    return task, listener


# ---------------------------------------------------------------------- partitioning


@given(size=st.integers(1, 5000), part=st.integers(1, 6000))
def test_parts_cover_the_buffer_once_and_are_as_few_and_as_equal_as_can_be(size: int, part: int) -> None:
    task = CommTask("t", size, launch=lambda sub: None)
    parts = task.partition(part)
    assert parts == task.sub_tasks
    assert [p for sub in parts for p in range(sub.offset, sub.offset + sub.size)] == list(range(size))
    assert all(sub.parent is task and sub.index == index for index, sub in enumerate(parts))
    largest = parts[0].size
    assert largest <= part
    assert all(sub.size == largest for sub in parts[:-1])
    fewest = math.ceil(size / part)
    assert len(parts) <= fewest
    assert largest == math.ceil(size / fewest)
    again = CommTask("announced", size, launch=lambda sub: None).partition(largest)  # as other ranks cut it
    assert [sub.size for sub in again] == [sub.size for sub in parts]


@pytest.mark.parametrize("size", NOT_SIZES, ids=repr)
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(OptionError, match=r"^size=.*size must be a positive whole number of parameters") as caught:
        CommTask("t", size, launch=lambda sub: None)
    assert caught.value.option == "size"
    assert repr(size) in str(caught.value)
    task = CommTask("t", 10, launch=lambda sub: None)
    with pytest.raises(OptionError, match=r"^partition_size=.* must be a positive whole number of parameters"):
        task.partition(size)
    assert task.sub_tasks == ()


# ---------------------------------------------------------------------- the life of a task


def test_a_task_follows_its_sub_tasks() -> None:
    task, listener = attached()
    first, second = task.sub_tasks
    states = [task.state]
    for move in (first.notify_ready, first.start, first.notify_finish):
        move()
        states.append(task.state)
        assert not task.ready
    second.notify_ready()
    assert task.ready
    second.start()
    assert not task.done()
    second.notify_finish()
    assert [*states, task.state] == [
        TaskState.CREATED,
        TaskState.READY,
        TaskState.STARTED,
        TaskState.STARTED,
        TaskState.FINISHED,
    ]
    task.wait(0)
    assert task.done()
    assert task.error is None
    assert listener.readied == listener.ended == ["t[0]", "t[1]"]
    assert listener.concluded == [("t", None)]


def test_priority_and_names_come_from_the_parent() -> None:
    task, _ = attached(priority=7)
    assert [sub.priority for sub in task.sub_tasks] == [7, 7]
    assert repr(task.sub_tasks[1]) == "<SubCommTask t[1] size=10 priority=7 created>"
    assert repr(task) == "<CommTask 't' size=20 priority=7 created>"


@pytest.mark.parametrize("partitioned_first", [True, False])
def test_ready_parts_know_since_when(partitioned_first: bool) -> None:
    task = CommTask("t", 20, launch=lambda sub: None)
    listener = Listener()
    listener.time = 41.0
    task._attach(listener)
    if partitioned_first:
        task.partition(10)
    task.notify_ready()
    if not partitioned_first:  # as on a rank that is told how to cut only later
        listener.time = 99.0
        task.partition(10)
    assert [(sub.state, sub.ready_at) for sub in task.sub_tasks] == [(TaskState.READY, 42.0)] * 2


@given(order=st.integers(1, 8).flatmap(lambda n: st.permutations(range(n))))
def test_a_task_finishes_once_and_with_its_last_part(order: list[int]) -> None:
    ends: list[TaskState] = []
    task, listener = attached(len(order), ready=True, on_end=lambda t: ends.append(t.state))
    for sub in task.sub_tasks:
        sub.start()
    for index in order:
        assert ends == []
        assert task.state is TaskState.STARTED
        task.sub_tasks[index].notify_finish()
    assert ends == [TaskState.FINISHED]
    assert listener.ended == [f"t[{index}]" for index in order]
    assert listener.concluded == [("t", None)]


def test_a_task_ends_only_after_the_core_knows_of_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts may end at once on two threads; here the second ends while the core learns of the first."""
    task, listener = attached(2, ready=True)
    told = listener.sub_task_ended

    def tell(sub_task: SubCommTask) -> None:
        if sub_task is task.sub_tasks[0]:
            task.sub_tasks[1].notify_finish()
            assert not task.done()
            assert task.any_ready()
        told(sub_task)

    monkeypatch.setattr(listener, "sub_task_ended", tell)
    for sub in task.sub_tasks:
        sub.start()
    task.sub_tasks[0].notify_finish()
    task.wait(0)
    assert not task.any_ready()
    assert listener.ended == ["t[1]", "t[0]"]
    assert listener.concluded == [("t", None)]


# ---------------------------------------------------------------------- moves that are not allowed

Move = Callable[[CommTask], object]


def _states(*moves: str) -> Move:
    """The moves of the first part that bring it into a state."""

    def apply(task: CommTask) -> None:
        sub = task.sub_tasks[0]
        for move in moves:
            sub.fail(ValueError("lost")) if move == "fail" else getattr(sub, move)()

    return apply


def _claim(task: CommTask) -> None:
    task.notify_ready()
    assert task.sub_tasks[0].claim()


CREATED = _states()
READY = _states("notify_ready")
STARTED = _states("notify_ready", "start")
FINISHED = _states("notify_ready", "start", "notify_finish")
FAILED = _states("notify_ready", "start", "fail")


@pytest.mark.parametrize(
    ("before", "move", "message"),
    [
        (CREATED, lambda t: t.partition(5), "Cannot partition task 't': it is partitioned already."),
        (CREATED, lambda t: t._attach(Listener()), "Cannot enqueue task 't': it was enqueued before."),
        (CREATED, lambda t: t.sub_tasks[0].start(), "Cannot start t[0]: it is created, not ready."),
        (STARTED, lambda t: t.sub_tasks[0].start(), "Cannot start t[0]: it is started, not ready."),
        (FINISHED, lambda t: t.sub_tasks[0].start(), "Cannot start t[0]: it is finished, not ready."),
        (FAILED, lambda t: t.sub_tasks[0].start(), "Cannot start t[0]: it is failed, not ready."),
        (FAILED, lambda t: t.sub_tasks[1].start(), "Cannot start t[1]: it is failed, not ready."),
        (CREATED, lambda t: t.sub_tasks[0].notify_finish(), "Cannot finish t[0]: it is created, not started."),
        (READY, lambda t: t.sub_tasks[0].notify_finish(), "Cannot finish t[0]: it is ready, not started."),
        (_claim, lambda t: t.sub_tasks[0].notify_finish(), "Cannot finish t[0]: it is ready, not started."),
        (FINISHED, lambda t: t.sub_tasks[0].notify_finish(), "Cannot finish t[0]: it is finished, not started."),
        (FAILED, lambda t: t.sub_tasks[0].notify_finish(), "Cannot finish t[0]: it is failed, not started."),
        (READY, lambda t: t.sub_tasks[0].notify_ready(), "Cannot mark t[0] (ready) ready: it was ready before."),
        (STARTED, lambda t: t.sub_tasks[0].notify_ready(), "Cannot mark t[0] (started) ready: it was ready before."),
        (FINISHED, lambda t: t.sub_tasks[0].notify_ready(), "Cannot mark t[0] (finished) ready: it was ready before."),
        (READY, lambda t: t.notify_ready(), "Cannot mark t[0] (ready) ready: it was ready before."),
        (_claim, lambda t: t.notify_ready(), "Cannot mark t[0] (started) ready: it was ready before."),
    ],
)
def test_a_move_the_state_does_not_allow_is_named(before: Move, move: Move, message: str) -> None:
    task, listener = attached()
    before(task)
    states = [sub.state for sub in task.sub_tasks]
    known = (list(listener.readied), list(listener.ended), list(listener.concluded))
    with pytest.raises(TaskStateError) as caught:
        move(task)
    assert str(caught.value) == message
    assert [sub.state for sub in task.sub_tasks] == states
    assert (listener.readied, listener.ended, listener.concluded) == known


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda t: t.notify_ready(), "Cannot mark 't' ready: enqueue it first."),
        (lambda t: t.partition(10)[0].notify_ready(), "Cannot mark 't' ready: enqueue it first."),
        (lambda t: (t.fail(ValueError()), t.partition(10)), "Cannot partition task 't': it has ended."),
        (lambda t: (t.fail(ValueError()), t._attach(Listener())), "Cannot enqueue task 't': it has ended."),
        (
            lambda t: (t._attach(Listener()), t.notify_ready(), t.notify_ready()),
            "Cannot mark 't' ready: it was ready before.",
        ),
    ],
)
def test_an_invalid_move_of_a_task_is_named(move: Move, message: str) -> None:
    with pytest.raises(TaskStateError) as caught:
        move(CommTask("t", 20, launch=lambda sub: None))
    assert str(caught.value) == message


# ---------------------------------------------------------------------- failing


def test_a_failed_task_takes_what_was_not_sent_with_it_and_leaves_the_rest_to_end() -> None:
    task, listener = attached(4, ready=False)
    finished, in_flight, ready, _created = task.sub_tasks
    for sub in (finished, in_flight, ready):
        sub.notify_ready()
    finished.start()
    finished.notify_finish()
    in_flight.start()
    cause = ValueError("lost")
    task.fail(cause)
    assert [sub.state.value for sub in task.sub_tasks] == ["finished", "started", "failed", "failed"]
    assert task.state is TaskState.FAILED
    with pytest.raises(ValueError, match="lost") as caught:
        task.wait(0)
    assert caught.value is cause is task.error
    in_flight.notify_finish()
    assert listener.ended == ["t[0]", "t[1]"]
    assert listener.concluded == [("t", None)]
    assert task.error is cause


@pytest.mark.parametrize("before", [CREATED, READY, STARTED])
def test_a_failed_part_fails_its_task_once(before: Move) -> None:
    ends: list[BaseException | None] = []
    task, listener = attached(on_end=lambda t: ends.append(t.error))
    before(task)
    cause = ValueError("lost")
    for _ in range(2):
        task.sub_tasks[0].fail(cause)
        task.fail(KeyError("too late"))
    assert ends == [cause]
    assert [sub.state for sub in task.sub_tasks] == [TaskState.FAILED] * 2
    assert listener.ended == ["t[0]"]
    assert listener.concluded == [("t", None)]
    task.notify_ready()  # the owner learns of the end from wait(), not here
    task.sub_tasks[1].notify_ready()
    assert listener.readied == (["t[0]"] if before is not CREATED else [])


def test_failing_what_has_ended_changes_nothing() -> None:
    task, listener = attached(1, ready=True)
    task.sub_tasks[0].start()
    task.sub_tasks[0].notify_finish()
    task.sub_tasks[0].fail(ValueError())
    task.fail(ValueError())
    task.wait(0)
    assert task.state is task.sub_tasks[0].state is TaskState.FINISHED
    assert listener.concluded == [("t", None)]


@pytest.mark.parametrize("fail_part", [True, False])
def test_a_chosen_part_is_launched_even_if_its_task_fails_meanwhile(fail_part: bool) -> None:
    launched: list[str] = []
    task, listener = attached(ready=True, launch=lambda sub: launched.append(sub.name))
    chosen, other = task.sub_tasks
    assert chosen.claim()
    assert not chosen.claim()
    cause = ValueError("lost")
    (chosen if fail_part else task).fail(cause)
    assert not other.claim()
    assert task.error is cause
    assert task.done()
    assert listener.ended == []  # its credit is still taken
    chosen.start()
    chosen.notify_finish()
    assert launched == listener.ended == ["t[0]"]
    with pytest.raises(ValueError, match="lost"):
        task.wait(0)


def test_a_chosen_part_can_be_withdrawn_until_it_is_launched() -> None:
    task, listener = attached(ready=True)
    chosen, launched = task.sub_tasks
    assert chosen.claim()
    assert launched.claim()
    launched.start()
    task._withdraw(launched, KeyError("not this one"))
    assert task.error is None
    cause = ValueError("closed")
    task._withdraw(chosen, cause)
    task._withdraw(chosen, KeyError("again"))
    assert [sub.state for sub in task.sub_tasks] == [TaskState.FAILED, TaskState.STARTED]
    assert listener.ended == ["t[0]"]
    assert task.error is cause


def test_what_launch_raises_fails_the_task_and_reaches_the_caller() -> None:
    cause = ConnectionError("unplugged")

    def launch(sub: SubCommTask) -> None:
        raise cause

    task, listener = attached(ready=True, launch=launch)
    with pytest.raises(ConnectionError, match="unplugged"):
        task.sub_tasks[0].start()
    assert task.error is cause
    assert [sub.state for sub in task.sub_tasks] == [TaskState.FAILED] * 2
    assert listener.ended == ["t[0]"]


def test_a_launch_that_completes_at_once_is_fine() -> None:
    task, listener = attached(ready=True, launch=lambda sub: sub.notify_finish())
    for sub in task.sub_tasks:
        sub.start()
    task.wait(0)
    assert listener.concluded == [("t", None)]


# ---------------------------------------------------------------------- callbacks and waiting


def test_what_a_callback_raises_reaches_waiters_and_the_core_but_not_the_transport() -> None:
    cause = KeyError("callback")

    def on_end(task: CommTask) -> None:
        assert not task.done()
        raise cause

    task, listener = attached(1, ready=True, on_end=on_end)
    task.sub_tasks[0].start()
    task.sub_tasks[0].notify_finish()
    assert listener.concluded == [("t", cause)]
    with pytest.raises(KeyError, match="callback"):
        task.wait(0)


def test_a_callback_does_not_hide_why_the_task_failed() -> None:
    def on_end(task: CommTask) -> None:
        raise KeyError("callback")

    task, _ = attached(on_end=on_end)
    task.fail(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        task.wait(0)


def test_with_no_core_the_callbacks_exception_reaches_the_caller() -> None:
    def on_end(task: CommTask) -> None:
        raise KeyError("callback")

    task = CommTask("t", 10, launch=lambda sub: None, on_end=on_end)
    with pytest.raises(KeyError, match="callback"):
        task.fail(ValueError("lost"))
    assert task.done()


def test_waiters_wake_even_if_the_listener_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sub_task: SubCommTask) -> None:
        raise KeyError("listener")

    task, listener = attached(1, ready=True)
    monkeypatch.setattr(listener, "sub_task_ended", refuse)
    task.sub_tasks[0].start()
    with pytest.raises(KeyError, match="listener"):
        task.sub_tasks[0].notify_finish()
    task.wait(0)


def test_a_wait_that_runs_out_names_what_is_outstanding() -> None:
    task, _ = attached(7)
    with pytest.raises(SchedulerTimeoutError) as caught:
        task.wait(0)
    assert str(caught.value) == (
        "Task 't' did not finish within 0 s; outstanding: t[0] created, t[1] created, t[2] created, "
        "t[3] created and 3 more."
    )
    whole = CommTask("w", 10, launch=lambda sub: None)
    with pytest.raises(TimeoutError, match=r"outstanding: w \(not partitioned, not ready\)"):
        whole.wait(0)
    whole._attach(Listener())
    whole.notify_ready()
    assert whole.describe_outstanding() == "w (not partitioned, ready)"


def _end(how: str, sub: SubCommTask, barrier: threading.Barrier) -> None:
    barrier.wait(WAIT)
    if how == "fail task":
        sub.parent.fail(ValueError(how))
    elif how == "fail part":
        sub.fail(ValueError(how))
    else:
        with suppress(TaskStateError):  # it has failed before
            sub.notify_finish()


@pytest.mark.parametrize(
    "enders",
    [
        [("finish", 0), ("fail task", 0)],
        [("fail part", 0), ("fail task", 0)],
        [("finish", 0), ("fail part", 0)],
        [("finish", 0), ("finish", 1)],
        [("finish", 0), ("fail part", 1), ("fail task", 0)],
    ],
    ids=lambda enders: " against ".join(f"{how} {index}" for how, index in enders),
)
def test_concurrent_ends_call_back_once(enders: list[tuple[str, int]]) -> None:
    for seed in range(40):
        ends: list[BaseException | None] = []
        task, listener = attached(2, ready=True, on_end=lambda t, ends=ends: ends.append(t.error))
        listener.alone = False
        for sub in task.sub_tasks:
            sub.start()
        barrier = threading.Barrier(len(enders))
        with restless_threads(seed):
            threads = [
                threading.Thread(target=_end, args=(how, task.sub_tasks[index], barrier)) for how, index in enders
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT)
                assert not thread.is_alive()
        for sub in task.sub_tasks:
            if sub.state is TaskState.STARTED:
                sub.notify_finish()
        assert len(ends) == len(listener.concluded) == 1
        assert ends[0] is task.error
        assert sorted(listener.ended) == ["t[0]", "t[1]"]
        assert task.done()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), max_size=20))
def test_keys_are_in_the_order_of_steps_then_phases_then_buckets(keys: list[tuple[int, int, int]]) -> None:
    made = sorted(TaskKey(*key) for key in keys)
    assert [(key.step, key.phase, key.bucket) for key in made] == sorted(keys)


def test_a_key_says_what_it_names() -> None:
    assert str(TaskKey(3, bucket=1)) == "step 3, phase 0, bucket 1"
