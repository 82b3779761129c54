"""Timeline: writes what the scheduler and the training thread did, and when, as a Chrome trace.

The file opens in https://ui.perfetto.dev and chrome://tracing, and ``read_timeline`` (trace.py) reads it
back. Pure: neither torch nor Lightning, and what is worth recording is for the caller to say.

Limits: the latest events (about ``SPOOL_EVENTS`` at most) live in memory until the next flush. An ordinary
exit of the interpreter flushes them, a SIGKILL loses them. What a forked child records is dropped.

Format: "Trace Event Format" (Google), JSON object form, with the events X (complete), b and e (nestable
async) and M (metadata). QUEUE and COMMUNICATION are the two spans of a sub-task in
ByteScheduler's own BYTESCHEDULER_TIMELINE.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from lightning_bytescheduler.checks import require_whole

QUEUE: Final = "queue"
"""A sub-task is ready and waits for its turn and for credit."""
COMMUNICATION: Final = "communication"
"""A sub-task is in flight."""
GATE: Final = "gate"
"""A forward pass waits for the parameters of one module."""
WAIT: Final = "wait"
"""The end of a backward pass waits for gradients, as it does where steps do not overlap."""
STEP: Final = "step"
"""A deferred optimizer step on the parameters of one module."""
COMPUTE: Final = "compute"
"""A forward or backward pass; the spans are named "forward" and "backward"."""

CODEC: Final = "codec"
"""Parts of gradients are encoded, added up or decoded, where they travel compressed."""
COPY_TO_HOST: Final = "copy to host"
"""A bucket is copied from a GPU to host memory, where that is where it travels from."""
COPY_TO_DEVICE: Final = "copy to device"
"""The mean of a part of a bucket is copied back."""
PUSH: Final = "push"
"""A sub-task is on its way to a parameter server."""
PULL: Final = "pull"
"""It has left, and its sum is waited for, and comes back."""
SUM: Final = "sum"
"""It is added up in this process, and what others push of it is waited for."""
REPLY: Final = "reply"
"""A sum that was formed in this process is on its way to another."""
LOCAL_REDUCE: Final = "local reduce"
"""The ranks of a node send a sub-task to the one of them that pushes it, which adds it up."""
LOCAL_BROADCAST: Final = "local broadcast"
"""That one sends the mean to the others; there, from when their own part had left."""
INNER: Final = "inner"
"""A step of a worker that trains in rounds."""
STILL: Final = "still"
"""Such a worker does something else than training, such as validating."""

SPOOL_EVENTS: Final = 4096
"""With more than this many events in memory, the thread that records the next one writes them to the file."""

_HEAD: Final = b'{"traceEvents":[\n'
_TAIL: Final = b'\n],"displayTimeUnit":"ms"}\n'

_logger = logging.getLogger(__name__)


class _Event(NamedTuple):
    """What a recording call keeps; formatting waits for the flush."""

    phase: Literal["X", "b"]
    name: str
    category: str
    start: float
    end: float
    lane: str
    args: dict[str, Any] | None


def timeline_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file a rank writes to when the timeline is asked for at ``path``.

    Args:
        path: The path the user named.
        rank: The global rank.

    Returns:
        ``path`` itself for rank 0, ``<stem>.rank<k><suffix>`` beside it for rank k > 0.

    Raises:
        OptionError: If ``rank`` is not a whole number, 0 or more.
    """
    require_whole("rank", rank, 0)
    chosen = Path(path)
    return chosen if rank == 0 else chosen.with_name(f"{chosen.stem}.rank{rank}{chosen.suffix}")


