"""Threads that carry communication need the processor, and the interpreter, soon but briefly.

Where every core computes, a thread that a message wakes waits for a computing thread's turn to end, 1.4 to 3 ms, and a
partition needs several such wakings on each rank: sub-tasks of 1.5 ms on the wire took 25.
Linux 6.12 and later let a thread of the ordinary policy ask for shorter turns, without privileges: it runs as soon as
it wakes, and its share of the processor stays what it was (``sched_setattr(2)``, ``sched_runtime``). Elsewhere nothing
happens.

A thread of Python that wakes while another runs Python code waits for the interpreter besides, up to its *switch
interval*: 5 ms, unless whoever holds it lets go and does not take it back before the woken thread runs.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["InterpreterTurns", "prefer_short_turns", "short_turns"]

_SWITCH_INTERVAL_S = 0.0005
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


class InterpreterTurns:
    """Shortens the interpreter's switch interval to half a millisecond for as long as somebody needs that.

    It is the process's own. Each user of it makes one of these and ends it; the last to end restores what was there
    before the first, unless somebody else has changed it meanwhile.
    """

    _lock = threading.Lock()
    _users = 0
    _before = 0.0

    def __init__(self) -> None:
        self._ended = False
        kind = InterpreterTurns
        with kind._lock:
            if kind._users == 0:
                kind._before = sys.getswitchinterval()
                sys.setswitchinterval(min(kind._before, _SWITCH_INTERVAL_S))
            kind._users += 1

    def end(self) -> None:
        """Restore it, if nobody else needs it; again: nothing happens."""
        kind = InterpreterTurns
        with kind._lock:
            if self._ended:
                return
            self._ended = True
            kind._users -= 1
            ours = abs(sys.getswitchinterval() - _SWITCH_INTERVAL_S) < _SWITCH_INTERVAL_S / 100
            if kind._users == 0 and ours:
                sys.setswitchinterval(kind._before)


def _ask_for(nanoseconds: int) -> int | None:
    """Ask for turns of this length; returns what they were, or ``None`` if that cannot be asked for."""
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return None
    set_attributes, get_attributes = calls
    kernel = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if kernel.syscall(get_attributes, 0, attributes, _ATTRIBUTES.size, 0):
        return None
    fields = list(_ATTRIBUTES.unpack(attributes.raw))
    before: int = fields[_RUNTIME]
    if fields[1] not in _ORDINARY_POLICIES or before == 0:  # kernels before 6.12 say 0
        return None
    fields[_RUNTIME] = nanoseconds
    return None if kernel.syscall(set_attributes, 0, _ATTRIBUTES.pack(*fields), 0) else before
