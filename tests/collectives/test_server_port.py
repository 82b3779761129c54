"""The port that tells a living server from a dead one is hard to disturb."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lightning_bytescheduler.collectives import server_meeting
from lightning_bytescheduler.collectives.server_meeting import ServerLine, ServerPort, SignedOn
from tests.support.waiting import WAIT, until


@pytest.fixture
def door() -> Iterator[ServerPort]:
    """Of a server that lives."""
    opened = ServerPort("127.0.0.1")
    yield opened
    opened.close()


def connected(door: ServerPort) -> int:
    return len(door._known) + len(door._strangers)


def stranger(door: ServerPort) -> socket.socket:
    return socket.create_connection(("127.0.0.1", door.own.port), timeout=WAIT)


def test_it_hangs_up_on_who_says_something_else(door: ServerPort) -> None:
    line, own = ServerLine(0, door.own), door.own
    for _ in range(200):
        with stranger(door) as one:
            one.sendall(b"\x00garbage" * 20)
    wrong = SignedOn(host=own.host, port=own.port, pid=own.pid, version=own.version, token="0" * len(own.token))
    with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
        ServerLine(0, wrong)
    with stranger(door) as one:
        one.sendall(f"{own.token}and more".encode())
        until(lambda: connected(door) == 1)
    assert line.find_gone() is None
    door.close()
    gone = line.find_gone()
    assert gone is not None
    assert str(gone).endswith("has ended")
    line.close()


def test_many_strangers_that_say_nothing_take_no_workers_place(
    door: ServerPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_meeting, "_MOST_STRANGERS", 20)
    monkeypatch.setattr(server_meeting, "_PATIENCE_S", 300.0)
    first = ServerLine(0, door.own)
    strangers = [stranger(door) for _ in range(100)]
    late = ServerLine(0, door.own)
    until(lambda: 2 < connected(door) <= 22)
    assert first.find_gone() is None
    assert late.find_gone() is None
    for one in strangers:
        one.close()
    first.close()
    late.close()
    until(lambda: connected(door) == 0)


def test_a_stranger_that_says_nothing_is_hung_up_on(door: ServerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_meeting, "_PATIENCE_S", 0.1)
    line = ServerLine(0, door.own)
    with stranger(door) as one:
        one.settimeout(WAIT)
        assert one.recv(1) == b""
    until(lambda: connected(door) == 1)
    line.close()
    assert line.find_gone() is None, "it was this side"


def test_who_connects_as_it_ends_is_hung_up_on_without_a_word_in_the_log(
    door: ServerPort, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    caplog.clear()
    line, held = ServerLine(0, door.own), threading.Event()
    door._loop.call_soon_threadsafe(held.wait, WAIT)
    late = [stranger(door) for _ in range(3)]
    door._loop.call_soon_threadsafe(door._loop.stop)
    held.set()
    door.close(WAIT)
    for one in late:
        with one, suppress(ConnectionResetError):
            assert one.recv(1) == b""
    assert line.find_gone() is not None
    line.close()
    gc.collect()  # a task that has not ended says so
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
