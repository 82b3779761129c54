"""Trace: reads a timeline back and says how much of the communication was hidden, or of rounds, where time went.

For that, times are treated as unions of intervals, in sweeps over sorted ones. Pure: neither torch nor Lightning.
Limits: one file holds one rank, and the whole file is read into memory.
"""

from __future__ import annotations

import json
import math
import operator
import os
import reprlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from lightning_bytescheduler.timeline.timeline import CODEC, COMMUNICATION, COMPUTE, GATE, INNER, STEP, STILL, WAIT

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

    def summary(self) -> TraceSummary:
        """Add up where the communication went."""
        sent = self.select(COMMUNICATION)
        forward, backward = self.select(COMPUTE, "forward"), self.select(COMPUTE, "backward")
        communication = _covered(sent)
        gates, waits = _intervals(self.select(GATE)), _intervals(self.select(WAIT))
        seconds = length(communication)
        waiting = union([*gates, *waits])
        computing = subtract(_covered([*forward, *backward]), waiting)
        hidden = length(intersection(communication, computing))
        unawaited = subtract(communication, waiting)
        return TraceSummary(
            communication_seconds=seconds,
            under_forward=length(intersection(unawaited, _covered(forward))),
            under_backward=length(intersection(unawaited, _covered(backward))),
            under_next_forward=_under_next(sent, forward, waiting),
            hidden_share=hidden / seconds if seconds else 0.0,
            exposed_seconds=length([*gates, *waits]),
            gate_seconds=length(gates),
            step_seconds=length(_covered(self.select(STEP))),
            total_bytes=round(sum(span.args.get("bytes", 0) for span in sent)),
            sub_tasks=len(sent),
            steps=len({span.step for span in [*sent, *forward, *backward]} - {None}),
            kinds=dict(Counter(self.kinds().values()).most_common()),
        )


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start, span.end) for span in spans]


def _covered(spans: Iterable[Span]) -> list[Interval]:
    return union(_intervals(spans))


