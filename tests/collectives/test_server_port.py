"""The port that tells a living server from a dead one is hard to disturb."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from lightning_bytescheduler.collectives import server_meeting
from lightning_bytescheduler.collectives.server_meeting import ServerPort, call_on


@pytest.fixture
def door() -> Iterator[ServerPort]:
    """Of a server that lives."""
    opened = ServerPort("127.0.0.1")
    yield opened
    opened.close()


def until(door: ServerPort, connections: int) -> int:
    """Wait for that few connections, and return how many there are."""
    deadline = time.monotonic() + 20.0
    while door.connections > connections and time.monotonic() < deadline:
        time.sleep(0.01)
    return door.connections


def test_it_hangs_up_on_who_says_something_else(door: ServerPort) -> None:
    presence = call_on("127.0.0.1", door.port, door.token)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", door.port), timeout=10.0) as one:
            one.sendall(b"\x00garbage" * 20)
    with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
        call_on("127.0.0.1", door.port, "0" * len(door.token))
    assert until(door, 1) == 1
    assert not presence.gone()
    door.close()
    assert presence.gone()
    presence.close()


def test_strangers_that_say_nothing_take_no_workers_place(door: ServerPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_meeting, "_MOST_STRANGERS", 20)
    first = call_on("127.0.0.1", door.port, door.token)
    strangers = [socket.create_connection(("127.0.0.1", door.port), timeout=10.0) for _ in range(100)]
    late = call_on("127.0.0.1", door.port, door.token)
    assert 2 < until(door, 22) <= 22
    assert not first.gone()
    assert not late.gone()
    monkeypatch.setattr(server_meeting, "_PATIENCE_S", 0.1)
    assert until(door, 2) == 2
    assert not first.gone()
    for stranger in strangers:
        stranger.close()
    first.close()
    late.close()
    assert until(door, 0) == 0
