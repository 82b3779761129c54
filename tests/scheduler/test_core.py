from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from functools import partial

import pytest

from lightning_bytescheduler.exceptions import SchedulerTimeoutError, TaskStateError
from lightning_bytescheduler.scheduler import CommTask, SubCommTask, TaskKey
from tests.scheduler.harness import (
    LOST,
    ManualTransport,
    Stuck,
    enqueue,
    in_thread,
    ready_at_once,
    running_core,
    settle,
)
from tests.support.waiting import WAIT, until

# ---------------------------------------------------------------------- sending


def test_a_task_is_cut_sent_and_timed() -> None:
    ticks = iter(range(1000))
    seen: list[SubCommTask] = []
    transport = ManualTransport()
    with running_core(credit=100, clock=lambda: float(next(ticks)), observer=seen.append) as core:
        task = CommTask("t", 25, launch=transport)
        core.enqueue(task)
        assert [(sub.offset, sub.size) for sub in task.sub_tasks] == [(0, 9), (9, 9), (18, 7)]
        task.notify_ready()
        transport.wait_for(3)
        assert core.in_flight == 25
        for sub in reversed(task.sub_tasks):
            sub.notify_finish()
        task.wait(WAIT)
        assert core.in_flight == 0
    assert seen == list(reversed(task.sub_tasks))
    for sub in seen:
        assert 0 <= sub.ready_at < sub.started_at < sub.finished_at


def test_the_dispatcher_is_named_after_the_core_and_ends_with_it() -> None:
    with running_core(name="outer") as core:
        assert "outer-dispatcher" in {thread.name for thread in threading.enumerate()}
    core.shutdown(timeout=WAIT)  # again: nothing happens
    assert "outer-dispatcher" not in {thread.name for thread in threading.enumerate()}


def test_a_part_larger_than_the_credit_is_sent_on_its_own() -> None:
    transport = ManualTransport()
    with running_core(partition_size=10, credit=10) as core:
        plug = enqueue(core, transport, "plug")
        wide = enqueue(core, transport, "wide", ready=False)
        core.credit = 3
        enqueue(core, transport, "cut")
        wide.notify_ready()
        transport.wait_for(1)
        plug.sub_tasks[0].notify_finish()
        transport.wait_for(2)
        assert core.in_flight == 10
        settle(core, transport)
    assert transport.names == ["plug[0]", "wide[0]", "cut[0]", "cut[1]", "cut[2]", "cut[3]"]


def test_one_at_a_time_whatever_the_credit() -> None:
    transport = ManualTransport()
    with running_core(credit=100, one_at_a_time=True) as core:
        task = enqueue(core, transport, "a", 30)
        for count in (1, 2, 3):
            transport.wait_for(count)
            assert len(transport.in_flight) == 1
            transport.in_flight[0].notify_finish()
        task.wait(WAIT)


def test_more_credit_is_used_at_once() -> None:
    transport = ManualTransport()
    with running_core(partition_size=10, credit=10) as core:
        enqueue(core, transport, "t", 40)
        transport.wait_for(1)
        core.credit = 35
        transport.wait_for(4)
        assert core.in_flight == 40
        core.credit = 10
        enqueue(core, transport, "late", 10)
        for sub in transport.in_flight[:3]:
            assert len(transport.launched) == 4
            sub.notify_finish()
        assert core.in_flight == 10
        transport.in_flight[0].notify_finish()
        transport.wait_for(5)
        assert core.in_flight == 10
        settle(core, transport)


def test_a_core_takes_only_fresh_tasks_and_keeps_nothing_of_others() -> None:
    transport = ManualTransport()
    with running_core() as core, running_core() as other:
        task = enqueue(core, transport, "t")
        for again in (core, other):
            with pytest.raises(TaskStateError, match="Cannot enqueue task 't': it was enqueued before"):
                again.enqueue(task)
        cut = CommTask("cut", 10, launch=transport)
        cut.partition(5)
        with pytest.raises(TaskStateError, match="Cannot partition task 'cut': it is partitioned already"):
            core.enqueue(cut)
        with pytest.raises(TaskStateError, match="enqueue it first"):
            cut.notify_ready()
        failed = CommTask("failed", 10, launch=transport)
        failed.fail(LOST)
        with pytest.raises(TaskStateError, match="Cannot enqueue task 'failed': it has ended"):
            core.enqueue(failed)
        transport.wait_for(1)
        settle(core, transport)
        assert core._open_tasks == other._open_tasks == {}
    assert transport.names == ["t[0]"]


def test_an_idle_core_holds_no_task() -> None:
    transport = ManualTransport()

    class Buffer: ...

    buffer = Buffer()
    gone = weakref.ref(buffer)
    with running_core() as core:
        enqueue(core, partial(lambda buffer, sub: transport(sub), buffer), "t", 20)
        transport.wait_for(1)
        settle(core, transport)
        del buffer
        transport.launched.clear()

        def collected() -> bool:
            gc.collect()
            return gone() is None

        until(collected)


