"""A gloo group's own port, closed to strangers once the group is connected.

Gloo listens for as long as a group lives. Each connection that a stranger makes costs it a file descriptor for good,
whatever comes on it and also when it has ended; where no more can be had, gloo ends the process. Once all members have
connected, nobody else has business there. Gloo offers no way to stop listening, and takes a listening socket that ends
for a bug. So the kernel is told to drop all packets that come to that socket; connections that there are do not notice.

Before all have connected, which takes milliseconds, a stranger may still disturb: the network is trusted as by gloo.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from contextlib import suppress

import torch.distributed as dist

__all__ = ["close_port", "listening"]

_SO_ATTACH_FILTER = 26  # Linux; not in Python's module
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction of the kernel's packet filter: return 0 bytes


def close_port(store: dist.Store, rank: int) -> bool:
    """Have nobody connect to this process's port of a gloo group any more; on Linux.

    Args:
        store: That the group was made with; members have left their addresses there.
        rank: Of this process in the group, which is connected.

    Returns:
        Whether the port was found and closed. If not, it stays as gloo made it.
    """
    if not sys.platform.startswith("linux"):
        return False
    address = b""
    for key in (f"0/{rank}", str(rank)):  # torch's name for it has changed
        if store.check([key]):
            address = store.get(key)
            break
    closed = False
    for descriptor, family, host, port in listening():
        # As in the kernel's own form of an address; other groups of this process listen on other ports.
        known = struct.pack("=H", family) + struct.pack("!H", port) in address
        if known and socket.inet_pton(family, host.partition("%")[0]) in address:
            closed = _drop_all(descriptor) or closed
    return closed


def listening() -> list[tuple[int, int, str, int]]:
    """This process's listening sockets: descriptor, family, address and port of each; empty where there is no /proc."""
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as one:
                        found += _if_listening(int(name), one)
    return found


def _if_listening(descriptor: int, one: socket.socket) -> list[tuple[int, int, str, int]]:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return []
    if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return []
    host, port = one.getsockname()[:2]
    return [(descriptor, int(one.family), str(host), int(port))]


def _drop_all(descriptor: int) -> bool:
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    try:
        with socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    except OSError:  # a kernel that has none
        return False
    return True
