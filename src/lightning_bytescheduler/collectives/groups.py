"""The scheduler's own process groups.

Gradients never travel on the default group: DDP's bucket rebuild, its buffer broadcasts and Lightning's per-batch
SIGTERM broadcast live there and would interleave differently on each rank, or wait behind gradients (a batch's
broadcast was seen to take 100 ms instead of one).

Two groups, made by every rank in this order: *data* for gradients, on the default group's backend, touched under
the core's launching lock alone; *control* for launch decisions, always gloo, touched under the launching lock of rank 0
and by the follower thread of the others. Where ranks count by their samples there is a third, *counts*, always gloo,
touched by the training thread alone. Over long round trips there is a second lane for gradients, made when the link is
known (:func:`create_overtaking`), and touched as the data group is. A model with sparse gradients has *sparse*, for
those alone, touched by the training thread. Two threads never launch on one group at a time, and the lock hands over
what is next in the order, so each group sees one order per rank.

*Which network interface gloo connects through.* Gloo listens at the address that the machine's own name resolves to.
Where that is a loopback address, as Debian and Ubuntu set it up, ranks on other machines cannot connect. The interface
that leads to rank 0's machine is one that the others can be reached through, too, in the ordinary case of one network.
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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_bytescheduler.collectives.routing_group import is_routed
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.short_turns import short_turns

log = logging.getLogger(__name__)

# Followers wait for the next decision as long as a validation or a checkpoint may take; liveness is checked elsewhere.
_CONTROL_TIMEOUT = timedelta(days=30)
_CALLED_OFF_S = 0.1
_ONE_THREADED = "bytescheduler_gloo_of_one_thread"
VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface

_under_way: list[dist.ProcessGroup] = []  # left while something was, by this process
_left: list[weakref.ref[dist.ProcessGroup]] = []  # while nothing was


@dataclass(frozen=True, slots=True)
class SchedulerGroups:
    """The data and control groups over all ranks.

    Attributes:
        data: Carries gradients.
        control: Carries launch decisions; gloo.
        counts: Carries how many samples each rank has; gloo. ``None`` where nobody asks.
        reports: Carries what each rank has submitted, where collectives of others are in the order; gloo.
        sparse: Carries sparse gradients, one at a time: see ``ddp/sparse_gradients.py``. ``None`` where there are none,
            or they travel on the default group.
        by_host: Whether gradients travel from host memory wherever they live, see ``host_copies.py``: the data group is
            gloo then.
        rank: This rank within both.
        world_size: Number of ranks.
    """

    data: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    world_size: int
    counts: dist.ProcessGroup | None = None
    reports: dist.ProcessGroup | None = None
    sparse: dist.ProcessGroup | None = None
    by_host: bool = False

    @classmethod
    def create(
        cls,
        *,
        timeout: timedelta | None,
        counts: bool = False,
        routed_on: torch.device | None = None,
        sparse: bool = False,
        by_host: bool = False,
    ) -> SchedulerGroups:
        """Create both groups; every rank must call this at the same point.

        Args:
            timeout: How long one collective on gradients may take; the backend's default if ``None``.
            counts: Whether samples are counted; the same on all ranks.
            routed_on: Where gradients live, if collectives of others are to be in one order with them where that is
                needed, see ``routing_group.py``; the same on all ranks.
            sparse: Whether some gradients are sparse; the same on all ranks.
            by_host: Whether gradients travel from host memory; the same on all ranks. Then there is nothing on a GPU
                that collectives of others could be in another order with.
        """
        # A new group finds its peers through the store, which does not know whether they still live. The default group
        # does: a rank that failed on the way here is noticed now, not when the rendezvous times out.
        # NCCL needs a device for it, and complains if it has to choose one itself.
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
        collect_left()
        routed = routed_on is not None and not by_host and is_routed(distributed_c10d._get_default_group(), routed_on)
        with short_turns():  # for gloo's own threads
            data = dist.new_group(timeout=timeout, backend="gloo" if by_host else dist.get_backend())
            control = dist.new_group(timeout=_CONTROL_TIMEOUT, backend="gloo")
            counted = dist.new_group(timeout=timeout, backend="gloo") if counts else None
            reported = dist.new_group(timeout=_CONTROL_TIMEOUT, backend="gloo") if routed else None
            alone = _one_threaded(timeout) if sparse and not routed and dist.get_backend() == "gloo" else None
        return cls(
            data=data,
            control=control,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            counts=counted,
            reports=reported,
            sparse=alone,
            by_host=by_host,
        )

    def wire_device(self, device: torch.device) -> torch.device:
        """Where what travels of gradients on ``device`` lives."""
        return torch.device("cpu") if self.by_host else device

    def warm_up(self, device: torch.device) -> None:
        """Open every connection before the first step needs one, in one order on all ranks."""
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=self.data)
        dist.broadcast(torch.zeros(1, dtype=torch.float32, device="cpu"), src=0, group=self.control)

    def destroy(self, *, data_idle: bool = True, control_idle: bool = True) -> None:
        """Leave those of gradients and decisions; local, waits for no other rank. Who uses the others leaves them.

        Args:
            data_idle: Whether nothing is under way on the data group.
            control_idle: Whether nothing is under way on the control group.
        """
        if self.sparse is not None:
            if not data_idle:
                break_connections(self.sparse)  # others wait for it in a backward pass
            leave(self.sparse, idle=data_idle)
        leave(self.data, idle=data_idle)
        leave(self.control, idle=control_idle)


def _one_threaded(timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of gloo on which one collective is worked on at a time; every rank calls this at the same point."""
    if _ONE_THREADED not in dist.Backend.backend_list:
        dist.Backend.register_backend(_ONE_THREADED, _gloo_of_one_thread, devices=["cpu", "cuda"])
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=_ONE_THREADED)
    return group


