"""Threads that carry communication ask the kernel for short turns on the processor.

Where every core computes, a thread that a message wakes waits for a computing thread's turn to end, 1.4 to 3 ms, and a
partition needs several such wakings on each rank: sub-tasks of 1.5 ms on the wire took 25 (``benchmarks/README.md``).
Linux 6.12 and later let a thread of the ordinary policy ask for shorter turns, without privileges: it runs as soon as
it wakes, and its share of the processor stays what it was (``sched_setattr(2)``, ``sched_runtime``). Elsewhere nothing
happens.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["prefer_short_turns", "short_turns"]

_SHORT = 100_000  # nanoseconds, the least that the kernel grants
_ATTRIBUTES = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RUNTIME = 5  # its place in the above
_ORDINARY_POLICIES = (0, 3)  # SCHED_OTHER and SCHED_BATCH; for a real-time policy the field means something else
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}  # sched_setattr, sched_getattr


def prefer_short_turns() -> bool:
    """Ask for short turns for the calling thread, and for those it will start.

    Returns:
        Whether the kernel took note; ``False`` on other systems, older kernels and under real-time policies.
    """
    return _ask_for(_SHORT) is not None


@contextmanager
def short_turns() -> Iterator[None]:
    """Give threads that are started meanwhile short turns, such as those of a process group, but not the caller."""
    before = _ask_for(_SHORT)
    try:
        yield
    finally:
        if before is not None:
            _ask_for(before)


def _ask_for(nanoseconds: int) -> int | None:
    """Ask for turns of this length; returns what they were, or ``None`` if that cannot be asked for."""
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return None
    set_attributes, get_attributes = calls
    kernel = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if kernel.syscall(get_attributes, 0, attributes, _ATTRIBUTES.size, 0):
        return None
    fields = list(_ATTRIBUTES.unpack(attributes.raw))
    before: int = fields[_RUNTIME]
    if fields[1] not in _ORDINARY_POLICIES or before == 0:  # kernels before 6.12 say 0
        return None
    fields[_RUNTIME] = nanoseconds
    return None if kernel.syscall(set_attributes, 0, _ATTRIBUTES.pack(*fields), 0) else before