# ---------------------------------------------------------------------- immediate tasks


def test_an_immediate_task_bypasses_queue_and_credit() -> None:
    transport = ManualTransport()
    threads: list[threading.Thread] = []
    with running_core(partition_size=10, credit=10) as core:
        enqueue(core, transport, "plug", 20)
        transport.wait_for(1)

        def launch(sub: SubCommTask) -> None:
            threads.append(threading.current_thread())
            transport(sub)

        urgent = enqueue(core, launch, "urgent", 25, immediate=True, priority=99)
        assert transport.names == ["plug[0]", "urgent[0]", "urgent[1]", "urgent[2]"]
        assert threads == [threading.current_thread()] * 3
        assert core.in_flight == 10
        with pytest.raises(TaskStateError, match="it was ready before"):
            urgent.notify_ready()
        with pytest.raises(SchedulerTimeoutError, match=r"urgent\[0\] started"):
            core.drain(0)
        for sub in urgent.sub_tasks:
            assert sub.ready_at <= sub.started_at
            sub.notify_finish()
        urgent.wait(0)
        assert core.in_flight == 10
        settle(core, transport)


def test_an_immediate_task_that_fails_is_not_sent_any_further() -> None:
    sent: list[str] = []

    def launch(sub: SubCommTask) -> None:
        sent.append(sub.name)
        sub.fail(LOST)

    with running_core() as core:
        task = enqueue(core, launch, "t", 30, immediate=True)
        with pytest.raises(ConnectionError, match="the network is gone"):
            task.wait(0)
        core.drain(0)  # nothing is left of it
    assert sent == ["t[0]"]


def test_what_an_immediate_launch_raises_reaches_the_caller() -> None:
    def launch(sub: SubCommTask) -> None:
        raise LOST

    with running_core() as core:
        task = CommTask("t", 30, launch=launch, immediate=True)
        with pytest.raises(ConnectionError):
            core.enqueue(task)
        assert task.error is LOST
        core.drain(0)
        assert core.abort_cause is None


def test_an_abort_stops_an_immediate_task_halfway() -> None:
    transport = ManualTransport()
    with running_core() as core:

        def launch(sub: SubCommTask) -> None:
            transport(sub)
            core.abort(LOST)

        task = enqueue(core, launch, "t", 30, immediate=True)
        assert transport.names == ["t[0]"]
        assert task.error is LOST
        transport.launched[0].notify_finish()
        assert core._in_flight == set()


# ---------------------------------------------------------------------- draining


def test_a_drain_waits_for_what_is_ready_and_for_nothing_else() -> None:
    transport = ManualTransport()
    with running_core(credit=10) as core:
        core.drain(0)
        enqueue(core, transport, "never ready", ready=False)
        core.drain(0)
        partly = enqueue(core, transport, "partly", 30, ready=False)
        partly.sub_tasks[1].notify_ready()
        queued = enqueue(core, transport, "queued")
        transport.wait_for(1)
        with pytest.raises(SchedulerTimeoutError) as caught:
            core.drain(0)
        assert str(caught.value) == (
            "Communication did not drain within 0 s: partly[0] created, partly[1] started, partly[2] created; "
            "queued[0] ready."
        )
        settle(core, transport)
        assert queued.done()
        assert not partly.done()
        core.drain(0)
        partly.sub_tasks[0].notify_ready()
        partly.sub_tasks[2].notify_ready()
        with pytest.raises(SchedulerTimeoutError):
            core.drain(0)
        settle(core, transport)
        partly.wait(0)


def test_a_drain_ends_after_the_callbacks() -> None:
    in_callback, let_go = threading.Event(), threading.Event()

    def on_end(task: CommTask) -> None:
        in_callback.set()
        assert let_go.wait(WAIT)

    with running_core() as core:
        task = enqueue(core, lambda sub: sub.notify_finish(), "t", on_end=on_end)
        assert in_callback.wait(WAIT)
        with pytest.raises(SchedulerTimeoutError, match="the callback of t"):
            core.drain(0)
        let_go.set()
        core.drain(WAIT)
        assert task.done()


@pytest.mark.parametrize("how", ["whole", "one part", "not ready"])
def test_a_failed_task_holds_up_neither_a_drain_nor_other_tasks(how: str) -> None:
    transport = ManualTransport()
    with running_core(partition_size=10, credit=10) as core:
        plug = enqueue(core, transport, "plug")
        transport.wait_for(1)
        failing = enqueue(core, transport, "failing", 30, ready=how != "not ready")
        good = enqueue(core, transport, "good")
        if how == "one part":
            failing.sub_tasks[1].fail(LOST)
        else:
            failing.fail(LOST)
        assert failing.done()
        settle(core, transport)
        assert plug.done()
        assert good.done()
        assert core.abort_cause is None
        assert core._open_tasks == {}
        assert core.in_flight == 0
    assert transport.names == ["plug[0]", "good[0]"]


