from __future__ import annotations

import importlib.util
import json
import math
import resource
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.timeline import timeline as timeline_module
from lightning_bytescheduler.timeline.timeline import (
    COMMUNICATION,
    COMPUTE,
    QUEUE,
    SPOOL_EVENTS,
    Timeline,
    timeline_path,
)
from tests.support.waiting import WAIT

WALL = 1_700_000_000.25


def read(path: Path) -> list[dict[str, Any]]:
    """Parse the file as strictly as a browser does, and return its events."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(path.read_bytes(), parse_constant=refuse)
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] == "ms"
    return list(document["traceEvents"])


def recorded(path: Path) -> list[dict[str, Any]]:
    return [event for event in read(path) if event["ph"] != "M"]


def fixed(path: Path, *, rank: int = 0, origin: float = 100.0) -> Timeline:
    return Timeline(path, rank=rank, clock=lambda: origin, wall_clock=lambda: WALL)


def test_file_is_well_formed_before_anything_is_recorded(tmp_path: Path) -> None:
    with closing(fixed(tmp_path / "t.json", rank=3)) as timeline:
        assert read(timeline.path) == [
            {"name": "process_name", "ph": "M", "pid": 3, "tid": 0, "args": {"name": "rank 3"}}
        ]


def test_span_is_a_complete_event_in_wall_clock_microseconds(tmp_path: Path) -> None:
    with closing(fixed(tmp_path / "t.json", rank=2)) as timeline:
        timeline.span("forward", COMPUTE, 101.5, 101.75, lane="training thread", args={"step": 4})
    lane, span = read(timeline.path)[1:]
    assert lane == {
        "name": "thread_name",
        "ph": "M",
        "pid": 2,
        "tid": 1,
        "args": {"name": "training thread"},
    }
    assert span == {
        "name": "forward",
        "cat": "compute",
        "ph": "X",
        "ts": 1_700_000_001_750_000,
        "dur": 250_000,
        "pid": 2,
        "tid": 1,
        "args": {"step": 4},
    }


def test_overlapping_spans_are_async_pairs_of_their_own(tmp_path: Path) -> None:
    with closing(fixed(tmp_path / "t.json")) as timeline:
        timeline.span("bucket 1", QUEUE, 101.0, 103.0, lane="network", args={"step": 1})
        timeline.span("bucket 1", QUEUE, 102.0, 104.0, lane="network")
    events = recorded(timeline.path)
    assert [event["ph"] for event in events] == ["b", "e", "b", "e"]
    assert [event["ts"] - WALL * 1e6 for event in events] == [1e6, 3e6, 2e6, 4e6]
    assert events[0]["id"] == events[1]["id"] != events[2]["id"] == events[3]["id"]
    assert {(event["name"], event["cat"], event["tid"]) for event in events} == {("bucket 1", "queue", 1)}
    assert events[0]["args"] == {"step": 1}


def test_ids_of_different_ranks_differ(tmp_path: Path) -> None:
    ids = []
    for rank in (0, 1):
        with closing(fixed(tmp_path / "t.json", rank=rank)) as timeline:
            timeline.span("bucket 1", QUEUE, 101.0, 103.0, lane="network")
        ids.append(recorded(timeline.path)[0]["id"])
    assert ids[0] != ids[1]


def test_a_lane_keeps_its_thread_id_over_flushes(tmp_path: Path) -> None:
    with closing(fixed(tmp_path / "t.json")) as timeline:
        for lane in ("a", "b", "a", "c", "b"):
            timeline.span(lane, COMPUTE, 101.0, 102.0, lane=lane)
            timeline.flush()
    names = [event for event in read(timeline.path) if event["name"] == "thread_name"]
    tids = {event["args"]["name"]: event["tid"] for event in names}
    assert len(names) == len(set(tids.values())) == 3
    assert all(event["tid"] == tids[event["name"]] for event in recorded(timeline.path))


def test_ranks_with_different_clocks_line_up(tmp_path: Path) -> None:
    stamps = []
    for rank, origin in enumerate((0.0, 5000.0)):
        with closing(fixed(tmp_path / "t.json", rank=rank, origin=origin)) as timeline:
            timeline.span("forward", COMPUTE, origin + 2.0, origin + 3.0, lane="x")
        stamps.append(recorded(timeline.path)[0]["ts"])
    assert stamps[0] == stamps[1]


@given(edges=st.lists(st.floats(0, 1e4, allow_nan=False), min_size=4, max_size=4).map(sorted))
def test_what_nests_in_seconds_nests_in_the_file(edges: list[float]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        with closing(fixed(Path(directory) / "t.json", origin=0.1)) as timeline:
            timeline.span("parent", COMPUTE, edges[0], edges[3], lane="x")
            timeline.span("child", COMPUTE, edges[1], edges[2], lane="x")
        parent, child = recorded(timeline.path)
    assert parent["ts"] <= child["ts"]
    assert child["ts"] + child["dur"] <= parent["ts"] + parent["dur"]
    assert parent["dur"] == pytest.approx((edges[3] - edges[0]) * 1e6, abs=1.01)


RECORDINGS = st.lists(
    st.one_of(
        st.just("flush"),
        st.tuples(st.sampled_from(["span", "overlapping"]), st.text(max_size=5), st.integers(0, 9)),
    ),
    max_size=30,
)


@given(recordings=RECORDINGS)
def test_after_every_flush_the_file_holds_exactly_what_was_recorded(recordings: list[Any]) -> None:
    expected: list[tuple[str, str, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        timeline = fixed(Path(directory) / "t.json", origin=0.0)
        for recording in [*recordings, "flush"]:
            if recording == "flush":
                timeline.flush()
                found = [(e["ph"], e["name"], e["ts"] - round(WALL * 1e6)) for e in recorded(timeline.path)]
                assert found == expected
                continue
            kind, name, start = recording
            if kind == "span":
                timeline.span(name, COMPUTE, start, start + 1, lane=name)
                expected.append(("X", name, start * 10**6))
            else:
                timeline.span(name, QUEUE, start, start + 1, lane=name)
                expected += [("b", name, start * 10**6), ("e", name, (start + 1) * 10**6)]
        timeline.close()


def test_recording_touches_the_file_only_to_spool(tmp_path: Path) -> None:
    with closing(fixed(tmp_path / "t.json")) as timeline:
        for i in range(SPOOL_EVENTS):
            timeline.span(str(i), COMPUTE, 101.0, 102.0, lane="x")
        assert recorded(timeline.path) == []
        timeline.span("one more", COMPUTE, 101.0, 102.0, lane="x")
        assert len(recorded(timeline.path)) == SPOOL_EVENTS + 1


def test_file_is_complete_after_an_exception(tmp_path: Path) -> None:
    def train() -> None:
        with closing(fixed(tmp_path / "t.json")) as timeline:
            timeline.span("forward", COMPUTE, 101.0, 102.0, lane="x")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train()
    assert [event["name"] for event in recorded(tmp_path / "t.json")] == ["forward"]


# The top package is replaced by an empty one, which starts faster and shows that the module needs none of it.
ENDINGS = """
import os, signal, sys, types
package = types.ModuleType("lightning_bytescheduler")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_bytescheduler"] = package
from lightning_bytescheduler.timeline.timeline import Timeline
assert not {"torch", "lightning"} & sys.modules.keys()
timeline = Timeline(sys.argv[2])
timeline.span("first", "compute", 1.0, 2.0, lane="x")
timeline.flush()
timeline.span("second", "compute", 2.0, 3.0, lane="x")
if sys.argv[3] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[3] == "raise":
    raise RuntimeError("boom")
