"""A slow network on one machine: hosts as network namespaces on a bridge, each link limited both ways.

Each host is a namespace whose ``eth0`` is one end of a veth pair; the other end is a port of a bridge that
lives in a namespace of its own, so nothing of the machine's own network is touched and addresses cannot
collide. A token bucket (``tc tbf``) on *both* ends of the pair limits what the host sends and what it
receives, so many senders to one host share that host's link as they would on a switch.

Limits: Linux and root only. The token bucket counts whole Ethernet frames, so TCP payload runs at about 96%
of the rate asked for. Its 20 ms are queueing, not propagation: round-trip times stay those of one machine.
Everything runs on this machine's processors, which a link of several Gbit/s keeps busy by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

# The bucket must hold the largest packet that reaches it. With segmentation offload that is 64 KiB, not 1500
# bytes: the kernel would split or drop packets larger than the bucket, and the rate fall far below the limit.
_BURST = "128kb"
_QUEUE = "20ms"
_PREFIX = "lbs"
_NAME = re.compile(rf"{_PREFIX}-(?P<pid>\d+)-\d+-(?:bridge|host\d+)")
_MASTER_PORT = "29500"
_MAX_HOSTS = 250
_SECONDS_TO_TERMINATE = 3.0

_link_numbers = itertools.count()


class LinkError(RuntimeError):
    """A command that builds or reads the shaped link failed; the message quotes it and its complaint."""


class ShapedLink:
    """Hosts joined by links of limited rate, from ``with`` to its end.

    Leaving the block stops the processes that `popen` started and removes every namespace, also after an
    exception, SIGINT or SIGTERM. What an owner killed by SIGKILL leaves behind, the next link removes.

    Args:
        hosts: How many hosts, 1 to 250.
        mbit: Rate of each host's link in Mbit/s (10^6 bits), for each direction.

    Raises:
        ValueError: If ``hosts`` or ``mbit`` is out of range.
        LinkError: On entry, if the system refuses; ask `available` beforehand for the reason.
    """

    def __init__(self, hosts: int = 2, mbit: float = 500.0) -> None:
        if not 1 <= hosts <= _MAX_HOSTS:
            raise ValueError(f"hosts must be between 1 and {_MAX_HOSTS}, not {hosts}.")
        if not 0 < mbit < float("inf"):
            raise ValueError(f"mbit must be a positive rate in Mbit/s, not {mbit}.")
        self.hosts = hosts
        self.mbit = mbit
        pid = os.getpid()
        self._stem = f"{_PREFIX}-{pid}-{next(_link_numbers)}"
        self._bridge = f"{self._stem}-bridge"
        self._network = f"10.{pid >> 8 & 255}.{pid & 255}"
        self._children: list[subprocess.Popen[bytes]] = []
        self._restore_sigterm = False

    @staticmethod
    def available() -> tuple[bool, str]:
        """Whether this process may build a shaped link, by building the smallest one; if not, also the reason."""
        if not hasattr(os, "geteuid") or os.geteuid() != 0:
            return False, "Shaping a link needs root, and this process does not run as root."
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            return False, f"Shaping a link needs {' and '.join(missing)} (package iproute2) on PATH."
        try:
            with ShapedLink(hosts=1, mbit=100.0) as link:
                child = link.popen(0, ["true"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                complaint = child.communicate()[1].decode(errors="replace").strip()
                if child.returncode != 0:
                    return False, f"This system refuses to run a process in a network namespace: {complaint}"
        except (LinkError, OSError) as error:
            return False, f"This system refuses to build a shaped link: {error}"
        return True, ""

    def __enter__(self) -> ShapedLink:
        self._exit_on_sigterm()
        try:
            with _signals_deferred():
                _remove_leftovers()
                self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace, as ``ip netns exec`` takes it."""
        if not 0 <= host < self.hosts:
            raise ValueError(f"host must be between 0 and {self.hosts - 1}, not {host}.")
        return f"{self._stem}-host{host}"

    def address(self, host: int) -> str:
        """The IPv4 address of a host's ``eth0``."""
        self.namespace(host)
        return f"{self._network}.{host + 1}"

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a process inside a host; its ``pid`` is the command's own.

        The process gets this process's environment, the variables by which torch and Lightning find the
        other hosts (as the only rank of its host), and ``env`` on top of both. It leads a session of its
        own, so Ctrl-C reaches the owner of the link alone, which then stops it.
        """
        variables = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": _MASTER_PORT,
            "WORLD_SIZE": str(self.hosts),
            "RANK": str(host),
            "NODE_RANK": str(host),
            "LOCAL_RANK": "0",
        }
        child: subprocess.Popen[bytes] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *argv],
            env={**os.environ, **variables, **(env or {})},
            start_new_session=True,
            **options,
        )
        self._children.append(child)
        return child

    def _limit(self) -> tuple[str, ...]:
        return ("root", "tbf", "rate", f"{round(self.mbit * 1e6)}bit", "burst", _BURST, "latency", _QUEUE)

    def _build(self) -> None:
        _command("ip", "netns", "add", self._bridge)
        _command("ip", "-n", self._bridge, "link", "set", "dev", "lo", "up")
        _command("ip", "-n", self._bridge, "link", "add", "name", "bridge", "type", "bridge")
        _command("ip", "-n", self._bridge, "link", "set", "dev", "bridge", "up")
        for host in range(self.hosts):
            self._connect(host)

    def _connect(self, host: int) -> None:
        inside, port = self.namespace(host), f"port{host}"
        _command("ip", "netns", "add", inside)
        _command("ip", "-n", inside, "link", "set", "dev", "lo", "up")
        peer = ("peer", "name", "eth0", "netns", inside)
        _command("ip", "-n", self._bridge, "link", "add", "name", port, "type", "veth", *peer)
        # No IPv6 addresses: gloo takes the first address of the interface, and a link-local one cannot be
        # routed to.
        _command("ip", "-n", inside, "link", "set", "dev", "eth0", "addrgenmode", "none")
        _command("ip", "-n", inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        _command("tc", "-n", inside, "qdisc", "add", "dev", "eth0", *self._limit())
        _command("tc", "-n", self._bridge, "qdisc", "add", "dev", port, *self._limit())
        _command("ip", "-n", self._bridge, "link", "set", "dev", port, "master", "bridge", "up")
        _command("ip", "-n", inside, "link", "set", "dev", "eth0", "up")

    def _remove(self) -> None:
        try:
            with _signals_deferred():
                stop_sessions(self._children)
                self._children.clear()
                existing = set(_namespaces())
                for name in (*map(self.namespace, range(self.hosts)), self._bridge):
                    if name in existing:
                        _command("ip", "netns", "delete", name)
        finally:
            if self._restore_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._restore_sigterm = False

    def _exit_on_sigterm(self) -> None:
        # By default SIGTERM ends Python at once and __exit__ never runs. The program's own handler is respected.
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _raise_exit)
            self._restore_sigterm = True


def _command(*argv: str) -> str:
    # A session of its own keeps Ctrl-C from interrupting a command half-way.
    done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        complaint = done.stderr.strip() or f"exit status {done.returncode}"
        raise LinkError(f"`{' '.join(argv)}` failed: {complaint}")
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line.strip()]


def _remove_leftovers() -> None:
    """Removes the namespaces of owners that are gone, but none in which processes run: they are not ours to stop."""
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match is None or os.path.exists(f"/proc/{match['pid']}"):
            continue
        # Another link that starts now may remove the same leftovers; the second one finds nothing.
        with contextlib.suppress(LinkError):
            if not _command("ip", "netns", "pids", name).strip():
                _command("ip", "netns", "delete", name)


def stop_sessions(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends those of these processes of ours, each a session's leader, that still run, and what they started."""
    # The pid of a session's leader names its process group. Only groups whose leader has not been reaped are
    # signalled: until then the pid cannot have gone to a stranger.
    running = [child for child in children if child.poll() is None]
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for child in running:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signum)
        for child in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_SECONDS_TO_TERMINATE)


def _raise_exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back to the end of the block: a half-removed link would stay for good."""
    if not _in_main_thread():
        yield  # Python runs signal handlers in the main thread only, so this block is safe from them.
        return
    pending: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    previous = {kind: signal.signal(kind, lambda signum, _: pending.append(signum)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in previous.items():
            # None stands for a handler that was not installed from Python; it cannot be put back from here.
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)
        for signum in pending:
            signal.raise_signal(signum)
