"""The scheduler's own process groups.

Gradients never travel on the default group. DDP's bucket rebuild, its buffer broadcasts and Lightning's per-batch
SIGTERM broadcast use it, and would interleave differently on each rank or wait behind gradients.

Every rank makes these groups in this order. *data* carries gradients on the default group's backend; only the holder of
the core's launching lock uses it. *control* carries launch decisions on gloo; the holder of the launching lock uses it
on rank 0, the follower thread on the others. On links with high latency there is a second lane for gradients, made when
the link is known (:func:`create_overtaking`) and used like the data group. Only one thread at a time launches on a
group, in the order of the core, so each group sees one order per rank.

*Which network interface gloo uses.* Gloo listens at the address to which the machine's own name resolves. If that is a
loopback address, as on Debian and Ubuntu, ranks on other machines cannot connect. On one network, the interface that
leads to rank 0's machine also reaches the others.

*The link* between the ranks is measured with a few all-reduces, the same on every rank (:func:`probe_link`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import ipaddress
import logging
import os
import socket
import struct
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_bytescheduler.collectives.operations import PATIENCE
from lightning_bytescheduler.collectives.routing_group import is_routed
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.threads import short_turns
from lightning_bytescheduler.tuning.sizes import LinkEstimate

log = logging.getLogger(__name__)

_CALLED_OFF_S = 0.1
_CAN_CHANGE = hasattr(dist.ProcessGroup, "set_timeout")  # with effect on collectives: from torch 2.9 on
_Timeout = TypeVar("_Timeout", bound="timedelta | None")
VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface

_SMALL_BYTES = 4 * 1024
_FIRST_BYTES = 128 * 1024
_LAST_BYTES = 8 * 1024 * 1024
_ENOUGH_S = 0.03
_ALIKE = 1.25  # times the least: measurements without load
_ALIKE_TAKES = 3
_MOST_TAKES = 24
_LONG_ENOUGH_S = 0.02  # for one figure: a scheduling delay is as long as several quick messages

_under_way: list[dist.ProcessGroup] = []  # left by this process with operations in flight
_left: list[weakref.ref[dist.ProcessGroup]] = []  # left by this process without any in flight


@dataclass(frozen=True, slots=True)
class SchedulerGroups:
    """The scheduler's groups over all ranks.

    Attributes:
        reports: Carries each rank's list of submitted collectives, if other code's collectives are ordered; gloo.
        by_host: Whether gradients travel from host memory wherever they live, see ``device_streams.py``; the data group
            is then gloo.
    """

    data: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    world_size: int
    reports: dist.ProcessGroup | None = None
    by_host: bool = False

    @classmethod
    def create(
        cls,
        *,
        timeout: timedelta | None,
        routed_on: torch.device | None = None,
        by_host: bool = False,
    ) -> SchedulerGroups:
        """Create the groups; every rank must call this at the same point.

        Args:
            timeout: Longest time of one collective on gradients, and to connect; the backend's default if ``None``.
            routed_on: Where gradients live, if other code's collectives must be ordered with them there, see
                ``routing_group.py``; the same on all ranks.
            by_host: Whether gradients travel from host memory; the same on all ranks. Then nothing on a GPU needs to be
                ordered with other collectives.
        """
        # A new group finds its peers through the store, which does not know whether they live. The default group does,
        # so this barrier detects a rank that has failed. NCCL needs a device for it and warns if it has to choose one.
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
        collect_left()
        routed = routed_on is not None and not by_host and is_routed(distributed_c10d._get_default_group(), routed_on)
        with short_turns():  # for gloo's threads
            data = dist.new_group(timeout=timeout, backend="gloo" if by_host else dist.get_backend())
            control = _patient_group(timeout)
            reported = _patient_group(timeout) if routed else None
        return cls(
            data=data,
            control=control,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            reports=reported,
            by_host=by_host,
        )

    def wire_device(self, device: torch.device) -> torch.device:
        """Return the device from which gradients on ``device`` are sent."""
        return torch.device("cpu") if self.by_host else device

    def warm_up(self, device: torch.device) -> None:
        """Open every connection before the first step, in one order on all ranks."""
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=self.data)
        dist.broadcast(torch.zeros(1, dtype=torch.float32, device="cpu"), src=0, group=self.control)

    def destroy(self, *, data_idle: bool = True, control_idle: bool = True) -> None:
        """Leave the data and control groups, without waiting; other groups are left by their users."""
        leave(self.data, idle=data_idle)
        leave(self.control, idle=control_idle)


def set_patience(group: Any, patience: timedelta) -> None:
    """Give the collectives of a gloo group another time than its connections had, which :func:`to_connect` returned.

    A rank may die while connections are made, and native code does not notice that. Waits for single messages take
    their patience as an argument: by itself, gloo would give them the time of the connections.
    """
    if _CAN_CHANGE:
        getattr(group, "wrapped_pg", group)._set_default_timeout(patience)  # wrapped, to debug torch's collectives


def to_connect(timeout: _Timeout, patience: timedelta) -> _Timeout | timedelta:
    """Return the time to connect a gloo group in, if its collectives are to have ``patience``.

    Before torch 2.9 collectives keep the time that their group was made with.
    """
    return timeout if _CAN_CHANGE else patience


def _patient_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a gloo group whose collectives have time without end."""
    group: dist.ProcessGroup = dist.new_group(timeout=to_connect(timeout, PATIENCE), backend="gloo")
    set_patience(group._get_backend(torch.device("cpu")), PATIENCE)
    return group


