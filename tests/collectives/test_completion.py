from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from lightning_bytescheduler.collectives.completion import CompletionThread, wait_in_slices
from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.exceptions import RankFailedError, SchedulerTimeoutError
from tests.support.waiting import WAIT


class Work:
    """A collective as gloo has it: a slice that runs out raises, and leaves the collective under way."""

    def __init__(self, *, done: bool = False, ends_while_raising: bool = False, ends_in_slice: int = 0) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._ends_while_raising = ends_while_raising
        self._ends_in_slice = ends_in_slice
        self.waits = 0
        self.waited_for = threading.Event()
        if done:
            self._ended.set()

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> bool:
        self.waits += 1
        self.waited_for.set()
        if self.waits == self._ends_in_slice:
            self._ended.set()
        if not self._ended.wait(min(timeout.total_seconds(), 0.05)):
            if self._ends_while_raising:
                self._ended.set()
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error
        return True


class SubTask:
    """Receives the outcome from the thread."""

    def __init__(self, name: str, outcomes: list[tuple[str, BaseException | None]]) -> None:
        self.name = name
        self.size = 1000
        self._outcomes = outcomes
        self.ended = threading.Event()

    def notify_finish(self) -> None:
        self._outcomes.append((self.name, None))
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        self._outcomes.append((self.name, error))
        self.ended.set()


class Watch:
    """A completion thread with what it was told and what it told."""

    def __init__(self, *, cause: BaseException | None = None) -> None:
        self.outcomes: list[tuple[str, BaseException | None]] = []
        self.errors: list[BaseException] = []
        self._cause = cause
        self.thread = CompletionThread(self._on_error)

    def _on_error(self, error: BaseException) -> BaseException:
        self.errors.append(error)
        return error if self._cause is None else self._cause

    def watch(self, name: str, work: Work) -> SubTask:
        sub_task: Any = SubTask(name, self.outcomes)
        watched: Any = work
        self.thread.watch(StartedOperation([watched]), sub_task)
        return sub_task

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.thread.stop(WAIT)


def test_wait_in_slices_outlasts_slices() -> None:
    work: Any = Work(ends_in_slice=3)
    assert wait_in_slices(work, threading.Event())
    assert work.waits >= 3


def test_a_collective_that_succeeds_while_its_slice_runs_out_has_succeeded() -> None:
    work: Any = Work(ends_while_raising=True)
    assert wait_in_slices(work, threading.Event())


def test_wait_in_slices_raises_what_the_collective_failed_with() -> None:
    work: Any = Work()
    threading.Timer(0.01, work.end, [RuntimeError("Connection closed by peer")]).start()
    with pytest.raises(RuntimeError, match="Connection closed"):
        wait_in_slices(work, threading.Event())


def test_wait_in_slices_can_be_stopped() -> None:
    stopping = threading.Event()
    stopping.set()
    work: Any = Work()
    assert not wait_in_slices(work, stopping)


def test_sub_tasks_hear_in_the_order_of_launch() -> None:
    works = [Work() for _ in range(3)]
    with Watch() as watch:
        subs = [watch.watch(f"part {n}", work) for n, work in enumerate(works)]
        for work in reversed(works):
            work.end()
        assert subs[-1].ended.wait(WAIT)
        assert watch.outcomes == [("part 0", None), ("part 1", None), ("part 2", None)]
        assert not watch.errors


def test_the_first_error_fails_everything_after_it_with_its_explanation() -> None:
    cause = RankFailedError(1, "ValueError: boom")
    works = [Work(done=True), Work(), Work()]
    with Watch(cause=cause) as watch:
        subs = [watch.watch(f"part {n}", work) for n, work in enumerate(works)]
        closed = RuntimeError("gloo: Connection closed by peer")
        works[1].end(closed)
        # No rank joins the last one, and it is not waited for.
        assert subs[2].ended.wait(WAIT)
        assert watch.outcomes == [("part 0", None), ("part 1", cause), ("part 2", cause)]
        assert watch.errors == [closed]


def test_a_timeout_names_what_is_missing() -> None:
    work = Work()
    with Watch() as watch:
        sub_task = watch.watch("bucket 3[1]", work)
        work.end(RuntimeError("[/src/gloo/buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"))
        assert sub_task.ended.wait(WAIT)
        (error,) = watch.errors
        assert isinstance(error, SchedulerTimeoutError)
        assert str(error) == (
            "bucket 3[1] (1,000 parameters) did not arrive in time: "
            "Timed out waiting 3000ms for recv operation to complete."
        )


def test_the_thread_ends_although_a_collective_never_does() -> None:
    watch, work = Watch(), Work()
    watch.watch("part 0", work)
    assert work.waited_for.wait(WAIT)
    assert watch.thread.stop(WAIT)
    assert not watch.outcomes


def test_an_operation_is_finished_on_the_thread_when_all_of_it_has_ended() -> None:
    first: Any = Work()
    second: Any = Work()
    finished_by: list[str] = []
    with Watch() as watch:
        sub_task: Any = SubTask("part 0", watch.outcomes)
        finish = lambda: finished_by.append(threading.current_thread().name)  # noqa: E731
        watch.thread.watch(StartedOperation([first, second], finish), sub_task)
        second.end()
        assert not sub_task.ended.wait(0.1)
        first.end()
        assert sub_task.ended.wait(WAIT)
    assert finished_by == ["bytescheduler-completion"]


def test_what_finishing_raises_fails_the_sub_task() -> None:
    work: Any = Work(done=True)
    with Watch() as watch:
        sub_task: Any = SubTask("part 0", watch.outcomes)
        watch.thread.watch(StartedOperation([work], lambda: [][1]), sub_task)
        assert sub_task.ended.wait(WAIT)
        assert isinstance(watch.outcomes[0][1], IndexError)
