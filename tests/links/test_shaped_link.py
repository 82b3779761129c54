"""The shaped link limits both directions to the rate asked for, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.shaped_link import LinkError, ShapedLink

REPOSITORY = Path(__file__).parents[2]
MEGABYTES = 4

# Accepts `senders` connections and prints the seconds from the first byte to the last.
RECEIVER = """
import socket, sys, threading, time
senders, address = int(sys.argv[1]), sys.argv[2]
server = socket.create_server((address, 7000))
print("listening", flush=True)
connections = [server.accept()[0] for _ in range(senders)]
def drain(connection):
    while connection.recv(1 << 20):
        pass
threads = [threading.Thread(target=drain, args=(connection,)) for connection in connections]
for connection in connections:
    connection.sendall(b"g")
started = time.perf_counter()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(time.perf_counter() - started, flush=True)
"""
SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
connection.recv(1)
connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture(autouse=True)
def _link_available(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("root") is None:
        return
    available, reason = ShapedLink.available()
    if not available:
        pytest.skip(reason)


@pytest.fixture
def tidy() -> Iterator[None]:
    """Fails the test if namespaces of this process remain."""
    yield
    assert not _namespaces(os.getpid())


def _namespaces(pid: int) -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listing.splitlines() if line.startswith(f"lbs-{pid}-")]


def _seconds(link: ShapedLink, receiver: int, senders: list[int]) -> float:
    """How long ``senders`` take to bring `MEGABYTES` each to ``receiver``, all at once."""
    address = link.address(receiver)
    end = link.popen(receiver, [sys.executable, "-c", RECEIVER, str(len(senders)), address], stdout=subprocess.PIPE)
    assert end.stdout is not None
    assert end.stdout.readline() == b"listening\n"
    amount = str(MEGABYTES << 20)
    starts = [link.popen(sender, [sys.executable, "-c", SENDER, address, amount]) for sender in senders]
    output, _ = end.communicate(timeout=60)
    assert [start.wait(timeout=60) for start in starts] == [0] * len(senders)
    return float(output)


def _fastest(mbit: float, transfers: int = 1) -> float:
    """Seconds that no transfer may beat, with room for bursts and buffers: a busy machine only makes it slower."""
    return 0.7 * transfers * (MEGABYTES << 20) * 8 / (mbit * 1e6)


@pytest.mark.root
@pytest.mark.parametrize("direction", [(0, 1), (1, 0)])
@pytest.mark.parametrize("mbit", [50.0, 100.0])
def test_no_transfer_beats_the_rate_in_either_direction(tidy: None, direction: tuple[int, int], mbit: float) -> None:
    sender, receiver = direction
    with ShapedLink(hosts=2, mbit=mbit) as link:
        assert _seconds(link, receiver, [sender]) > _fastest(mbit)


@pytest.mark.root
def test_receiving_is_limited_too(tidy: None) -> None:
    with ShapedLink(hosts=3, mbit=100.0) as link:
        assert _seconds(link, 0, [1, 2]) > _fastest(100.0, transfers=2)


@pytest.mark.root
def test_process_finds_the_other_hosts_in_its_environment(tidy: None) -> None:
    names = ["MASTER_ADDR", "NODE_RANK", "GLOO_SOCKET_IFNAME", "X"]
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    with ShapedLink(hosts=2, mbit=500.0) as link:
        child = link.popen(1, [sys.executable, "-c", code], env={"X": "mine"}, stdout=subprocess.PIPE)
        output, _ = child.communicate(timeout=60)
        assert output.decode().split() == [link.address(0), "1", "eth0", "mine"]


@pytest.mark.root
def test_exception_stops_children_and_removes_everything(tidy: None) -> None:
    children: list[subprocess.Popen[bytes]] = []
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"

    def fail_while_children_run() -> None:
        with ShapedLink(hosts=2, mbit=500.0) as link:
            children.append(link.popen(0, ["sleep", "600"]))
            children.append(link.popen(1, [sys.executable, "-c", deaf], stdout=subprocess.PIPE))
            assert children[1].stdout is not None
            with children[1].stdout as output:
                output.readline()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_children_run()
    assert [child.returncode for child in children] == [-signal.SIGTERM, -signal.SIGKILL]


@pytest.mark.root
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_removes_everything(signum: signal.Signals) -> None:
    owner = _start_owner()
    assert len(_namespaces(owner.pid)) == 3
    owner.send_signal(signum)
    assert owner.wait(timeout=30) != 0
    assert not _namespaces(owner.pid)


@pytest.mark.root
def test_leftovers_of_dead_owners_are_removed_and_those_of_living_ones_kept(tidy: None) -> None:
    living, killed = _start_owner(), _start_owner()
    killed.kill()
    killed.wait(timeout=30)
    assert len(_namespaces(killed.pid)) == 3
    with ShapedLink(hosts=1, mbit=500.0):
        assert not _namespaces(killed.pid)
        assert len(_namespaces(living.pid)) == 3
    living.terminate()
    living.wait(timeout=30)


def _start_owner() -> subprocess.Popen[bytes]:
    """A process that holds a link of two hosts until it is told to stop."""
    code = """
        import signal, time
        from benchmarks.shaped_link import ShapedLink
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        with ShapedLink(hosts=2, mbit=500.0):
            print("up", flush=True)
            time.sleep(600)
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    with owner.stdout as output:
        assert output.readline() == b"up\n"
    return owner


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: ShapedLink(hosts=0), "hosts must be between 1 and 250, not 0"),
        (lambda: ShapedLink(mbit=0.0), "mbit must be a positive rate in Mbit/s, not 0.0"),
        (lambda: ShapedLink(hosts=2).namespace(2), "host must be between 0 and 1, not 2"),
    ],
)
def test_errors_name_the_option_and_its_range(build: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build()


def test_without_root_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert ShapedLink.available() == (
        False,
        "Shaping a link needs root, and this process does not run as root.",
    )


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    available, reason = ShapedLink.available()
    assert not available
    assert "ip and tc (package iproute2)" in reason


@pytest.mark.root
def test_a_refused_command_is_quoted_and_leaves_nothing(tidy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    link = ShapedLink(hosts=2, mbit=500.0)
    monkeypatch.setattr("benchmarks.shaped_link._BURST", "nonsense")
    with pytest.raises(LinkError, match=r"tc -n .* tbf .*nonsense.* failed: "), link:
        pytest.fail("The link was built with a nonsensical burst.")