elif sys.argv[3] == "fork":
    child = os.fork()
    if child == 0:
        for _ in range(5000):
            timeline.span("child", "compute", 1.0, 2.0, lane="x")
        timeline.flush()
        timeline.close()
        os._exit(0)
    os.waitpid(child, 0)
    timeline.close()
"""


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("kill", ["first"]), ("raise", ["first", "second"]), ("fork", ["first", "second"])],
)
def test_file_is_complete_however_the_process_ends(tmp_path: Path, ending: str, expected: list[str]) -> None:
    spec = importlib.util.find_spec("lightning_bytescheduler")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = tmp_path / "t.json"
    process = subprocess.run(
        [sys.executable, "-c", ENDINGS, spec.submodule_search_locations[0], str(path), ending],
        capture_output=True,
        text=True,
    )
    assert process.returncode == {"kill": -9, "raise": 1, "fork": 0}[ending], process.stderr
    assert [event["name"] for event in recorded(path)] == expected


def test_threads_lose_and_repeat_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "SPOOL_EVENTS", 50)
    timeline = fixed(tmp_path / "t.json")
    start = threading.Barrier(4)

    def record(thread: int) -> None:
        start.wait()
        for i in range(500):
            timeline.span(f"{thread}.{i}", COMMUNICATION, 101.0, 102.0, lane=f"lane {thread}")
            if i % 100 == 0:
                timeline.flush()

    threads = [threading.Thread(target=record, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    events = recorded(timeline.path)
    expected = Counter((f"{thread}.{i}", phase) for thread in range(4) for i in range(500) for phase in "be")
    assert Counter((event["name"], event["ph"]) for event in events) == expected
    assert len({event["id"] for event in events}) == 2000


def test_recording_may_race_with_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "SPOOL_EVENTS", 5)
    timeline = fixed(tmp_path / "t.json")
    closed, failures, going = threading.Event(), [], threading.Event()

    def record() -> None:
        try:
            while not closed.is_set():
                timeline.span("x", COMPUTE, 101.0, 102.0, lane="x")
                going.set()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        assert going.wait(WAIT)
        timeline.close()
        content = timeline.path.read_bytes()
        timeline.span("late", COMPUTE, 101.0, 102.0, lane="x")
        # What a thread appends that asked whether to record just before the close.
        timeline._events.append(b',\n{"name":"late","ph":"X"}')
        timeline.flush()
        timeline.close()
    finally:
        closed.set()
        thread.join()
    assert failures == []
    assert timeline.path.read_bytes() == content
    assert "late" not in {event["name"] for event in read(timeline.path)}


def test_arguments_are_copied(tmp_path: Path) -> None:
    args = {"bytes": 1}
    with closing(fixed(tmp_path / "t.json")) as timeline:
        timeline.span("x", COMPUTE, 101.0, 102.0, lane="x", args=args)
        args["bytes"] = 2
    assert recorded(timeline.path)[0]["args"] == {"bytes": 1}


class Text:
    def __str__(self) -> str:
        return "float32"


def test_arguments_that_json_does_not_know(tmp_path: Path) -> None:
    with closing(fixed(tmp_path / "t.json")) as timeline:
        args = {"dtype": Text(), "n": 1, "quote": '"\\\n', "loss": math.nan}
        timeline.span("x", COMPUTE, 101.0, 102.0, lane="x", args=args)
    (event,) = recorded(timeline.path)
    assert event["args"] == {"dtype": "float32", "n": 1, "quote": '"\\\n', "loss": None}


def test_a_span_never_has_a_negative_duration(tmp_path: Path) -> None:
    with closing(fixed(tmp_path / "t.json")) as timeline:
        timeline.span("x", COMPUTE, 102.0, 101.0, lane="x")
    assert recorded(timeline.path)[0]["dur"] == 0


def test_a_full_disk_ends_the_timeline_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = fixed(tmp_path / "t.json")
    timeline.span("before", COMPUTE, 101.0, 102.0, lane="x")
    timeline.flush()
    before = read(timeline.path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(100):
        timeline.span("too much", COMPUTE, 101.0, 102.0, lane="x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (timeline.path.stat().st_size + 500, hard))
    try:
        timeline.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(timeline.path) == before
    timeline.span("after", COMPUTE, 101.0, 102.0, lane="x")
    timeline.close()
    assert read(timeline.path) == before
    assert len(caplog.records) == 1
    assert str(timeline.path) in caplog.text


@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("out/t.json", 0, "out/t.json"),
        ("out/t.json", 12, "out/t.rank12.json"),
        ("t", 1, "t.rank1"),
        ("run.1/t.trace.json", 2, "run.1/t.trace.rank2.json"),
    ],
)
def test_each_rank_has_a_file_of_its_own(path: str, rank: int, expected: str) -> None:
    assert timeline_path(path, rank) == Path(expected)


def test_parent_directories_are_created_and_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "t.json"
    with closing(fixed(path)) as timeline:
        timeline.span("old" * 1000, COMPUTE, 101.0, 102.0, lane="x")
    with closing(fixed(path)):
        pass
    assert recorded(path) == []


@pytest.mark.parametrize("place", ["directory", "directory/file/t.json", "/dev/full"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "file").touch()
    path = tmp_path / place
    with pytest.raises(OSError, match="Cannot write the timeline") as caught:
        Timeline(path)
    assert caught.value.filename == str(path)
    assert str(path) in str(caught.value)