def test_what_is_in_flight_of_a_failed_task_keeps_its_credit_until_it_ends() -> None:
    transport = ManualTransport()
    with running_core(partition_size=10, credit=20) as core:
        failing = enqueue(core, transport, "failing", 30)
        transport.wait_for(2)
        failing.fail(LOST)
        assert core.in_flight == 20
        with pytest.raises(SchedulerTimeoutError, match=r"failing\[0\] started, failing\[1\] started"):
            core.drain(0)
        good = enqueue(core, transport, "good", priority=5)
        failing.sub_tasks[0].notify_finish()
        assert transport.wait_for(3)[2] is good.sub_tasks[0]
        failing.sub_tasks[1].fail(KeyError("too late"))
        settle(core, transport)
        assert failing.error is LOST


def test_a_task_that_fails_between_choice_and_launch_stops_nothing() -> None:
    """The window in which other ranks have been told already: it must be launched, and only it has failed."""
    stuck, transport = Stuck(), ManualTransport()
    with running_core(partition_size=10, credit=30) as core:
        held = enqueue(core, stuck, "held", ready=False)
        chosen = [enqueue(core, transport, name, priority=1, ready=False) for name in ("a", "b")]

        launcher = in_thread(partial(core.update_order, partial(ready_at_once, held, *chosen)))
        assert stuck.entered.wait(WAIT)
        assert core.in_flight == 30
        chosen[0].fail(LOST)
        chosen[1].sub_tasks[0].fail(LOST)
        with pytest.raises(ConnectionError):
            chosen[0].wait(0)
        assert core.in_flight == 30
        stuck.let_go.set()
        assert launcher() is None
        assert [sub.parent for sub in transport.wait_for(2)] == chosen
        settle(core, transport)
        assert (core.in_flight, core.abort_cause) == (0, None)
        held.wait(0)


# ---------------------------------------------------------------------- who launches


def test_a_thread_that_returns_credit_launches_what_it_allows() -> None:
    launchers: list[int] = []

    class Noting(ManualTransport):
        def __call__(self, sub: SubCommTask) -> None:
            launchers.append(threading.get_ident())
            super().__call__(sub)

    transport = Noting()
    with running_core(partition_size=10, credit=10) as core:
        enqueue(core, transport, "t", 30)
        transport.wait_for(1)
        until(lambda: not core._launching.locked())  # else the dispatcher, still at it, would see to it
        transport.launched[0].notify_finish()
        transport.launched[1].notify_finish()
        settle(core, transport)
    assert launchers == [core._dispatcher.ident, threading.get_ident(), threading.get_ident()]


def test_what_is_allowed_while_another_thread_launches_is_launched_by_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher sleeps here: credit that is returned during a launch must not wait until it wakes up."""
    transport, stuck = ManualTransport(), Stuck()
    with running_core(partition_size=10, credit=20) as core:
        first = enqueue(core, transport, "first", 10)
        transport.wait_for(1)
        held = enqueue(core, stuck, "held", 10)
        assert stuck.entered.wait(WAIT)
        monkeypatch.setattr(core, "_wake", lambda: None)
        later = enqueue(core, transport, "later", 10)
        first.sub_tasks[0].notify_finish()  # on this thread, which finds the lock taken
        assert transport.names == ["first[0]"]
        stuck.let_go.set()
        transport.wait_for(2)
        assert transport.names == ["first[0]", "later[0]"]
        later.sub_tasks[0].notify_finish()
        held.wait(WAIT)


def test_launches_never_overlap() -> None:
    launching = threading.Lock()
    overlaps: list[str] = []

    def launch(sub: SubCommTask) -> None:
        if not launching.acquire(blocking=False):
            overlaps.append(sub.name)
            return
        time.sleep(0.0002)
        ended.put(sub)
        launching.release()

    ended: queue.SimpleQueue[SubCommTask | None] = queue.SimpleQueue()

    def finish() -> None:
        while (sub := ended.get()) is not None:
            sub.notify_finish()

    with running_core(partition_size=1, credit=4) as core:
        finishers = [in_thread(finish) for _ in range(3)]
        tasks = [CommTask(f"t{n}", 20, launch=launch, key=TaskKey(0, bucket=n)) for n in range(20)]
        for task in tasks:
            core.enqueue(task)
            task.notify_ready()
        for task in tasks:
            task.wait(WAIT)
        for _ in finishers:
            ended.put(None)
        assert [join() for join in finishers] == [None] * 3
    assert overlaps == []