def _under_next(sent: Iterable[Span], forward: Iterable[Span], waiting: Sequence[Interval]) -> float:
    sent_by_step: defaultdict[int, list[Span]] = defaultdict(list)
    forward_by_step: defaultdict[int, list[Span]] = defaultdict(list)
    for spans, by_step in ((sent, sent_by_step), (forward, forward_by_step)):
        for span in spans:
            if span.step is not None:
                by_step[span.step].append(span)
    return math.fsum(
        length(intersection(subtract(_covered(spans), waiting), _covered(forward_by_step.get(step + 1, ()))))
        for step, spans in sent_by_step.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSummary:
    """Where the time of one worker went; all times in seconds.

    Attributes:
        worker: Whose it is.
        rounds: In which steps were taken.
        steps: Taken.
        training: In steps.
        waiting: Of the training thread, for other workers and for the network.
        outer: In which pseudo-gradients were formed, and outer steps taken.
        still: In validations and the like.
        coding: In which parts were encoded, added up or decoded, on any thread.
        network: In which anything was on the network.
        hidden: Part of that while steps were taken.
        pushed: Bytes of pseudo-gradients.
        pulled: Bytes of means.
    """

    worker: str
    rounds: int
    steps: int
    training: float
    waiting: float
    outer: float
    still: float
    coding: float
    network: float
    hidden: float
    pushed: int
    pulled: int


def in_rounds(trace: Trace) -> bool:
    """Whether it is a worker's that trains in rounds."""
    return any(span.category == INNER for span in trace.spans)


def worker_of(trace: Trace) -> str:
    """Whose it is."""
    named = (str(span.args["worker"]) for span in trace.spans if span.args.get("worker"))
    return next(named, f"rank {trace.rank}")


def round_of(span: Span) -> int:
    """The round that a span belongs to; 0 before the first one."""
    number = span.args.get("round")
    return number if isinstance(number, int) else 0


def rounds_summary(trace: Trace) -> RoundsSummary:
    """Add up where the time went."""

    def covered(category: str) -> list[Interval]:
        return _covered(span for span in trace.select(category) if round_of(span))

    def sent(name: str) -> int:
        spans = trace.select(COMMUNICATION, name)
        return int(sum(span.args.get("bytes", 0) for span in spans if round_of(span)))

    training, network = covered(INNER), covered(COMMUNICATION)
    steps = trace.select(INNER)
    return RoundsSummary(
        worker=worker_of(trace),
        rounds=len({round_of(span) for span in steps}),
        steps=len(steps),
        training=length(training),
        waiting=length(covered(WAIT)),
        outer=length(covered(STEP)),
        still=length(covered(STILL)),
        coding=length(covered(CODEC)),
        network=length(network),
        hidden=length(intersection(network, training)),
        pushed=sent("push"),
        pulled=sent("pull"),
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
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        document = _without_its_end(content)
        broken_off = document is not None
        if not broken_off:
            _refuse(path, f"it is not valid JSON ({error})")
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        _refuse(path, "it is not a JSON object with a list of 'traceEvents'")
    reader = _Reader()
    for number, event in enumerate(events):
        try:
            reader.add(event)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            _refuse(path, f"its event {number}, {reprlib.repr(event)}, is malformed ({error!r}), or another tool's")
    if len(reader.ranks) != 1:
        found = f"those of ranks {sorted(reader.ranks)}" if reader.ranks else "none"
        _refuse(path, f"it should hold the events of one rank and holds {found}")
    if reader.unfinished and not broken_off:
        _refuse(path, f"{len(reader.unfinished)} of its spans never end")
    return replace(reader.trace(), broken_off=broken_off)


def _without_its_end(content: bytes) -> Any:
    """The document up to the last event that is whole; ``None`` where there is none. Each event has a line."""
    whole, comma, _ = content.rpartition(b",\n")
    try:
        return json.loads(whole + b"]}") if comma else None
    except (ValueError, RecursionError):
        return None


def _refuse(path: str | os.PathLike[str], reason: str) -> NoReturn:
    raise ValueError(
        f"Cannot read '{os.fspath(path)}' as a timeline: {reason}. Name a file that BYTESCHEDULER_TIMELINE produced."
    )


class _Reader:
    """Collects the events of one file; times stay absolute microseconds until the first one is known."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.unfinished: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._lanes: dict[int, str] = {}
        self._spans: list[Span] = []

    def add(self, event: Mapping[str, Any]) -> None:
        phase = event["ph"]
        if phase == "M":
            self._name(event["name"], event["args"]["name"], event)
        elif phase == "X":
            start = _number(event, "ts")
            self._add_span(event, start, start + _number(event, "dur"))
        elif phase == "b":
            if self.unfinished.setdefault((event["cat"], event["id"]), event) is not event:
                raise ValueError("its id is taken")
        elif phase == "e":
            opening = self.unfinished.pop((event["cat"], event["id"]))
            self._add_span(opening, _number(opening, "ts"), _number(event, "ts"))

    def trace(self) -> Trace:
        origin = min((span.start for span in self._spans), default=0.0)
        spans = [replace(s, start=(s.start - origin) / 1e6, end=(s.end - origin) / 1e6) for s in self._spans]
        return Trace(
            rank=min(self.ranks),
            origin=origin / 1e6,
            spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
        )

    def _name(self, what: str, name: str, event: Mapping[str, Any]) -> None:
        if what == "process_name" and name == f"rank {event['pid']}":
            self.ranks.add(operator.index(event["pid"]))
        elif what == "thread_name":
            self._lanes[event["tid"]] = name

    def _add_span(self, event: Mapping[str, Any], start: float, end: float) -> None:
        if end < start:
            raise ValueError("it ends before it starts")
        args = event.get("args", {})
        for key in {"bytes", "priority"} & args.keys():
            _number(args, key)
        name, category, lane = _text(event, "name"), _text(event, "cat"), self._lanes[event["tid"]]
        self._spans.append(Span(name=name, category=category, start=start, end=end, lane=lane, args=args))


def _number(fields: Mapping[str, Any], key: str) -> float:
    value = fields[key]
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"its {key!r} is not a number")
    return value


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise ValueError(f"its {key!r} is not text")
    return value
