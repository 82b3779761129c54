from __future__ import annotations

import faulthandler

import pytest

from lightning_bytescheduler.failures.standstill import Watchdog


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds after which the process would have been ended from outside of Python."""
    seconds: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda after, **_: seconds.append(after))
    return seconds


def test_a_watchdog_that_is_not_armed_ends_nothing() -> None:
    codes: list[int] = []
    Watchdog(patience=0.0, end=codes.append).check()
    assert codes == []


def test_it_ends_the_process_once_and_says_why_and_where(caplog: pytest.LogCaptureFixture, later: list[float]) -> None:
    codes: list[int] = []
    watchdog = Watchdog(patience=0.0, end=codes.append)
    watchdog.arm("Rank 1 failed: boom.")
    watchdog.arm("what came of it")
    watchdog.check()
    watchdog.check()
    assert codes == [1]
    assert later == [1.0], "nothing that Python does can keep it"
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
