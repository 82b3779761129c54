"""A slow network with a round-trip time: hosts whose packets arrive later, and no faster than their links carry them.

Each host is a network namespace, as with `ShapedLink`, but its ``eth0`` is a TUN device rather than the end of a veth
pair. A process of ours holds the other side of all of them and is the switch: it reads a packet, waits for its turn on
the receiver's link and for the delay, and hands it to the receiver. What a host sends is limited by
the kernel (``tc tbf``), what it receives by the forwarder. Packets hold up to 64 KiB, so that a forwarder in Python
keeps up.

Limits: Linux and root only, and ``/dev/net/tun``. Links are neither lossy nor jittery on purpose, but a busy machine
makes packets later than asked for, never earlier. More than 64 MiB on their way to one host are dropped.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shaped_link import LinkError, ShapedLink, _command

__all__ = ["PAYLOAD_SHARE", "DelayedLink", "enter_network", "processor_seconds"]

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 65520
_MOST_WAITING = 64 * 2**20
PAYLOAD_SHARE = (_MTU - 52) / _MTU
"""Share of a full packet that is not IP's or TCP's header."""

_REPOSITORY = Path(__file__).parents[1]
_DESTINATION = slice(16, 20)  # of an IPv4 packet


class DelayedLink(ShapedLink):
    """Hosts joined by links of limited rate, from ``with`` to its end, see `ShapedLink`.

    A packet and its answer are under way for ``round_trip_seconds``, besides what they occupy links for.
    """

    def __init__(self, hosts: int = 2, mbit: float = 500.0, *, round_trip_seconds: float = 0.02) -> None:
        super().__init__(hosts, mbit)
        if not 0 <= round_trip_seconds < 60:
            raise ValueError(f"round_trip_seconds must be from 0 to 60, not {round_trip_seconds}.")
        self.round_trip_seconds = round_trip_seconds
        self._forwarder: subprocess.Popen[bytes] | None = None

    @staticmethod
    def available() -> tuple[bool, str]:
        """Says whether this process may build a delayed link; see `ShapedLink.available`."""
        if not os.path.exists("/dev/net/tun"):
            return False, "Delaying packets needs the device /dev/net/tun, and there is none."
        possible, reason = ShapedLink.available()
        if not possible:
            return False, reason
        try:
            with DelayedLink(hosts=1, mbit=100.0):
                return True, ""
        except (LinkError, OSError) as error:
            return False, f"This system refuses to build a delayed link: {error}"

    def _build(self) -> None:
        for host in range(self.hosts):
            _command("ip", "netns", "add", self.namespace(host))
            _command("ip", "-n", self.namespace(host), "link", "set", "dev", "lo", "up")
        self._start_forwarder()
        for host in range(self.hosts):
            inside = ("-n", self.namespace(host))
            _command("ip", *inside, "link", "set", "dev", "eth0", "addrgenmode", "none", "mtu", str(_MTU))
            _command("ip", *inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _command("tc", *inside, "qdisc", "add", "dev", "eth0", *self._limit())
            _command("ip", *inside, "link", "set", "dev", "eth0", "up")

    def _start_forwarder(self) -> None:
        hosts = [f"{self.namespace(host)}={self.address(host)}" for host in range(self.hosts)]
        self._forwarder = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.delayed_link", str(self.mbit), str(self.round_trip_seconds / 2), *hosts],
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        output = self._forwarder.stdout
        if output is None or output.readline() != b"ready\n":
            with self._forwarder as failed:
                complaint = b"" if failed.stderr is None else failed.stderr.read()
            raise LinkError(f"The forwarder did not start: {complaint.decode(errors='replace').strip()[-500:]}")

    def _remove(self) -> None:
        try:
            super()._remove()
        finally:
            forwarder, self._forwarder = self._forwarder, None
            if forwarder is not None:
                with forwarder:
                    forwarder.kill()  # it keeps nothing


class _Forwarder:
    """Reads packets from devices (TUN, non-blocking, by IPv4 address) and writes each to its receiver's, when due."""

    def __init__(self, devices: dict[bytes, int], *, bytes_per_second: float, delay: float) -> None:
        self._devices = devices
        self._seconds_per_byte = 1 / bytes_per_second
        self._delay = delay
        self._free_at = dict.fromkeys(devices, 0.0)
        self._waiting: dict[bytes, int] = collections.defaultdict(int)
        self._queue: list[tuple[float, int, bytes, bytes]] = []
        self._number = 0

    def run(self, until_closed: int) -> None:
        """Forward until the other end of the pipe ``until_closed`` is closed."""
        poll = select.poll()
        poll.register(until_closed, select.POLLIN | select.POLLHUP)
        for device in self._devices.values():
            poll.register(device, select.POLLIN)
        while True:
            ready = poll.poll(self._milliseconds())
            self._deliver()
            for device, _ in ready:
                if device == until_closed:
                    return
                self._read(device)

    def _milliseconds(self) -> float | None:
        """Until the next packet is due; rounded up, so that none arrives early and nothing spins."""
        if not self._queue:
            return None
        return max(0.0, -(-(self._queue[0][0] - time.monotonic()) * 1e3 // 1))

    def _read(self, device: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(device, _MTU)
                self._accept(packet)

    def _accept(self, packet: bytes) -> None:
        receiver = packet[_DESTINATION]
        if packet[0] >> 4 != 4 or receiver not in self._devices or self._waiting[receiver] > _MOST_WAITING:
            return
        now = time.monotonic()
        # On an idle link the receiver's part passes while the sender's does.
        self._free_at[receiver] = max(now, self._free_at[receiver] + len(packet) * self._seconds_per_byte)
        self._waiting[receiver] += len(packet)
        self._number += 1  # packets that are due at one moment keep their order
        heapq.heappush(self._queue, (self._free_at[receiver] + self._delay, self._number, receiver, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._queue)
            self._waiting[receiver] -= len(packet)
            # A device that is not up yet takes nothing.
            with contextlib.suppress(OSError):
                os.write(self._devices[receiver], packet)


def _open_devices(hosts: Sequence[tuple[str, bytes]]) -> dict[bytes, int]:
    """Make a device ``eth0`` in each namespace; it stays there when this process has left the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    devices = {}
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        for namespace, address in hosts:
            inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            try:
                enter_network(libc, inside)
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"eth0", _IFF_TUN | _IFF_NO_PI))
                devices[address] = device
            finally:
                os.close(inside)
                enter_network(libc, home)
    finally:
        os.close(home)
    return devices


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def enter_network(libc: ctypes.CDLL, namespace: int) -> None:
    """Have this thread see the network of the namespace that a file is open on."""
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _forward(argv: Sequence[str]) -> None:
    mbit, delay, *hosts = argv
    pairs = [host.split("=") for host in hosts]
    devices = _open_devices([(name, bytes(map(int, address.split(".")))) for name, address in pairs])
    forwarder = _Forwarder(devices, bytes_per_second=float(mbit) * 1e6 / 8, delay=float(delay))
    print("ready", flush=True)
    forwarder.run(sys.stdin.fileno())


if __name__ == "__main__":
    _forward(sys.argv[1:])
