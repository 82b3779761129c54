"""The lease on a coordinator's state: of those who could act on it, one does.

Each coordinator that takes over has a *term*, a number above all before. Its file ``term-N.json`` is created
exclusively, so that a term has one holder. The holder *renews* its lease by writing a new count into that file. A
standby reads the file of the highest term again and again, and takes over, with a term of its own, once the content has
not changed for the whole lease by its own clock. No two machines' clocks are ever compared.

Why two can never both act. Let L be the lease's seconds, and let the holder count a renewal only if its write was
*complete* before the lease that it renews had run out; the new lease runs from the moment at which that write *began*,
and for L/1.25 by the holder's clock.

1. A standby saw a renewal for the first time at a moment t, so its write had begun before t, and the holder's lease
   ends before t + L/1.25 by the holder's clock, unless it is renewed.
2. The standby takes over after a read that began at t + L or later by its own clock and still showed that renewal. If
   the rates of the two clocks differ by less than a fifth (clocks of computers differ by less than a thousandth), that
   is after the holder's lease had ended.
3. A later renewal that counts was complete before that end, so before the read began, and the read would have shown it.
   One that was complete later does not count: the holder has stopped by itself, with no word from anybody.
4. Several standbys create the same next term, which one of them gets; the others watch that one from then on.

The holder asks its own clock before each thing that it does (:attr:`Lease.held`), which is a comparison of two numbers:
a holder that was stopped (SIGSTOP, a hung disk, a cut link) finds its lease run out before it does anything else.
The clock is ``CLOCK_BOOTTIME`` where there is one, which goes on while the machine sleeps.

What is left: between that question and the deed the process may be stopped, or a virtual machine be frozen with its
clock. Then the term is the fence. Workers that have heard a higher term do not listen to a lower one; the chain of the
weights keeps apart what the two would make of a round; a state is saved under its holder's term, one of a lower
term is never the newest, and the first thing that a holder saves is what it took over. So what such a holder still does
has no effect on the run.

All this needs files that one of several writers creates: see ``state_folder.py``. Elsewhere one coordinator runs
without a standby, and whoever starts a second one on the same state is told so if the first is alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from lightning_bytescheduler.checks import require_positive
from lightning_bytescheduler.coordinator.state_folder import StateFolder
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError

__all__ = ["Lease", "boot_seconds", "highest_term"]

log = logging.getLogger(__name__)

_CLOCK_RATES = 1.25  # two clocks' seconds differ by less than that; far more than any real ones do
_RENEWALS = 5  # in a lease
_LOOKS = 4  # of a standby, in a lease
_STOP_SECONDS = 5.0
_FILE = re.compile(r"(?:term|state)-(\d{10})[-.].*")
_LONGEST = 2**16  # bytes of a term's file


def boot_seconds() -> float:
    """Seconds since the machine was started, those in which it slept included where the system counts them."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def _name(term: int) -> str:
    return f"term-{term:010d}.json"


def highest_term(names: Iterable[str]) -> int:
    """The highest term among the names of files, its own or its saved states'; 0 if there is none."""
    return max((int(found[1]) for found in map(_FILE.fullmatch, names) if found), default=0)


class _Process(msgspec.Struct, frozen=True, kw_only=True):
    """Which process that is, as precisely as this system tells."""

    boot: str = ""
    user: int = -1
    namespace: str = ""
    pid: int = 0
    started: str = ""


class _TermFile(msgspec.Struct, frozen=True, kw_only=True):
    term: int
    holder: str
    seconds: float
    count: int
    released: bool = False
    process: _Process = _Process()


class _Seen(NamedTuple):
    """What a standby has read, and since when that has not changed, by its own clock."""

    term: int
    content: bytes | None
    since: float