class Timeline:
    """A Chrome trace of one rank, cheap to record to from any thread.

    Recording appends a tuple (about a microsecond). Formatting and writing happen in ``flush``, which
    ``close``, the exit of the interpreter and every ``SPOOL_EVENTS``-th event call. Such a spool takes some
    tens of milliseconds in the thread that happens to record then; to choose the moment yourself, call
    ``flush`` at a calm one.

    The file is a complete JSON object after construction and after every flush, so it opens while the run
    goes on and after it died. Should the disk fill up, the timeline logs one warning, keeps what it has
    written and ignores what comes: a diagnostic must not end a training run.

    Args:
        path: Where to write; see ``timeline_path`` for ranks above 0. Parent directories are created, an
            existing file is replaced.
        rank: The global rank; the process id of the trace, so that the files of several ranks can be merged.
        clock: The clock, in seconds, that the times given to ``span`` and ``overlapping`` come from.
        wall_clock: Seconds since the epoch. Read once, beside ``clock``: the timestamps written are
            wall-clock microseconds, so that the files of several hosts line up as well as their clocks do.

    Raises:
        OSError: If the file cannot be written; the message names it.
        OptionError: If ``rank`` is not a whole number, 0 or more.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = timeline_path(path, rank)
        self.rank = rank
        self._clock_origin = clock()
        self._wall_origin = round(wall_clock() * 1e6)
        self._events: deque[_Event] = deque()
        self._lanes: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._flush_lock = threading.Lock()
        self._recording = True
        self._warned_unencodable = False
        self._process = os.getpid()
        self._tail = 0  # where the file's closing tail begins
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
            try:
                self._write(_HEAD + self._metadata("process_name", f"rank {rank}", tid=0))
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            # OSError picks its subclass (PermissionError, ...) from errno and ends its message with the
            # file's name.
            reason = f"Cannot write the timeline ({error.strerror}); name a file in a writable directory"
            raise OSError(error.errno, reason, os.fspath(self.path)) from error
        atexit.register(self.close)

    def span(
        self,
        name: str,
        category: str,
        start: float,
        end: float,
        *,
        lane: str,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record what one thread did; the spans of a lane must be disjoint or nest.

        Args:
            name: What happened, e.g. "forward".
            category: One of this module's constants, or your own.
            start: When it began, in seconds of ``clock``.
            end: When it ended, in seconds of ``clock``.
            lane: The row it is drawn on, e.g. "training thread".
            args: Details shown on a click. Copied; what JSON cannot hold is written as its ``str``.
        """
        self._record(_Event("X", name, category, start, end, lane, dict(args) if args else None))

    def overlapping(
        self,
        name: str,
        category: str,
        start: float,
        end: float,
        *,
        lane: str,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a span that may overlap others of its lane, such as a sub-task in the queue or in flight.

        Perfetto groups these by name and chrome://tracing by lane, so name them after the task and put the
        step and the partition into ``args``: a name per partition would give each a row of its own.

        Args:
            name: What happened, e.g. the task's name.
            category: One of this module's constants, or your own.
            start: When it began, in seconds of ``clock``.
            end: When it ended, in seconds of ``clock``.
            lane: The group of rows it is drawn in, e.g. "network".
            args: As in ``span``. The summary and the picture read, from sub-tasks in flight, ``bytes``,
                ``priority`` (lowest first; left out where there is none), ``step``, ``task`` and ``partition``.
        """
        self._record(_Event("b", name, category, start, end, lane, dict(args) if args else None))

    def flush(self) -> None:
        """Write everything recorded so far; does nothing after ``close``, or in a forked child."""
        if os.getpid() != self._process:  # asked before the lock, which may have been held during the fork
            self._events.clear()
            return
        with self._flush_lock:
            self._write_buffered()

    def close(self) -> None:
        """Flush and close the file; closing again does nothing.

        What is recorded after that is ignored silently, as the recording threads may race with the closing
        one.
        """
        self._recording = False
        if os.getpid() != self._process:
            return
        with self._flush_lock:
            self._write_buffered()
            self._file.close()
        atexit.unregister(self.close)

    def _record(self, event: _Event) -> None:
        if not self._recording:
            return
        self._events.append(event)  # atomic: recording takes no lock
        # One thread spools and the others go on: the communication thread must not wait for another's disk.
        if len(self._events) > SPOOL_EVENTS:
            if os.getpid() != self._process:  # a forked child shares the file's position with its parent
                self._events.clear()
            elif self._flush_lock.acquire(blocking=False):
                try:
                    self._write_buffered()
                finally:
                    self._flush_lock.release()

    def _write_buffered(self) -> None:
        """Format and write the buffer. The caller holds the lock, so nobody else pops."""
        lines: list[bytes] = []
        for _ in range(len(self._events)):
            self._format(self._events.popleft(), lines)
        if not lines or self._file.closed:
            return
        try:
            self._write(b"".join(b",\n" + line for line in lines))
        except BaseException as error:  # a full disk, which still has room for the old tail, or a Ctrl-C in the middle
            self._file.truncate(self._tail)
            self._file.seek(self._tail)
            self._file.write(_TAIL)
            if not isinstance(error, OSError):
                raise
            self._recording = False
            _logger.warning("The timeline %s ends here, as it cannot be written: %s", self.path, error)
            self._file.close()

    def _write(self, events: bytes) -> None:
        """Write over the closing tail, and the tail again: the file is complete after every call."""
        self._file.seek(self._tail)
        # Events and tail go down in one write, so that a kill finds the file either before or after it.
        remaining = memoryview(events + _TAIL)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]
        self._tail += len(events)

    def _format(self, event: _Event, lines: list[bytes]) -> None:
        try:
            # Whole microseconds: a double resolves an epoch timestamp to 0.25 us, so a viewer that adds ts
            # and dur could see a child end after its parent. Rounding both ends to integers keeps what nests
            # nested.
            start = self._microseconds(event.start)
            end = max(start, self._microseconds(event.end))
            fields: dict[str, Any] = {"name": event.name, "ph": event.phase, "ts": start, "pid": self.rank}
            fields |= {"cat": event.category, "tid": self._lane(event.lane, lines)}
            closing: dict[str, Any] | None = None
            if event.phase == "X":
                fields["dur"] = end - start
            else:
                # The rank is in the id, as some viewers match ids across the processes of a merged trace.
                fields["id"] = hex(self.rank << 40 | next(self._ids))
                closing = fields | {"ph": "e", "ts": end}
            if event.args:
                # JSON has no NaN and no infinity.
                odd = {k: str(v) for k, v in event.args.items() if isinstance(v, float) and not math.isfinite(v)}
                fields["args"] = event.args | odd
            encoded = [_encode(one) for one in (fields, closing) if one is not None]
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            if not self._warned_unencodable:
                self._warned_unencodable = True
                _logger.warning("The timeline %s leaves out events such as %r: %s", self.path, event, error)
        else:
            lines.extend(encoded)

    def _microseconds(self, seconds: float) -> int:
        return self._wall_origin + round((seconds - self._clock_origin) * 1e6)

    def _lane(self, lane: str, lines: list[bytes]) -> int:
        """Return the lane's thread id, introducing it in the file the first time."""
        tid = self._lanes.get(lane)
        if tid is None:
            tid = self._lanes[lane] = len(self._lanes) + 1
            lines.append(self._metadata("thread_name", lane, tid=tid))
        return tid

    def _metadata(self, what: str, name: str, *, tid: int) -> bytes:
        return _encode({"name": what, "ph": "M", "pid": self.rank, "tid": tid, "args": {"name": name}})


def _plain(value: object) -> int | str:
    """Turn what JSON does not know into an integer (numpy's, a tensor of one) or text."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError for what is not an integer
    except TypeError:
        return str(value)


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
