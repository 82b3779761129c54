from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from lightning_bytescheduler.exceptions import SchedulerClosedError, SchedulerTimeoutError
from lightning_bytescheduler.scheduler import ByteCore, CommTask, PriorityOrder, SubCommTask, TaskState
from tests.scheduler.harness import (
    LOST,
    ManualTransport,
    Stuck,
    enqueue,
    in_thread,
    ready_at_once,
    running_core,
)
from tests.support.waiting import WAIT, until

# ---------------------------------------------------------------------- aborting


def test_an_abort_wakes_every_waiter_with_the_cause() -> None:
    transport = ManualTransport()
    ends: list[BaseException | None] = []
    with running_core(partition_size=10, credit=10) as core:
        tasks = [
            enqueue(core, transport, f"t{n}", 20, ready=n != 2, on_end=lambda t: ends.append(t.error)) for n in range(3)
        ]
        transport.wait_for(1)
        joins = [in_thread(partial(task.wait, WAIT)) for task in tasks for _ in range(2)]
        joins += [in_thread(partial(core.drain, WAIT)) for _ in range(2)]
        joins.append(in_thread(partial(core.shutdown, timeout=WAIT)))
        time.sleep(0.02)  # let them wait; whether they do already makes no difference to what follows
        core.abort(LOST)
        core.abort(KeyError("too late"))
        assert [join() for join in joins] == [LOST] * len(joins)
        assert ends == [LOST] * 3
        assert core.abort_cause is LOST
        with pytest.raises(ConnectionError):
            core.enqueue(CommTask("late", 10, launch=transport))
        with pytest.raises(ConnectionError):
            core.drain(0)
        for sub in transport.in_flight:
            sub.notify_finish()  # what was in flight may still arrive
        for task in tasks:
            task.fail(KeyError("too late"))
        assert core.in_flight == 0
    assert transport.names == ["t0[0]"]
    assert ends == [LOST] * 3


def test_an_abort_stops_the_rest_of_a_batch_and_returns_its_credit() -> None:
    stuck, transport = Stuck(), ManualTransport()
    with running_core(partition_size=10, credit=50) as core:
        first = enqueue(core, stuck, "first", ready=False)
        rest = enqueue(core, transport, "rest", 30, priority=1, ready=False)
        launcher = in_thread(partial(core.update_order, partial(ready_at_once, first, rest)))
        assert stuck.entered.wait(WAIT)
        assert core.in_flight == 40
        core.abort(LOST)
        stuck.let_go.set()
        assert launcher() is None
        until(lambda: core.in_flight == 0)
        assert {sub.state for sub in rest.sub_tasks} == {TaskState.FAILED}
    assert transport.launched == []


@pytest.mark.parametrize("culprit", ["launch", "decided", "pop"])
def test_an_error_on_the_dispatcher_aborts_instead_of_leaving_anyone_waiting(culprit: str) -> None:
    class Broken(PriorityOrder):
        pops = 0

        def decided(self, batch: Sequence[SubCommTask]) -> None:
            if culprit == "decided":
                raise LOST

        def pop(self, *, credit_left: bool = True, overtaking: int | None = None) -> SubCommTask | None:
            self.pops += 1
            if culprit == "pop" and self.pops == 2:
                raise LOST
            return super().pop(credit_left=credit_left, overtaking=overtaking)

    transport = ManualTransport()

    def launch(sub: SubCommTask) -> None:
        if culprit == "launch" and sub.index == 1:
            raise LOST
        transport(sub)

    with running_core(order=Broken(), credit=100) as core:
        task = CommTask("t", 40, launch=launch)
        other = enqueue(core, transport, "other", ready=False)
        core.enqueue(task)
        task.notify_ready()
        for waiting in (task, other):
            with pytest.raises(ConnectionError):
                waiting.wait(WAIT)
        for sub in transport.in_flight:
            sub.notify_finish()
        until(lambda: core.in_flight == 0)
        assert core.abort_cause is LOST
        assert core._dispatcher.is_alive()  # until it is told to stop
    assert transport.names == (["t[0]"] if culprit == "launch" else [])