class Lease:
    """The right to act on a state, for a while.

    Args:
        folder: Of the state.
        holder: Who this is, for people who read the file.
        seconds: That a lease lasts. A standby takes over that long after the last sign of life, at the earliest.
        standby: Whether it waits for as long as another one acts. If not, :meth:`wait` raises in that case.
        clock: Monotonic seconds.

    Raises:
        OptionError: If ``seconds`` is not allowed.
        UnsupportedError: If ``standby`` is set, and the folder does not create files exclusively; names the way out.
    """

    def __init__(
        self,
        folder: StateFolder,
        *,
        holder: str,
        seconds: float = 15.0,
        standby: bool = False,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self._folder = folder
        self._seconds = require_positive("seconds", seconds, of="seconds")
        self._is_standby = standby
        self._clock = clock
        self._holder = f"{holder} {secrets.token_hex(8)}"  # nobody else's file has the same content
        self._process = _this_process()
        self._lock = threading.Lock()  # of what follows; held for no input or output but that of a renewal
        self._term = 0
        self._count = 0
        self._ends: float | None = None
        self._seen: _Seen | None = None
        self._saw_life = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if standby:
            reason = folder.creates_exclusively()
            if reason is not None:
                raise UnsupportedError(f"A standby needs a state whose files one of several writers creates: {reason}.")

    @property
    def held(self) -> bool:
        """Whether this process may act, at this moment."""
        ends = self._ends
        return ends is not None and self._clock() < ends

    @property
    def left(self) -> float:
        """Seconds for which it may act if no renewal succeeds; 0 if it may not."""
        ends = self._ends
        return 0.0 if ends is None else max(ends - self._clock(), 0.0)

    @property
    def term(self) -> int:
        """The term that is or was held; 0 before the first."""
        return self._term

    # ── Taking over ───────────────────────────────────────────────────────────

    def wait(self, stop: threading.Event, *, said: Callable[[str], None] | None = None) -> bool:
        """Wait until the lease is this process's.

        Args:
            stop: Ends the wait when it is set.
            said: Told once who is waited for.

        Returns:
            Whether the lease is held; not if ``stop`` was set before.

        Raises:
            OptionError: If another one acts, and this is no standby.
            OSError: If the state cannot be read or written, unless this is a standby, which tries again.
        """
        who = ""
        while not stop.is_set():
            try:
                if self.try_take():
                    return True
                self._require_waiting_allowed()
                if self._waited_for() != who and said is not None:
                    who = self._waited_for()
                    said(who)
            except (OptionError, UnsupportedError):
                raise
            except Exception as error:  # an object store's client raises more than OSError
                if not self._is_standby:
                    raise
                log.warning("The lease on %s cannot be looked at, and is tried again: %s", self._folder.url, error)
            stop.wait(self._seconds / _LOOKS)
        return False

    def try_take(self) -> bool:
        """Look at the state once, and take the lease if nobody has it.

        Returns:
            Whether it is held now.

        Raises:
            OSError: If the state cannot be read or written.
        """
        began = self._clock()
        term = highest_term(self._folder.names())
        content: bytes | None = None
        if term:
            with contextlib.suppress(FileNotFoundError):  # a listing may know of a file sooner than a read does
                content = self._folder.read(_name(term))
        now = self._clock()
        if self._seen is None or self._seen[:2] != (term, content):
            self._saw_life = self._seen is not None
            self._seen = _Seen(term, content, now)
        if not self._is_over(self._seen, began):
            return False
        return self._take(self._seen.term)

    def _is_over(self, seen: _Seen, began: float) -> bool:
        """Whether the lease that was seen has ended; ``began``: when the read of it did."""
        file = _decoded(seen.content)
        if seen.term == 0 or (file is not None and (file.released or self._is_dead(file.process))):
            return True
        return began - seen.since >= max(file.seconds if file else 0.0, self._seconds)

    def _is_dead(self, other: _Process) -> bool:
        """Whether a process is known to have ended: one of this machine, this boot and this set of process numbers."""
        here = self._process  # of another user a process may be hidden
        same = (other.boot, other.user, other.namespace) == (here.boot, here.user, here.namespace)
        return bool(same and other.boot and other.started and _started(other.pid) != other.started)

    def _take(self, after: int) -> bool:
        term = after + 1
        began = self._clock()
        if not self._folder.create(_name(term), self._content(term, 0)):
            return False
        if highest_term(self._folder.names()) != term:
            return False
        with self._lock:
            ends = began + self._seconds / _CLOCK_RATES
            if self._clock() >= ends:
                return False  # it took so long that another one may have it by now
            self._term, self._count, self._ends = term, 0, ends
            self._seen, self._saw_life = None, False
        return True

    def _require_waiting_allowed(self) -> None:
        """A start after a crash waits for as long as the lease of the one that died; not for one that shows life."""
        if self._saw_life and not self._is_standby:
            allowed = f"one that no other coordinator acts on, and {self._waited_for()} does"
            way_out = "Start this one with --standby to have it wait, or give it a state of its own."
            raise OptionError("state", self._folder.url, allowed, way_out)

    def _waited_for(self) -> str:
        file = _decoded(self._seen.content) if self._seen else None
        return file.holder.rpartition(" ")[0] if file else "another coordinator"

    # ── Holding it ───────────────────────────────────────────────────────────

    def renew(self) -> bool:
        """Renew the lease.

        Returns:
            Whether it is held, and was renewed. Once it has run out it is gone, and a new term has to be taken.
        """
        with self._lock:
            began = self._clock()
            if self._ends is None or began >= self._ends:
                return False
            try:
                self._folder.rewrite(_name(self._term), self._content(self._term, self._count + 1))
                newest = highest_term(self._folder.names())
            except Exception as error:  # an object store's client raises more than OSError
                log.warning("The lease on %s could not be renewed: %s", self._folder.url, error)
                return False
            if newest > self._term:  # cannot be while the lease runs; if it is, somebody else acts
                self._ends = None
                return False
            if self._stop.is_set() or self._clock() >= self._ends:
                return False
            self._count += 1
            self._ends = began + self._seconds / _CLOCK_RATES
            return True

    def keep(self, lost: Callable[[], None]) -> None:
        """Renew it from a thread of its own, until :meth:`release`.

        Args:
            lost: Called from that thread, once, when the lease has run out or another one has it. By then
                :attr:`held` is False already.
        """
        self._thread = threading.Thread(target=self._renewing, args=(lost,), name="bytescheduler-lease", daemon=True)
        self._thread.start()

    def _renewing(self, lost: Callable[[], None]) -> None:
        while not self._stop.wait(min(self._seconds / _RENEWALS, max(self.left, 0.01))):
            self.renew()
            if not self.held and not self._stop.is_set():
                log.error("The lease on %s has run out: this coordinator acts no more.", self._folder.url)
                lost()
                return

    def release(self) -> None:
        """Give it up, so that a standby or a restart takes over at once. Acts no more from the beginning of this."""
        self._stop.set()
        ends, self._ends = self._ends, None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
        if ends is None or self._clock() >= ends or not self._lock.acquire(timeout=_STOP_SECONDS):
            return  # it runs out
        try:
            self._folder.rewrite(_name(self._term), self._content(self._term, self._count + 1, released=True))
        except Exception as error:  # as above; whoever stops is not kept from it
            log.warning("The lease on %s was not given up, and will run out: %s", self._folder.url, error)
        finally:
            self._lock.release()

    def _content(self, term: int, count: int, *, released: bool = False) -> bytes:
        file = _TermFile(
            term=term,
            holder=self._holder,
            seconds=self._seconds,
            count=count,
            released=released,
            process=self._process,
        )
        return msgspec.json.encode(file) + b"\n"


def _decoded(content: bytes | None) -> _TermFile | None:
    """What a term's file says; None for one that says nothing, as in the middle of a write."""
    if content is None or len(content) > _LONGEST:
        return None
    try:
        return msgspec.json.decode(content, type=_TermFile)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _this_process() -> _Process:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return _Process()
    pid = os.getpid()
    return _Process(boot=boot, user=os.getuid(), namespace=namespace, pid=pid, started=_started(pid))


def _started(pid: int) -> str:
    """When a process of this machine was started, in the kernel's own count; empty if there is none, or a dead one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
