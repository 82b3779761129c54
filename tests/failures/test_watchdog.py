from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from lightning_bytescheduler.failures.standstill import Watchdog, frame_of

_GARBAGE_WITH_A_THREAD = """
import gc, threading
from lightning_bytescheduler.failures.standstill import frame_of

class Knot:
    def __init__(self):
        self.itself = self

    def __del__(self):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def wait():
    there.release()
    over.wait()

over, there = threading.Event(), threading.Semaphore(0)
for _ in range(10):
    thread = threading.Thread(target=wait)
    thread.start()
    there.acquire()
gc.disable()
Knot()
gc.enable()
gc.set_threshold(gc.get_count()[0] + 5)
frame_of(threading.get_ident())  # makes an object of each thread's frame
gc.collect()
over.set()
"""


def test_a_watchdog_that_is_not_armed_ends_nothing() -> None:
    codes: list[int] = []
    Watchdog(patience=0.0, end=codes.append).check()
    assert codes == []


def test_it_ends_the_process_once_and_says_why_and_where(caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []
    watchdog = Watchdog(patience=0.0, end=codes.append)
    watchdog.arm("Rank 1 failed: boom.")
    watchdog.arm("what came of it")
    watchdog.check()
    watchdog.check()
    assert codes == [1]
    assert "Rank 1 failed: boom. The training thread did not come back within 0 s" in caplog.text
    assert "test_it_ends_the_process_once_and_says_why_and_where" in caplog.text


def test_it_ends_nothing_once_disarmed_or_while_suspended() -> None:
    codes: list[int] = []
    watchdog = Watchdog(patience=0.0, end=codes.append)
    watchdog.arm("Rank 1 failed: boom")
    with watchdog.suspended():
        watchdog.check()
    watchdog.disarm()
    watchdog.check()
    assert codes == []


def test_garbage_that_joins_a_thread_is_not_collected_while_a_frame_is_looked_for() -> None:
    """All threads of the process stood still there, with Python 3.10 and 3.11."""
    subprocess.run([sys.executable, "-c", _GARBAGE_WITH_A_THREAD], check=True, timeout=60)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_frame_is_found_and_collection_is_left_as_it_was(enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        frame = frame_of(threading.get_ident())
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert frame is not None
    assert frame_of(-1) is None