def test_an_observer_that_raises_aborts_and_leaves_no_thread_waiting(caplog: pytest.LogCaptureFixture) -> None:
    def observer(sub: SubCommTask) -> None:
        raise LOST

    transport = ManualTransport()
    with running_core(observer=observer) as core, caplog.at_level(logging.ERROR):
        task = enqueue(core, transport, "t")
        other = enqueue(core, transport, "other", ready=False)
        transport.wait_for(1)[0].notify_finish()  # the transport's thread is not at fault
        for waiting in (task, other):
            with pytest.raises(ConnectionError):
                waiting.wait(0)
        assert core.in_flight == 0
    assert "The observer of t[0] failed" in caplog.text


def test_an_observer_sees_only_what_arrived() -> None:
    seen: list[str] = []
    transport = ManualTransport()
    with running_core(credit=20, observer=lambda sub: seen.append(sub.name)) as core:
        task = enqueue(core, transport, "t", 40)
        transport.wait_for(2)
        task.sub_tasks[2].fail(LOST)
        task.sub_tasks[1].fail(LOST)
        task.sub_tasks[0].notify_finish()
        core.drain(WAIT)
    assert seen == ["t[0]"]


def test_a_callback_that_raises_aborts_and_hides_no_other_end(caplog: pytest.LogCaptureFixture) -> None:
    def on_end(task: CommTask) -> None:
        raise KeyError(task.name)

    transport = ManualTransport()
    with running_core(credit=10) as core, caplog.at_level(logging.ERROR):
        tasks = [enqueue(core, transport, f"t{n}", on_end=on_end) for n in range(3)]
        transport.wait_for(1)[0].notify_finish()
        for task in tasks:
            with pytest.raises(KeyError, match="t0"):
                task.wait(0)
        assert core.abort_cause is tasks[0].error
    assert [record.getMessage().split()[3] for record in caplog.records] == ["t0", "t1", "t2"]


class Watched:
    """A lock that calls ``on_release`` once, right after it was released for the first time."""

    def __init__(self, lock: Any, on_release: Callable[[], None]) -> None:
        self.lock = lock
        self.on_release: Callable[[], None] | None = on_release

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *arguments: Any) -> None:
        self.lock.release()
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()


