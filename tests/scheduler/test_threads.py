from __future__ import annotations

import ctypes
import platform
import struct
import sys
import threading
from collections.abc import Iterator

import pytest

from lightning_bytescheduler.scheduler import threads as module
from lightning_bytescheduler.scheduler.threads import InterpreterTurns, prefer_short_turns, short_turns
from tests.scheduler.harness import running_core
from tests.support.waiting import WAIT, until

_GET = {"x86_64": 315, "aarch64": 275, "riscv64": 275}
SHORT = 100_000


def turn(thread: int = 0) -> int:
    """What the kernel says of a thread, in nanoseconds; 0 if it knows no such thing."""
    number = _GET.get(platform.machine()) if sys.platform == "linux" else None
    attributes = ctypes.create_string_buffer(48)
    if number is None or ctypes.CDLL(None).syscall(number, thread, attributes, 48, 0):
        return 0
    return int(struct.unpack("IIQiIQQQ", attributes.raw)[5])


needs_support = pytest.mark.skipif(turn() == 0, reason="the kernel has no turns of one's own length (Linux 6.12)")


def in_a_thread(what: list[int], *, before: bool) -> None:
    if before:
        prefer_short_turns()
    what.append(turn())


@needs_support
@pytest.mark.parametrize("asked", [True, False])
def test_only_a_thread_that_asks_has_short_turns(asked: bool) -> None:
    usual = turn()
    found: list[int] = []
    thread = threading.Thread(target=in_a_thread, args=(found,), kwargs={"before": asked})
    thread.start()
    thread.join(WAIT)
    assert found == [SHORT if asked else usual]
    assert turn() == usual > SHORT


@needs_support
def test_threads_started_meanwhile_inherit_them() -> None:
    usual = turn()
    found: list[int] = []
    with short_turns():
        thread = threading.Thread(target=in_a_thread, args=(found,), kwargs={"before": False})
        thread.start()
    thread.join(WAIT)
    assert found == [SHORT]
    assert turn() == usual


@needs_support
def test_the_dispatcher_has_them() -> None:
    with running_core(name="turns"):
        (dispatcher,) = (thread for thread in threading.enumerate() if thread.name == "turns-dispatcher")
        assert dispatcher.native_id is not None
        thread = dispatcher.native_id
        until(lambda: turn(thread) == SHORT)


@pytest.mark.parametrize(
    ("name", "value"), [("sys.platform", "darwin"), ("platform.machine", lambda: "an unknown processor")]
)
def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    usual = turn()
    monkeypatch.setattr(f"{module.__name__}.{name}", value)
    assert not prefer_short_turns()
    with short_turns():
        pass
    monkeypatch.undo()
    assert turn() == usual


@pytest.fixture
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_the_interpreter_switches_sooner_until_the_last_user_ends(interval: float) -> None:
    first, second = InterpreterTurns(), InterpreterTurns()
    assert sys.getswitchinterval() == pytest.approx(0.0005, abs=2e-6)
    first.end()
    first.end()
    assert sys.getswitchinterval() == pytest.approx(0.0005, abs=2e-6)
    second.end()
    assert sys.getswitchinterval() == pytest.approx(interval, abs=2e-6)


@pytest.mark.parametrize("chosen", [0.0001, 0.02])
def test_an_interval_that_somebody_chose_is_kept(interval: float, chosen: float) -> None:
    turns = InterpreterTurns()
    sys.setswitchinterval(chosen)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(chosen, abs=2e-6)
    turns = InterpreterTurns()
    assert sys.getswitchinterval() == pytest.approx(min(chosen, 0.0005), abs=2e-6)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(chosen, abs=2e-6)
