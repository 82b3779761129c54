"""The threads of communication: how they start, and how they get the processor and the interpreter quickly.

If every core computes, a thread that a message wakes waits some milliseconds, until a computing thread's turn ends. A
partition needs several wake-ups on each rank, and these waits can take far longer than its transfer.

From Linux 6.12 a thread of the ordinary policy may ask for shorter turns without privileges: it then runs as soon as it
wakes, and its share of the processor is unchanged (``sched_setattr(2)``, ``sched_runtime``). On other systems nothing
happens.

A Python thread that wakes while another one runs Python code also waits for the interpreter, up to its *switch
interval* of 5 ms.
"""

from __future__ import annotations

import ctypes
import platform
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["InterpreterTurns", "WorkThread", "prefer_short_turns", "short_turns", "start_thread"]

_SWITCH_INTERVAL_S = 0.0005
_SHORT = 100_000  # nanoseconds, the least that the kernel grants
_ATTRIBUTES = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period
_RUNTIME = 5  # index in the above
_ORDINARY_POLICIES = (0, 3)  # SCHED_OTHER and SCHED_BATCH; real-time policies use the field differently
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}  # sched_setattr, sched_getattr


def prefer_short_turns() -> bool:
    """Ask for short turns for the calling thread and for threads that it starts later.

    Returns:
        Whether the kernel accepted; ``False`` on other systems, older kernels and under real-time policies.
    """
    return _ask_for(_SHORT) is not None


def start_thread(name: str, run: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread ``bytescheduler-NAME`` that calls ``run``, with short turns."""

    def work() -> None:
        prefer_short_turns()
        run()

    thread = threading.Thread(target=work, name=f"bytescheduler-{name}", daemon=True)
    thread.start()
    return thread


class WorkThread:
    """Does one piece of work after the other on a thread ``bytescheduler-NAME``, which starts with the first.

    After an error it begins nothing more: all later work fails with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._works: queue.SimpleQueue[tuple[Callable[[], object], Callable[[BaseException], object]] | None] = (
            queue.SimpleQueue()
        )
        self._dropping = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, work: Callable[[], object], fail: Callable[[BaseException], object]) -> None:
        """Do ``work`` in its turn; call ``fail`` if it or earlier work raises. One thread at a time calls this."""
        if self._thread is None:
            self._thread = start_thread(self._name, self._run)
        self._works.put((work, fail))

    def stop(self, timeout: float, *, drop: bool = False) -> bool:
        """End the thread after the work under way, or after all work; returns whether it ended within ``timeout``.

        Args:
            timeout: Seconds.
            drop: Whether to drop work that has not begun.
        """
        if drop:
            self._dropping.set()
        self._works.put(None)
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        failure: BaseException | None = None
        while (item := self._works.get()) is not None and not self._dropping.is_set():
            work, fail = item
            try:
                if failure is not None:
                    raise failure
                work()
            except BaseException as error:
                failure = error
                fail(error)


@contextmanager
def short_turns() -> Iterator[None]:
    """Give short turns to threads started within this context, such as a process group's, but not to the caller."""
    before = _ask_for(_SHORT)
    try:
        yield
    finally:
        if before is not None:
            _ask_for(before)


class InterpreterTurns:
    """Shortens the interpreter's switch interval to half a millisecond while it is in use.

    The interval belongs to the process. Each user makes an instance and ends it. The last one restores the earlier
    value, unless other code has changed it.
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
        """Restore the interval if this is the last user; idempotent."""
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
    """Ask for turns of this length; returns the earlier length, or ``None`` if that is not possible."""
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
    if fields[1] not in _ORDINARY_POLICIES or before == 0:  # kernels before 6.12 return 0
        return None
    fields[_RUNTIME] = nanoseconds
    return None if kernel.syscall(set_attributes, 0, _ATTRIBUTES.pack(*fields), 0) else before
