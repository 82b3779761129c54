from __future__ import annotations

import itertools
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.timeline.timeline import (
    COMMUNICATION,
    COMPUTE,
    GATE,
    QUEUE,
    STEP,
    WAIT,
    Interval,
    Span,
    Timeline,
    Trace,
    intersection,
    length,
    read_timeline,
    subtract,
    union,
)

INTERVALS = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 8)).map(lambda t: (t[0], t[0] + t[1])), max_size=12)


def cells(intervals: list[Any]) -> set[int]:
    """The reference: which unit cells are covered."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


def assert_is_union(intervals: list[Interval]) -> None:
    assert all(start < end for start, end in intervals)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(intervals))


@given(intervals=INTERVALS)
def test_union(intervals: list[Interval]) -> None:
    merged = union(intervals)
    assert_is_union(merged)
    assert cells(merged) == cells(intervals)
    assert length(merged) == len(cells(intervals))


@given(left=INTERVALS, right=INTERVALS)
def test_intersection_and_subtract(left: list[Interval], right: list[Interval]) -> None:
    common, rest = intersection(union(left), union(right)), subtract(union(left), union(right))
    assert_is_union(common)
    assert_is_union(rest)
    assert cells(common) == cells(left) & cells(right)
    assert cells(rest) == cells(left) - cells(right)


def test_many_intervals_take_no_quadratic_time() -> None:
    many = [(3.0 * i, 3.0 * i + 2) for i in range(100_000)]
    shifted = [(start + 1, end + 1) for start, end in many]
    assert length(intersection(union(many), union(shifted))) == 100_000
    assert length(subtract(union(many), union(shifted))) == 100_000


def span(category: str, start: float, end: float, name: str = "x", **args: Any) -> Span:
    return Span(name=name, category=category, start=start, end=end, lane="lane", args=args)


def trace(*spans: Span) -> Trace:
    return Trace(rank=0, spans=tuple(sorted(spans, key=lambda one: (one.start, one.end))))


def test_summary_of_two_steps() -> None:
    summary = trace(
        span(COMPUTE, 0, 10, "forward", step=0),
        span(COMPUTE, 10, 30, "backward", step=0),
        span(QUEUE, 12, 14, step=0),
        span(COMMUNICATION, 14, 20, bytes=100, step=0),
        span(COMMUNICATION, 18, 26, bytes=200, step=0),
        # Carried over the boundary: 2 s between the steps, 3 s at a gate, 4 s hidden.
        span(COMMUNICATION, 30, 39, bytes=400, step=0),
        span(COMPUTE, 32, 45, "forward", step=1),
        span(GATE, 32, 35, step=1),
        span(STEP, 35, 36, step=1),
        span(COMPUTE, 45, 60, "backward", step=1),
        span(COMMUNICATION, 50, 70, bytes=800, step=1),
    ).summary()
    assert summary.communication_seconds == 12 + 9 + 20
    assert summary.under_forward == 4
    assert summary.under_backward == 12 + 10
    assert summary.hidden_share == pytest.approx((4 + 12 + 10) / 41)
    assert summary.exposed_seconds == 3
    assert summary.total_bytes == 1500
    assert summary.sub_tasks == 4
    assert summary.steps == 2


def test_summary_of_steps_as_ddps() -> None:
    summary = trace(
        span(COMPUTE, 0, 10, "backward", step=1, kind="synchronised"),
        span(COMPUTE, 20, 50, "backward", step=2, kind="as DDP's"),
        span(COMMUNICATION, 30, 49, bytes=100.0, step=2),
        span(WAIT, 40, 50, "gradients", step=2),
    ).summary()
    assert summary.exposed_seconds == 10
    assert summary.hidden_share == pytest.approx(10 / 19)
    assert summary.kinds == {"synchronised": 1, "as DDP's": 1}
    assert summary.total_bytes == 100


def test_summary_of_nothing() -> None:
    summary = trace().summary()
    assert (summary.communication_seconds, summary.hidden_share, summary.exposed_seconds) == (0, 0, 0)
    assert (summary.steps, summary.sub_tasks, summary.total_bytes) == (0, 0, 0)


KINDS = [
    (COMMUNICATION, "x"),
    (COMPUTE, "forward"),
    (COMPUTE, "backward"),
    (GATE, "x"),
    (STEP, "x"),
    (QUEUE, "x"),
]
SPANS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 25), st.integers(0, 8), st.integers(0, 3)), max_size=25
)


@given(drawn=SPANS)
def test_summary_agrees_with_brute_force(drawn: list[tuple[tuple[str, str], int, int, int]]) -> None:
    spans = [span(kind[0], at, at + dur, kind[1], step=step, bytes=dur) for kind, at, dur, step in drawn]
    summary = trace(*spans).summary()

    def covered(category: str, name: str | None = None, step: int | None = None) -> set[int]:
        return cells(
            [
                (one.start, one.end)
                for one in spans
                if one.category == category and name in (None, one.name) and step in (None, one.args["step"])
            ]
        )

    sent, forward, backward = (
        covered(COMMUNICATION),
        covered(COMPUTE, "forward"),
        covered(COMPUTE, "backward"),
    )
    hidden = sent & (forward | backward) - covered(GATE)
    assert summary.communication_seconds == len(sent)
    assert summary.under_forward == len(sent & forward - covered(GATE))
    assert summary.under_backward == len(sent & backward - covered(GATE))
    assert summary.hidden_share == pytest.approx(len(hidden) / len(sent) if sent else 0)
    assert summary.exposed_seconds == sum(s.end - s.start for s in spans if s.category == GATE)
    assert summary.total_bytes == sum(one.args["bytes"] for one in spans if one.category == COMMUNICATION)


def test_what_a_timeline_wrote_is_read_back(tmp_path: Path) -> None:
    args = {"bytes": 4096, "priority": 2, "step": 7, "task": "bucket 2", "partition": 0}
    with closing(Timeline(tmp_path / "t.json", rank=5, clock=lambda: 0.0, wall_clock=lambda: 1.7e9)) as timeline:
        timeline.span("bucket 2", COMMUNICATION, 3.0, 4.5, lane="network", args=args)
        timeline.span("bucket 1", QUEUE, 3.5, 4.0, lane="network")
        timeline.span("forward", COMPUTE, 2.0, 5.0, lane="training thread", args={"step": 8})
    found = read_timeline(timeline.path)
    assert found.rank == 5
    forward, sent, queued = found.spans
    assert sent == Span(name="bucket 2", category=COMMUNICATION, start=1.0, end=2.5, lane="network", args=args)
    assert (forward.start, forward.end, forward.lane, forward.step) == (0.0, 3.0, "training thread", 8)
    assert (queued.start, queued.end, queued.step) == (1.5, 2.0, None)
    assert found.select(COMPUTE, "forward") == [forward]
    assert found.select(COMPUTE, "backward") == []
    assert found.summary().under_forward == 1.5


def test_an_empty_timeline_is_read(tmp_path: Path) -> None:
    with closing(Timeline(tmp_path / "t.json")) as timeline:
        pass
    assert read_timeline(timeline.path).spans == ()


RANK = {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}
LANE = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "x"}}
SPAN = {"name": "forward", "cat": COMPUTE, "ph": "X", "ts": 5, "dur": 2, "pid": 0, "tid": 1}
BEGIN = {"name": "b", "cat": QUEUE, "ph": "b", "ts": 5, "id": "0x1", "pid": 0, "tid": 1}
END = BEGIN | {"ph": "e", "ts": 6}


def test_the_hand_written_events_below_are_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [RANK, LANE, SPAN, BEGIN, END, {"ph": "i", "name": "unknown"}]}))
    assert [one.end for one in read_timeline(path).spans] == pytest.approx([1e-6, 2e-6])


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "one rank and holds those of none"),
        ([LANE, SPAN], "one rank and holds those of none"),
        ([RANK | {"args": {"name": "python"}}], "one rank and holds those of none"),
        ([RANK, RANK | {"pid": 1, "args": {"name": "rank 1"}}], r"those of \[0, 1\]"),
        ([RANK, 3], r"Expected `object`, got `int` - at `\$.traceEvents\[1\]`"),
        ([RANK, LANE, {"name": "no phase"}], "required field `ph`"),
        ([RANK, SPAN], "are on no lane"),
        ([RANK, LANE, SPAN | {"ts": None}], r"Expected `float`, got `null` - at `\$.traceEvents\[2\].ts`"),
        ([RANK, LANE, SPAN | {"ts": float("nan")}], "another tool's"),
        ([RANK, LANE, SPAN | {"ts": 10**400}], "another tool's"),
        ([RANK, LANE, SPAN | {"name": 4}], "Expected `str`"),
        ([RANK, LANE, SPAN | {"tid": []}], "Expected `int`"),
        ([RANK, LANE, SPAN | {"args": 4}], "Expected `object`"),
        ([RANK, LANE, BEGIN], "some of its spans never end"),
    ],
)
def test_malformed_events_are_refused(tmp_path: Path, events: list[Any], reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(ValueError, match=reason) as caught:
        read_timeline(path)
    assert f"'{path}'" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"traceEvents":[\n{"name":', b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"{}", b'{"traceEvents": {}}'],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a JSON object with a list of 'traceEvents', or another tool's") as caught:
        read_timeline(path)
    assert f"'{path}'" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        read_timeline(tmp_path / "missing.json")
