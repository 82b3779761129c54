"""Timeline: what the scheduler and the training thread did, and when, as a Chrome trace; written, and read back.

The file opens in https://ui.perfetto.dev and chrome://tracing. :func:`read_timeline` reads it as a :class:`Trace`,
which says how much of the communication was hidden: times are unions of intervals, treated in sweeps over sorted ones.
The module uses neither torch nor Lightning, and the caller decides what to record.

Limits: the latest events (about ``SPOOL_EVENTS`` at most) live in memory until the next flush. An ordinary
exit of the interpreter flushes them, a SIGKILL loses them. What a forked child records is dropped. One file holds one
rank, and is read into memory as a whole.

Format: "Trace Event Format" (Google), JSON object form, with the events X (complete), b and e (nestable
async) and M (metadata). QUEUE and COMMUNICATION are the two spans of a sub-task in
ByteScheduler's own BYTESCHEDULER_TIMELINE.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

QUEUE: Final = "queue"
"""A sub-task is ready and waits for its turn and for credit."""
COMMUNICATION: Final = "communication"
"""A sub-task is in flight."""
GATE: Final = "gate"
"""A forward pass waits for the parameters of one module."""
WAIT: Final = "wait"
"""The end of a backward pass waits for gradients, because steps do not overlap."""
STEP: Final = "step"
"""A deferred optimizer step on the parameters of one module."""
COMPUTE: Final = "compute"
"""A forward or backward pass; the spans are named "forward" and "backward"."""

CODEC: Final = "codec"
"""Parts of gradients are encoded, added up or decoded, where they are sent compressed."""

SPOOL_EVENTS: Final = 4096
"""With more than this many events in memory, the thread that records the next one writes them to the file."""

_HEAD: Final = b'{"traceEvents":[\n'
_TAIL: Final = b'\n],"displayTimeUnit":"ms"}\n'

_logger = logging.getLogger(__name__)


def timeline_path(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file a rank writes to when the timeline is asked for at ``path``.

    Args:
        path: The path the user named.
        rank: The global rank.

    Returns:
        ``path`` itself for rank 0, ``<stem>.rank<k><suffix>`` beside it for rank k > 0.
    """
    chosen = Path(path)
    return chosen if rank == 0 else chosen.with_name(f"{chosen.stem}.rank{rank}{chosen.suffix}")


