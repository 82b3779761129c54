from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from lightning_bytescheduler.exceptions import SchedulerClosedError, SchedulerTimeoutError, TaskStateError
from lightning_bytescheduler.scheduler import ByteCore, CommTask, PriorityOrder, SubCommTask, TaskState
from tests.scheduler.harness import WAIT, ManualTransport, enqueue, running_core, settle, until

LOST = ConnectionError("the network is gone")


class Stuck:
    """A launch that blocks until it is let go, as a transport must not; opens windows for races."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.launched: list[str] = []

    def __call__(self, sub: SubCommTask) -> None:
        self.launched.append(sub.name)
        self.entered.set()
        assert self.let_go.wait(WAIT)
        sub.notify_finish()


def ready_at_once(*tasks: CommTask) -> None:
    """Under the core's lock, the dispatcher sees them all or none, so that it makes one batch of them."""
    for task in tasks:
        task.notify_ready()


def in_thread(function: Callable[[], Any]) -> Callable[[], BaseException | None]:
    """Run ``function`` on a thread; what this returns waits for its end and returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> BaseException | None:
        thread.join(WAIT)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return join


# ---------------------------------------------------------------------- sending


def test_a_task_is_cut_sent_and_timed() -> None:
    ticks = iter(range(1000))
    seen: list[SubCommTask] = []
    transport = ManualTransport()
    with running_core(credit=100, clock=lambda: float(next(ticks)), observer=seen.append) as core:
        task = CommTask("t", 25, launch=transport)
        core.enqueue(task)
        assert [(sub.offset, sub.size) for sub in task.sub_tasks] == [(0, 10), (10, 10), (20, 5)]
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

        core.update_order(partial(ready_at_once, held, *chosen))
        assert stuck.entered.wait(WAIT)
        assert core.in_flight == 30
        chosen[0].fail(LOST)
        chosen[1].sub_tasks[0].fail(LOST)
        with pytest.raises(ConnectionError):
            chosen[0].wait(0)
        assert core.in_flight == 30
        stuck.let_go.set()
        assert [sub.parent for sub in transport.wait_for(2)] == chosen
        settle(core, transport)
        assert (core.in_flight, core.abort_cause) == (0, None)
        held.wait(0)


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
        core.update_order(partial(ready_at_once, first, rest))
        assert stuck.entered.wait(WAIT)
        assert core.in_flight == 40
        core.abort(LOST)
        stuck.let_go.set()
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

        def pop(self) -> SubCommTask | None:
            self.pops += 1
            if culprit == "pop" and self.pops == 2:
                raise LOST
            return super().pop()

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


def test_an_observer_that_raises_aborts_and_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
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


class Watched(threading.Condition):
    """Calls ``on_release`` when a block that took the lock has just let it go."""

    on_release: Callable[[], None] | None = None

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()


@pytest.mark.parametrize("ending", ["abort", "shutdown"])
def test_nothing_slips_in_while_the_core_ends(ending: str) -> None:
    refused: list[BaseException] = []
    with running_core() as core:

        def slip_in() -> None:
            with pytest.raises((ConnectionError, SchedulerClosedError)) as caught:
                core.enqueue(CommTask("late", 10, launch=ManualTransport()))
            refused.append(caught.value)

        held = enqueue(core, ManualTransport(), "held", ready=False)
        core._changed.__class__ = Watched
        core._changed.on_release = slip_in  # type: ignore[attr-defined]
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


def test_a_dispatcher_that_is_stuck_is_reported_within_the_bound() -> None:
    stuck, transport = Stuck(), ManualTransport()
    core = ByteCore(partition_size=10, credit=30)
    first = enqueue(core, stuck, "first", ready=False)
    rest = enqueue(core, transport, "rest", priority=1, ready=False)
    core.update_order(partial(ready_at_once, first, rest))
    assert stuck.entered.wait(WAIT)
    for _ in range(2):
        with pytest.raises(SchedulerTimeoutError, match="'bytescheduler-dispatcher' did not stop within"):
            core.shutdown(timeout=0.01, drain=False)
    assert isinstance(first.error, SchedulerClosedError)
    stuck.let_go.set()
    core.shutdown(timeout=WAIT)
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