@pytest.mark.parametrize("ending", ["abort", "shutdown"])
def test_nothing_slips_in_while_the_core_ends(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[BaseException] = []
    with running_core() as core:

        def slip_in() -> None:
            with pytest.raises((ConnectionError, SchedulerClosedError)) as caught:
                core.enqueue(CommTask("late", 10, launch=ManualTransport()))
            refused.append(caught.value)

        held = enqueue(core, ManualTransport(), "held", ready=False)
        monkeypatch.setattr(core, "_lock", Watched(core._lock, slip_in))
        if ending == "abort":
            core.abort(LOST)
        else:
            core.shutdown(timeout=WAIT, drain=False)
        assert len(refused) == 1
        assert held.done()


# ---------------------------------------------------------------------- shutting down


def test_a_shutdown_lets_what_is_ready_finish() -> None:
    transport = ManualTransport()
    core = ByteCore(partition_size=10, credit=10)
    done = [enqueue(core, transport, f"t{n}", 20) for n in range(3)]
    never = enqueue(core, transport, "never ready", ready=False)
    join = in_thread(partial(core.shutdown, timeout=WAIT))
    for count in range(1, 7):
        transport.wait_for(count)[-1].notify_finish()
    assert join() is None
    assert not core._dispatcher.is_alive()
    assert all(task.error is None and task.done() for task in done)
    message = "Task 'never ready' did not finish: the scheduler has been shut down."
    with pytest.raises(SchedulerClosedError, match=message):
        never.wait(0)
    with pytest.raises(SchedulerClosedError, match="Cannot enqueue a task, as the scheduler has been shut down"):
        core.enqueue(CommTask("late", 10, launch=transport))
    never.notify_ready()
    core.abort(LOST)
    assert core.abort_cause is None
    core.shutdown(timeout=WAIT)


def test_a_shutdown_without_draining_fails_what_is_open_and_lets_the_rest_arrive() -> None:
    transport = ManualTransport()
    core = ByteCore(partition_size=10, credit=10)
    task = enqueue(core, transport, "t", 20)
    transport.wait_for(1)
    core.shutdown(timeout=WAIT, drain=False)
    assert not core._dispatcher.is_alive()
    assert isinstance(task.error, SchedulerClosedError)
    assert core.in_flight == 10
    transport.launched[0].notify_finish()
    assert core.in_flight == 0
    assert transport.names == ["t[0]"]


def test_a_shutdown_that_cannot_drain_says_so_and_closes_all_the_same() -> None:
    transport = ManualTransport()
    core = ByteCore(partition_size=10, credit=10)
    task = enqueue(core, transport, "t", 20)
    transport.wait_for(1)
    with pytest.raises(SchedulerTimeoutError, match=r"did not drain within 0.01 s: t\[0\] started, t\[1\] ready"):
        core.shutdown(timeout=0.01)
    assert isinstance(task.error, SchedulerClosedError)
    core.shutdown(timeout=WAIT)
    assert not core._dispatcher.is_alive()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("on the dispatcher", "'bytescheduler-dispatcher' did not stop within"),
        ("where decisions come", "A launch on another thread did not end within"),
    ],
)
def test_a_launch_that_is_stuck_is_reported_within_the_bound(
    where: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, transport = Stuck(), ManualTransport()
    core = ByteCore(partition_size=10, credit=30)
    first = enqueue(core, stuck, "first", ready=False)
    rest = enqueue(core, transport, "rest", priority=1, ready=False)
    update = partial(ready_at_once, first, rest)
    launcher = None
    if where == "on the dispatcher":
        with core._lock:
            update()
    else:
        monkeypatch.setattr(core, "_wake", lambda: None)  # the dispatcher sleeps on
        launcher = in_thread(partial(core.update_order, update))
    assert stuck.entered.wait(WAIT)
    for _ in range(2):
        with pytest.raises(SchedulerTimeoutError, match=message):
            core.shutdown(timeout=0.01, drain=False)
    assert isinstance(first.error, SchedulerClosedError)
    stuck.let_go.set()
    core.shutdown(timeout=WAIT)
    assert launcher is None or launcher() is None
    assert not core._dispatcher.is_alive()
    assert core.in_flight == 0
    assert transport.launched == []  # it was chosen, but not launched after the end


def test_a_callback_on_the_dispatcher_may_shut_down() -> None:
    core = ByteCore(partition_size=10, credit=10)
    ended = threading.Event()

    def on_end(task: CommTask) -> None:
        core.shutdown(timeout=WAIT, drain=False)
        ended.set()

    enqueue(core, lambda sub: sub.notify_finish(), "t", on_end=on_end)
    assert ended.wait(WAIT)
    core.shutdown(timeout=WAIT)
    assert not core._dispatcher.is_alive()


def test_leaving_the_block_drains_but_not_after_an_error() -> None:
    with ByteCore(partition_size=10, credit=10) as core:
        task = enqueue(core, lambda sub: sub.notify_finish(), "t", 100)
    task.wait(0)
    core = ByteCore(partition_size=10, credit=10)

    def leave_by_an_error() -> None:
        with core:
            raise KeyError("training")

    task = enqueue(core, ManualTransport(), "t")
    with pytest.raises(KeyError, match="training"):
        leave_by_an_error()
    assert isinstance(task.error, SchedulerClosedError)
    assert not core._dispatcher.is_alive()


def test_an_aborted_core_shuts_down_quietly() -> None:
    core = ByteCore(partition_size=10, credit=10)
    core.abort(LOST)
    core.shutdown(timeout=WAIT)
    assert not core._dispatcher.is_alive()
    with pytest.raises(ConnectionError):
        core.enqueue(CommTask("late", 10, launch=lambda sub: None))