class Timeline:
    """A Chrome trace of one rank, cheap to record to from any thread.

    Recording takes some microseconds. Writing happens in ``flush``, which ``close``, the exit of the interpreter and
    every ``SPOOL_EVENTS``-th event call.

    The file is a complete JSON object after construction and after every flush, so it opens while the run
    goes on and after the run has died. If the disk is full, the timeline logs one warning, keeps what it has
    written and ignores later events: a diagnostic must not end a training run.

    Args:
        path: Where to write; see ``timeline_path`` for ranks above 0. Parent directories are created, an
            existing file is replaced.
        rank: The global rank; the process id of the trace, so that the files of several ranks can be merged.
        clock: The clock, in seconds, that the times given to ``span`` come from.
        wall_clock: Seconds since the epoch. Read once, beside ``clock``: the timestamps written are
            wall-clock microseconds, so that the files of several hosts line up as well as their clocks do.

    Raises:
        OSError: If the file cannot be written; the message names it.
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
        self._events: deque[bytes] = deque()
        self._lanes: dict[str, int] = {}  # their thread ids in the file
        self._ids, self._lane_ids = itertools.count(1), itertools.count(1)
        self._flush_lock = threading.Lock()
        self._recording = True
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
        """Record something that took time.

        Spans of ``QUEUE`` and ``COMMUNICATION`` may overlap others of their lane. Perfetto groups these by name and
        chrome://tracing by lane, so name them after the task and put the step and the partition into ``args``: a name
        per partition would give each a row of its own. Other spans of a lane must be disjoint or nest.

        Args:
            name: What happened, e.g. "forward", or the task's name.
            category: One of this module's constants, or your own.
            start: When it began, in seconds of ``clock``.
            end: When it ended, in seconds of ``clock``.
            lane: The row or the group of rows it is drawn in, e.g. "training thread" or "network".
            args: Details shown on a click; values that JSON does not know are written as their ``str``. The summary and
                the picture read, from sub-tasks in flight, ``bytes``, ``priority`` (lowest first; left out where there
                is none), ``step``, ``task`` and ``partition``.
        """
        if not self._recording:
            return
        encoded = []
        if lane not in self._lanes:
            self._lanes.setdefault(lane, next(self._lane_ids))
            encoded.append(self._metadata("thread_name", lane, tid=self._lanes[lane]))
        # Whole microseconds: a double resolves an epoch timestamp to 0.25 us, so a viewer that adds ts and dur may see
        # a child end after its parent. Rounding both ends to integers keeps what nests nested.
        begun = self._microseconds(start)
        ended = max(begun, self._microseconds(end))
        overlaps = category in (QUEUE, COMMUNICATION)
        fields = {"name": name, "ph": "b" if overlaps else "X", "ts": begun, "pid": self.rank, "cat": category}
        fields["tid"] = self._lanes[lane]
        if overlaps:
            # The rank is in the id, as some viewers match ids across the processes of a merged trace.
            fields["id"] = hex(self.rank << 40 | next(self._ids))
        else:
            fields["dur"] = ended - begun
        encoded.append(_encode({**fields, "args": args} if args else fields))
        if overlaps:
            encoded.append(_encode({**fields, "ph": "e", "ts": ended}))
        self._events.append(b"".join(b",\n" + line for line in encoded))  # atomic: recording takes no lock
        if len(self._events) > SPOOL_EVENTS:
            self.flush(wait=False)  # the communication thread must not wait for another's disk

    def flush(self, *, wait: bool = True) -> None:
        """Write everything recorded so far; does nothing after ``close``, or in a forked child.

        Args:
            wait: Whether to wait for another thread that writes.
        """
        if os.getpid() != self._process:  # asked before the lock, which may have been held during the fork
            self._events.clear()  # a forked child shares the file's position with its parent
        elif self._flush_lock.acquire(blocking=wait):
            try:
                self._write_buffered()
            finally:
                self._flush_lock.release()

    def close(self) -> None:
        """Flush and close the file; closing again does nothing.

        Events recorded after that are ignored silently, as recording threads may race with this one.
        """
        self._recording = False
        if os.getpid() != self._process:
            return
        with self._flush_lock:
            self._write_buffered()
            self._file.close()
        atexit.unregister(self.close)

    def _write_buffered(self) -> None:
        """Write the buffer. The caller holds the lock, so no other thread pops."""
        lines = b"".join(self._events.popleft() for _ in range(len(self._events)))
        if not lines or self._file.closed:
            return
        try:
            self._write(lines)
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

    def _microseconds(self, seconds: float) -> int:
        return self._wall_origin + round((seconds - self._clock_origin) * 1e6)

    def _metadata(self, what: str, name: str, *, tid: int) -> bytes:
        return _encode({"name": what, "ph": "M", "pid": self.rank, "tid": tid, "args": {"name": name}})


_encode = msgspec.json.Encoder(enc_hook=str).encode


# ── Read back ───────────────────────────────────────────────────────────────────────────────────────

Interval = tuple[float, float]
"""Start and end, in seconds, with start <= end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint, ascending ones; those that touch become one, empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return what two unions (see ``union``) have in common, in one sweep over both."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return what is in the union ``left`` (see ``union``) and not in the union ``right``."""
    edges = [-math.inf, *(edge for interval in right for edge in interval), math.inf]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    return intersection(left, gaps)


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals, in seconds; what overlaps counts as often as it occurs."""
    return math.fsum(end - start for start, end in intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time.

    Attributes:
        name: What happened.
        category: One of the constants of ``timeline``, or the writer's own.
        start: Seconds since the first event of the trace.
        end: Seconds since the first event of the trace.
        lane: The lane it was recorded on.
        args: The details recorded with it.
    """

    name: str
    category: str
    start: float
    end: float
    lane: str
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The training step it belongs to, if the writer said so."""
        step = self.args.get("step")
        return step if isinstance(step, int) else None


class Cover(NamedTuple):
    """The time in which anything was in flight, by what else went on at that time.

    Attributes:
        forward: During a forward pass that was not waiting.
        backward: During a backward pass that was not waiting.
        waited_for: While training waited.
        between: The rest.
    """

    forward: list[Interval]
    backward: list[Interval]
    waited_for: list[Interval]
    between: list[Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Where the communication of a trace went. All times in seconds.

    Attributes:
        communication_seconds: Time in which any sub-task was in flight.
        under_forward: Part of it during a forward pass that was not waiting; it belongs to the step before.
        under_backward: Part of it during a backward pass that was not waiting.
        hidden_share: Share of ``communication_seconds`` during a forward or backward pass that was not
            waiting, from 0 to 1; 0 without communication.
        exposed_seconds: Time in which training waited for gradients, as the log and the metrics have it.
        total_bytes: Bytes of all sub-tasks sent.
        sub_tasks: Number of sub-tasks sent.
        steps: Number of training steps with compute or communication in the trace.
        kinds: Number of these steps by kind, if the writer recorded it: ``"overlapped"``, ``"as DDP's"``,
            ``"synchronised"``.
    """

    communication_seconds: float
    under_forward: float
    under_backward: float
    hidden_share: float
    exposed_seconds: float
    total_bytes: int
    sub_tasks: int
    steps: int
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A timeline read back.

    Attributes:
        rank: The rank that recorded it.
        spans: All spans, by start.
    """

    rank: int
    spans: Sequence[Span]

    def kinds(self) -> dict[int, str]:
        """Return the kind of each step that the writer gave one."""
        kinds: dict[int, str] = {}
        for span in self.select(COMPUTE, "backward"):
            kind = span.args.get("kind")
            if span.step is not None and isinstance(kind, str):
                kinds[span.step] = kind
        return kinds

    def select(self, category: str, name: str | None = None) -> list[Span]:
        """Return the spans of a category, or only those of it with this name, by start."""
        return [span for span in self.spans if span.category == category and name in (None, span.name)]

    def cover(self) -> Cover:
        """Split the time in which anything was in flight by what else went on at that time."""
        communication, waiting = covered(self.select(COMMUNICATION)), covered(self.waits())
        unawaited = subtract(communication, waiting)
        under = [covered(self.select(COMPUTE, name)) for name in ("forward", "backward")]
        between = subtract(unawaited, union([*under[0], *under[1]]))
        forward, backward = (intersection(unawaited, passes) for passes in under)
        return Cover(forward, backward, intersection(communication, waiting), between)

    def waits(self) -> list[Span]:
        """Return the spans in which training waited for gradients."""
        return [*self.select(GATE), *self.select(WAIT)]

    def summary(self) -> TraceSummary:
        """Add up where the communication went."""
        sent, cover = self.select(COMMUNICATION), self.cover()
        seconds = length(covered(sent))
        hidden = length(union([*cover.forward, *cover.backward]))
        return TraceSummary(
            communication_seconds=seconds,
            under_forward=length(cover.forward),
            under_backward=length(cover.backward),
            hidden_share=hidden / seconds if seconds else 0.0,
            exposed_seconds=length(intervals(self.waits())),
            total_bytes=round(sum(span.args.get("bytes", 0) for span in sent)),
            sub_tasks=len(sent),
            steps=len({span.step for span in [*sent, *self.select(COMPUTE)]} - {None}),
            kinds=dict(Counter(self.kinds().values()).most_common()),
        )


def intervals(spans: Iterable[Span]) -> list[Interval]:
    """Return when each span began and ended."""
    return [(span.start, span.end) for span in spans]


def covered(spans: Iterable[Span]) -> list[Interval]:
    """Return the time in which any of some spans went on, as a union (see ``union``)."""
    return union(intervals(spans))


def read_timeline(path: str | os.PathLike[str]) -> Trace:
    """Read a file that ``Timeline`` wrote.

    Args:
        path: The file of one rank.

    Returns:
        Its spans, with times from its first event on.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not such a timeline; the message names it and says what is wrong with it.
    """
    content = Path(path).read_bytes()
    try:
        events = msgspec.json.decode(content, type=_File).trace_events
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        _refuse(path, f"it is not a JSON object with a list of 'traceEvents', or another tool's ({error})")
    names = [event for event in events if event.ph == "M"]
    lanes = {event.tid: str(event.args.get("name")) for event in names if event.name == "thread_name"}
    ranks = {event.pid for event in names if event.args.get("name") == f"rank {event.pid}"}
    if len(ranks) != 1:
        _refuse(path, f"it should hold the events of one rank and holds those of {sorted(ranks) or 'none'}")
    opened: dict[tuple[str, str | None], _Read] = {}
    timed: list[tuple[_Read, float]] = []  # and their ends
    for event in events:
        if event.ph == "b":
            opened[event.cat, event.id] = event
        elif event.ph == "e" and (opening := opened.pop((event.cat, event.id), None)) is not None:
            timed.append((opening, event.ts))
        elif event.ph == "X":
            timed.append((event, event.ts + event.dur))
    origin = min((event.ts for event, _ in timed), default=0.0)
    if opened or any(event.tid not in lanes for event, _ in timed):
        _refuse(path, "some of its spans never end, or are on no lane")
    spans = [
        Span(
            name=event.name,
            category=event.cat,
            start=(event.ts - origin) / 1e6,
            end=(end - origin) / 1e6,
            lane=lanes[event.tid],
            args=event.args,
        )
        for event, end in timed
    ]
    return Trace(
        rank=ranks.pop(),
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
    )


class _Read(msgspec.Struct):
    """An event as ``Timeline`` writes it; times in microseconds."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int = 0
    tid: int = 0
    id: str | None = None
    args: dict[str, Any] = {}


class _File(msgspec.Struct, rename="camel"):
    trace_events: list[_Read]


def _refuse(path: str | os.PathLike[str], reason: str) -> NoReturn:
    raise ValueError(
        f"Cannot read '{os.fspath(path)}' as a timeline: {reason}. Name a file that BYTESCHEDULER_TIMELINE produced."
    )