def _gloo_of_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, one_threaded_options(timeout))


def one_threaded_options(timeout: timedelta) -> Any:
    """Options of a group of gloo that works on one collective at a time, over torch's own choice of interfaces.

    Args:
        timeout: Of one collective.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = 1
    options._timeout = timeout
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names] or [
        dist.ProcessGroupGloo.create_default_device()
    ]
    return options


def create_overtaking(device: torch.device, *, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create the second lane's group, see ``scheduler/order.py``; every rank must call this at the same point.

    Args:
        device: Where gradients live.
        timeout: As of the data group.
    """
    with short_turns():
        group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)  # opens every connection
    return group


def leave(group: dist.ProcessGroup, *, idle: bool) -> None:
    """Leave a group; local, does not wait for other ranks.

    Gloo cannot abort a collective that nobody else will join, and the destructor of a group waits for it, even
    while the interpreter ends. A group that is not idle is therefore kept alive for as long as the process lives.
    What is under way on it is ended before the interpreter is: it ends when another rank's connection closes, lets go
    of its tensors then, and would abort the process if it asked for Python's lock while the interpreter goes down.

    Args:
        group: One that this package has made.
        idle: Whether nothing is under way on it.
    """
    give_up(group, idle=idle)
    try:
        if not idle and dist.get_backend(group) == "gloo":
            if not _under_way:
                atexit.register(_call_off_all)
            _under_way.append(group)
        dist.destroy_process_group(group)
    except Exception:  # the default group was destroyed first, and took this one along
        log.debug("could not leave a process group", exc_info=True)


def give_up(group: dist.ProcessGroup, *, idle: bool) -> None:
    """Use a group no more: :func:`collect_left` is to end its threads, or nobody while something is under way."""
    if idle:
        _left.append(weakref.ref(group))
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # kept for as long as the process lives


def abandon(group: dist.ProcessGroup) -> None:
    """Break a group's connections, and keep it: gloo would wait for what is under way when the group ends."""
    give_up(group, idle=False)
    break_connections(group)


def collect_left() -> None:
    """End the threads of groups that former trainings have left.

    Three for each group, which look for work a hundred times a second for as long as objects that refer to each other
    hold the group; Python finds these after dozens of trainings. Here, not where groups are left: with torch 2.6 one
    that goes in the instant in which its last collective ends can hang, as its destructor holds the lock of Python
    that a thread of it wants.
    """
    _left[:] = [group for group in _left if group() is not None]
    if _left:
        gc.collect()


def _leave_inherited_garbage() -> None:
    """Have this process, a forked child, collect no garbage but its own.

    A group that was left, or whose training has failed, may be part of a cycle of objects that is garbage. Its
    destructor joins threads that a child does not have: workers of the next training's loaders stood still, or died.
    """
    gc.freeze()
    _left.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_inherited_garbage)


def _call_off_all() -> None:
    for group in _under_way:
        break_connections(group)
    time.sleep(_CALLED_OFF_S)  # without Python's lock, which gloo's threads want now


def choose_interface(master: str) -> str | None:
    """Have gloo use the interface that leads to ``master``, where it would listen on loopback and nothing was chosen.

    Args:
        master: Name or address of rank 0's machine.

    Returns:
        The interface that was chosen; ``None`` where nothing had to be, or none was found (gloo then says what it
        cannot connect to).
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
    """This machine's IPv4 address on the way to ``host``; nothing is sent."""
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
            except OSError:  # has no IPv4 address; or this is not Linux
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
