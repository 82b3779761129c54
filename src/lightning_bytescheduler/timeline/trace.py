"""Trace: reads a timeline back and says how much of the communication was hidden.

For that, times are treated as unions of intervals, in sweeps over sorted ones. Pure: neither torch nor Lightning.
Limits: one file holds one rank, and the whole file is read into memory.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from lightning_bytescheduler.timeline.timeline import COMMUNICATION, COMPUTE, GATE, STEP, WAIT

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
    """The time in which anything was in flight, by what went on meanwhile.

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
        under_forward: Part of it during a forward pass that was not waiting.
        under_backward: Part of it during a backward pass that was not waiting.
        under_next_forward: Time in which a sub-task of step k was in flight during the forward pass of step
            k + 1 and this was not waiting.
        hidden_share: Share of ``communication_seconds`` during a forward or backward pass that was not
            waiting, from 0 to 1; 0 without communication.
        exposed_seconds: Time in which training waited for gradients, as the log and the metrics have it.
        gate_seconds: Part of it at gates.
        step_seconds: Time spent in deferred optimizer steps.
        total_bytes: Bytes of all sub-tasks sent.
        sub_tasks: Number of sub-tasks sent.
        steps: Number of training steps with compute or communication in the trace.
        kinds: How many of them were of which kind, where the writer said so: ``"overlapped"``, ``"as DDP's"``,
            ``"synchronised"``.
    """

    communication_seconds: float
    under_forward: float
    under_backward: float
    under_next_forward: float
    hidden_share: float
    exposed_seconds: float
    gate_seconds: float
    step_seconds: float
    total_bytes: int
    sub_tasks: int
    steps: int
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A timeline read back.

    Attributes:
        rank: The rank that recorded it.
        origin: When its first event began, in seconds since the epoch; all other times count from there.
        spans: All spans, by start.
        broken_off: Whether the file ends in the middle of an event; what was whole is here.
    """

    rank: int
    origin: float
    spans: Sequence[Span]
    broken_off: bool = False

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
        """Split the time in which anything was in flight by what it was under."""
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
            under_next_forward=_under_next(sent, self.select(COMPUTE, "forward"), covered(self.waits())),
            hidden_share=hidden / seconds if seconds else 0.0,
            exposed_seconds=length(intervals(self.waits())),
            gate_seconds=length(intervals(self.select(GATE))),
            step_seconds=length(covered(self.select(STEP))),
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


def _under_next(sent: Iterable[Span], forward: Iterable[Span], waiting: Sequence[Interval]) -> float:
    def by_step(spans: Iterable[Span]) -> defaultdict[int, list[Span]]:
        found: defaultdict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if span.step is not None:
                found[span.step].append(span)
        return found

    passes = by_step(forward)
    return math.fsum(
        length(intersection(subtract(covered(spans), waiting), covered(passes[step + 1])))
        for step, spans in by_step(sent).items()
    )


def read_timeline(path: str | os.PathLike[str]) -> Trace:
    """Read a file that ``Timeline`` wrote; of one that is broken off, such as half a copy, what is there.

    Args:
        path: The file of one rank.

    Returns:
        Its spans, with times from its first event on.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not such a timeline; the message names it and says what is wrong with it.
    """
    content = Path(path).read_bytes()
    broken_off = False
    try:
        try:
            events = _decoded(content)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, ValueError):
            # Each event has a line: up to the last one that is whole.
            whole, comma, _ = content.rpartition(b",\n")
            if not comma:
                raise
            events, broken_off = _decoded(whole + b"]}"), True
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        _refuse(path, f"it is not a JSON object with a list of 'traceEvents', or another tool's ({error})")
    names = [event for event in events if event.ph == "M"]
    lanes = {event.tid: str(event.args.get("name")) for event in names if event.name == "thread_name"}
    ranks = {event.pid for event in names if event.args.get("name") == f"rank {event.pid}"}
    if len(ranks) != 1:
        _refuse(path, f"it should hold the events of one rank and holds those of {sorted(ranks) or 'none'}")
    opened: dict[tuple[str, str | None], _Event] = {}
    timed: list[tuple[_Event, float]] = []  # and their ends
    for event in events:
        if event.ph == "b":
            if opened.setdefault((event.cat, event.id), event) is not event:
                _refuse(path, f"the id {event.id!r} is taken twice")
        elif event.ph == "e":
            opening = opened.pop((event.cat, event.id), None)
            if opening is None:
                _refuse(path, f"the span with the id {event.id!r} ends, and has not begun")
            timed.append((opening, event.ts))
        elif event.ph == "X":
            timed.append((event, event.ts + event.dur))
    if opened and not broken_off:
        _refuse(path, f"{len(opened)} of its spans never end")
    origin = min((event.ts for event, _ in timed), default=0.0)
    for event, end in timed:
        if end < event.ts or event.tid not in lanes:
            _refuse(path, f"the span {event.name!r} ends before it starts, or is on no lane")
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
        origin=origin / 1e6,
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
        broken_off=broken_off,
    )


class _Event(msgspec.Struct):
    """As ``Timeline`` writes it; times in microseconds."""

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
    trace_events: list[_Event]


def _decoded(content: bytes) -> list[_Event]:
    return msgspec.json.decode(content, type=_File).trace_events


def _refuse(path: str | os.PathLike[str], reason: str) -> NoReturn:
    raise ValueError(
        f"Cannot read '{os.fspath(path)}' as a timeline: {reason}. Name a file that BYTESCHEDULER_TIMELINE produced."
    )
