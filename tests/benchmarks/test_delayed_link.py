"""Packets arrive no earlier than asked for, all of them, as they were sent."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import delayed_link
from benchmarks.delayed_link import DelayedLink, _Forwarder

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
connection, _ = server.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while received := connection.recv(1):
    connection.sendall(received)
"""
PING = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(5):
    started = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    print(time.perf_counter() - started)
"""
RECEIVER = """
import hashlib, socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
connection, _ = server.accept()
digest = hashlib.sha256()
while received := connection.recv(1 << 20):
    digest.update(received)
print(digest.hexdigest())
"""
SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
connection.sendall(sys.stdin.buffer.read())
"""


@pytest.fixture(autouse=True)
def _link_available(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("root") is None:
        return
    available, reason = DelayedLink.available()
    if not available:
        pytest.skip(reason)


def listen(link: DelayedLink, host: int, program: str) -> subprocess.Popen[bytes]:
    child = link.popen(host, [sys.executable, "-c", program, link.address(host)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"listening\n"
    return child


@pytest.mark.root
def test_a_round_trip_takes_as_long_as_asked_for() -> None:
    with DelayedLink(hosts=2, round_trip_seconds=0.03) as link:
        echo = listen(link, 0, ECHO)
        ping = link.popen(1, [sys.executable, "-c", PING, link.address(0)], stdout=subprocess.PIPE)
        answered = [float(line) for line in ping.communicate(timeout=30)[0].split()]
        echo.communicate(timeout=30)
    assert len(answered) == 5
    assert min(answered) >= 0.03


@pytest.mark.root
@pytest.mark.parametrize("round_trip_seconds", [0.0, 0.02])
def test_bytes_arrive_as_they_were_sent(round_trip_seconds: float) -> None:
    sent = [os.urandom(3_000_000 + host) for host in range(3)]
    with DelayedLink(hosts=3, round_trip_seconds=round_trip_seconds) as link:
        receivers = [listen(link, host, RECEIVER) for host in range(3)]
        senders = []
        for host in range(3):
            command = [sys.executable, "-c", SENDER, link.address((host + 1) % 3)]
            senders.append(link.popen(host, command, stdin=subprocess.PIPE))
        for sender, content in zip(senders, sent, strict=True):
            assert sender.stdin is not None
            sender.stdin.write(content)
            sender.stdin.close()
        digests = [receiver.communicate(timeout=60)[0].decode().strip() for receiver in receivers]
        assert [sender.wait(timeout=30) for sender in senders] == [0, 0, 0]
    expected = [hashlib.sha256(content).hexdigest() for content in sent]
    assert digests == [expected[2], expected[0], expected[1]]


@pytest.mark.root
def test_nothing_remains() -> None:
    with DelayedLink(hosts=2) as link:
        names = [link.namespace(host) for host in range(2)]
        forwarder = link._forwarder
        assert forwarder is not None
        assert forwarder.poll() is None
    assert forwarder.poll() is not None
    remaining = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in remaining for name in names)


@pytest.mark.root
def test_the_forwarder_ends_with_its_owner() -> None:
    with DelayedLink(hosts=1) as link:
        forwarder = link._forwarder
        assert forwarder is not None
        assert forwarder.stdin is not None
        forwarder.stdin.close()
        assert forwarder.wait(timeout=10) == 0


@pytest.mark.parametrize("seconds", [-0.1, 60, float("nan"), float("inf")])
def test_impossible_round_trips_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="round_trip_seconds must be from 0 to 60"):
        DelayedLink(round_trip_seconds=seconds)


class Network:
    """Two hosts whose devices are lists, on a clock that only the test moves."""

    hosts = (bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2]))

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.arrived: list[tuple[float, int, bytes]] = []
        monkeypatch.setattr(delayed_link, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.forwarder = _Forwarder(
            {host: index for index, host in enumerate(self.hosts)}, bytes_per_second=1000.0, delay=2.0
        )
        writing: Any = SimpleNamespace(write=lambda device, packet: self.arrived.append((self.now, device, packet)))
        monkeypatch.setattr(delayed_link, "os", writing)

    def packet(self, receiver: int, size: int, mark: bytes = b"x") -> bytes:
        header = bytes([0x45]) + bytes(11) + self.hosts[1 - receiver] + self.hosts[receiver]
        return header + mark * (size - len(header))

    def at(self, now: float) -> list[tuple[float, int, bytes]]:
        self.now = now
        self.arrived.clear()
        self.forwarder._deliver()
        return list(self.arrived)


def test_a_packet_is_delayed_and_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch)
    first, second = network.packet(1, 100, b"a"), network.packet(1, 500, b"b")
    network.forwarder._accept(first)
    network.forwarder._accept(second)  # half a second behind the first, at 1000 bytes a second
    assert network.forwarder._milliseconds() == 2000.0
    assert network.at(101.999) == []
    assert network.at(102.0) == [(102.0, 1, first)]
    assert network.at(102.499) == []
    assert network.at(102.5) == [(102.5, 1, second)]
    assert network.forwarder._milliseconds() is None


def test_receivers_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch)
    for receiver in (0, 1):
        network.forwarder._accept(network.packet(receiver, 900))
    assert [device for _, device, _ in network.at(102.0)] == [0, 1]


def test_strangers_and_other_protocols_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch)
    network.forwarder._accept(b"\x45" + bytes(15) + bytes([192, 168, 0, 1]))
    network.forwarder._accept(b"\x60" + network.packet(0, 40)[1:])
    assert network.at(1000.0) == []


def test_what_waits_for_one_host_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_link, "_MOST_WAITING", 250)
    network = Network(monkeypatch)
    for _ in range(5):
        network.forwarder._accept(network.packet(0, 100))
    assert len(network.at(1000.0)) == 3
    network.forwarder._accept(network.packet(0, 100))
    assert len(network.at(2000.0)) == 1
