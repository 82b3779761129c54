"""The thread that encodes: in order, with an end, and with nobody left waiting."""

from __future__ import annotations

import threading
from typing import Any

from lightning_bytescheduler.collectives.transport import CodecThread
from tests.support.waiting import WAIT


class _SubTask:
    name = "bucket 0[0]"
    size = 3

    def __init__(self) -> None:
        self.failed: list[BaseException] = []
        self.ended = threading.Event()

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)
        self.ended.set()


def codec_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "bytescheduler-codec"]


def test_it_starts_with_the_first_work_and_goes_in_order() -> None:
    codec = CodecThread(lambda error: error)
    assert not codec_threads()
    seen: list[int] = []
    done = threading.Event()
    sub_task: Any = _SubTask()
    for number in range(50):
        codec.run(lambda number=number: seen.append(number), sub_task)  # type: ignore[misc]
    codec.run(done.set, sub_task)
    assert done.wait(WAIT)
    assert seen == list(range(50))
    assert codec_threads()
    assert codec.stop(WAIT)
    assert not codec_threads()
    assert CodecThread(lambda error: error).stop(0.1), "one that has had nothing to do"


def test_what_cannot_be_encoded_fails_its_sub_task_with_what_is_found_out_about_it() -> None:
    found = KeyError("found out")
    codec = CodecThread(lambda error: found if isinstance(error, ZeroDivisionError) else error)
    sub_task: Any = _SubTask()
    codec.run(lambda: print(1 / 0), sub_task)
    assert sub_task.ended.wait(WAIT)
    assert sub_task.failed == [found]
    assert codec.stop(WAIT)


def test_stopping_waits_for_what_is_under_way_alone() -> None:
    codec = CodecThread(lambda error: error)
    begun, may_end, left = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        may_end.wait(WAIT)

    sub_task: Any = _SubTask()
    codec.run(work, sub_task)
    codec.run(lambda: left.append(1), sub_task)
    assert begun.wait(WAIT)
    assert not codec.stop(0.01)
    may_end.set()
    assert codec.stop(WAIT)
    assert not left