def create_overtaking(device: torch.device, *, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create the second lane's group, see ``scheduler/order.py``; every rank must call this at the same point."""
    with short_turns():
        group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)  # opens every connection
    return group


def leave(group: dist.ProcessGroup, *, idle: bool) -> None:
    """Leave a group, without waiting for other ranks.

    Gloo cannot abort a collective that no other rank will join, and a group's destructor waits for it, even while the
    interpreter ends. So a group that is not idle is kept alive as long as the process. Its operations are ended before
    the interpreter shuts down: an operation ends when another rank's connection closes, and then releases its tensors.
    That needs the GIL, and would abort the process during the shutdown.
    """
    give_up(group, idle=idle)
    try:
        if not idle and dist.get_backend(group) == "gloo":
            if not _under_way:
                atexit.register(_call_off_all)
            _under_way.append(group)
        dist.destroy_process_group(group)
    except Exception:  # the default group was destroyed first, and this one with it
        log.debug("could not leave a process group", exc_info=True)


def give_up(group: dist.ProcessGroup, *, idle: bool) -> None:
    """Stop using a group: :func:`collect_left` ends its threads, unless something is in flight."""
    if idle:
        _left.append(weakref.ref(group))
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # kept as long as the process lives


def abandon(group: dist.ProcessGroup) -> None:
    """Break a group's connections and keep it alive, as gloo's destructor would wait for operations in flight."""
    give_up(group, idle=False)
    break_connections(group)


def collect_left() -> None:
    """End the threads of groups that former trainings have left.

    Each group has three, which poll a hundred times a second while a reference cycle holds the group. They are not
    ended when a group is left: in torch 2.6 a group that is destroyed at the moment its last collective ends can hang,
    as its destructor holds the GIL that one of its threads needs.
    """
    _left[:] = [group for group in _left if group() is not None]
    if _left:
        gc.collect()


def _leave_inherited_garbage() -> None:
    """Exclude inherited garbage from collection in this forked child.

    A group that was left may be part of a garbage cycle. Its destructor joins threads that do not exist in a child,
    which can hang or kill workers of a loader.
    """
    gc.freeze()
    _left.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_inherited_garbage)


def _call_off_all() -> None:
    for group in _under_way:
        break_connections(group)
    time.sleep(_CALLED_OFF_S)  # releases the GIL, which gloo's threads need


def choose_interface(master: str) -> str | None:
    """Make gloo use the interface that leads to ``master`` if it would listen on loopback and the user chose none.

    Args:
        master: Name or address of rank 0's machine.

    Returns:
        The chosen interface; ``None`` if none was needed or found (gloo then reports what it cannot connect to).
    """
    if os.environ.get(VARIABLE) or not _is_loopback(socket.gethostname(), otherwise=True):
        return None
    if _is_loopback(master, otherwise=False):
        return None
    own = _address_towards(master)
    name = None if own is None else _interface_of(own)
    if name is not None:
        os.environ[VARIABLE] = name
    return name


def _is_loopback(host: str, *, otherwise: bool) -> bool:
    """Whether ``host`` is this machine by loopback; ``otherwise`` if it has no address."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return otherwise
    return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def _address_towards(host: str) -> str | None:
    """Return this machine's IPv4 address on the way to ``host``; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return address


def _interface_of(address: str) -> str | None:
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address, or this is not Linux
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def _settled(group: dist.ProcessGroup, device: torch.device, size: int, *earlier: float) -> float:
    """Return the least time of all-reduces of ``size`` bytes, repeated until the three shortest are similar.

    Load delays each message by a different time, so measurements that differ were made under load.
    """
    takes = list(earlier)
    while True:
        takes = sorted([*takes, *_takes(_ALIKE_TAKES, group, device, size)])
        if len(takes) >= _MOST_TAKES or (sum(takes) >= _LONG_ENOUGH_S and takes[_ALIKE_TAKES - 1] <= _ALIKE * takes[0]):
            return takes[0]


def _takes(number: int, group: dist.ProcessGroup, device: torch.device, size: int) -> list[float]:
    """Return the seconds of ``number`` all-reduces on the slowest rank, equal on all ranks."""
    buffer, takes = torch.zeros(size // 4, dtype=torch.float32, device=device), []
    for _ in range(number):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        takes.append(time.perf_counter() - start)
    slowest = torch.tensor(takes, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return [float(seconds) for seconds in slowest]


def probe_start_up(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of a minimal all-reduce; every rank must call this at the same point."""
    return _settled(group, device, _SMALL_BYTES)


def probe_link(group: dist.ProcessGroup, device: torch.device, *, largest: int = _LAST_BYTES) -> LinkEstimate:
    """Estimate the cost of an all-reduce on ``group``; every rank must call this at the same point.

    Args:
        group: The group that is measured.
        device: Where its data lives.
        largest: The most bytes that will ever travel at once, the same on all ranks. Larger sizes are not measured.

    Sizes grow until an all-reduce takes 30 ms more than a minimal one. So a slow link is probed briefly, and a fast one
    with enough bytes. Ranks agree on each figure before the next size is chosen, so all run the same sequence.
    """
    small = _settled(group, device, _SMALL_BYTES)
    size, last = _FIRST_BYTES, min(largest, _LAST_BYTES)
    while True:
        (seconds,) = _takes(1, group, device, size)
        if seconds >= small + _ENOUGH_S or size >= last:
            seconds = _settled(group, device, size, seconds)
            if seconds >= small + _ENOUGH_S or size >= last:
                return LinkEstimate.fit((_SMALL_BYTES, small), (size, seconds))
        size *= 4
