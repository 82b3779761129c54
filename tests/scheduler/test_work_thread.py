"""A thread that does one piece of work after the other: in order, with an end, and with nothing left waiting."""

from __future__ import annotations

import threading

from lightning_bytescheduler.scheduler.threads import WorkThread
from tests.support.waiting import WAIT


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "bytescheduler-codec"]


def never(error: BaseException) -> None:
    raise AssertionError from error


def test_it_starts_with_the_first_work_and_goes_in_order() -> None:
    codec = WorkThread("codec")
    assert not running()
    seen: list[int] = []
    for number in range(50):
        codec.put(lambda number=number: seen.append(number), never)  # type: ignore[misc]
    assert running()
    assert codec.stop(WAIT)
    assert seen == list(range(50)), "what was put before the end is done"
    assert not running()
    assert WorkThread("codec").stop(0.1), "one that has had nothing to do"


def test_after_an_error_nothing_more_is_begun() -> None:
    codec, failed, seen = WorkThread("codec"), list[BaseException](), list[int]()
    codec.put(lambda: print(1 / 0), failed.append)
    codec.put(lambda: seen.append(1), failed.append)
    assert codec.stop(WAIT)
    assert len(failed) == 2
    assert failed[0] is failed[1]
    assert isinstance(failed[0], ZeroDivisionError)
    assert not seen


def test_what_is_dropped_is_not_begun() -> None:
    codec = WorkThread("codec")
    begun, may_end, left = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        begun.set()
        may_end.wait(WAIT)

    codec.put(work, never)
    codec.put(lambda: left.append(1), never)
    assert begun.wait(WAIT)
    assert not codec.stop(0.01, drop=True)
    may_end.set()
    assert codec.stop(WAIT)
    assert not left
