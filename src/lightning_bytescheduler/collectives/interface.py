"""Which network interface gloo connects through.

Gloo listens at the address that the machine's own name resolves to. Where that is a loopback address, as Debian and
Ubuntu set it up, ranks on other machines cannot connect. The interface that leads to rank 0's machine is one that the
others can be reached through, too, in the ordinary case of one network.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

__all__ = ["VARIABLE", "choose_interface"]

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


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
