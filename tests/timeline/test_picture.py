from __future__ import annotations

import heapq
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from matplotlib import image

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline import picture
from lightning_bytescheduler.timeline.picture import draw_timeline
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, COMPUTE, GATE, QUEUE, STEP, WAIT, Span, Trace

PARTITION = 1 << 20


def simulated_trace(*, steps: int = 8, layers: int = 12, milliseconds_per_partition: float = 2.6) -> Trace:
    """A network of growing layers, trained with priorities, a window of two sub-tasks and deferred steps."""
    spans: list[Span] = []

    def add(name: str, category: str, start: float, end: float, **args: Any) -> None:
        spans.append(Span(name=name, category=category, start=start, end=end, lane=category, args=args))

    now, landed = 0.0, [0.0] * layers
    for step in range(steps):
        start = now
        for layer in range(layers):
            if landed[layer] > now:
                add(f"layer {layer}", GATE, now, landed[layer])
                now = landed[layer]
            if step:
                add(f"layer {layer}", STEP, now, now + 0.0004)
                now += 0.0004
            now += 0.003 + 0.001 * (layer % 3)
        add("forward", COMPUTE, start, now, step=step)
        start, ready = now, {}
        for layer in reversed(range(layers)):
            now += 0.006 + 0.002 * (layer % 3)
            ready[layer] = now
        add("backward", COMPUTE, start, now, step=step)
        landed = [0.0] * layers
        for layer, part, begin, end in _sent(ready, milliseconds_per_partition / 1e3):
            args = {
                "bytes": PARTITION,
                "priority": layer,
                "step": step,
                "task": f"bucket {layer}",
                "partition": part,
            }
            add(f"bucket {layer}", QUEUE, ready[layer], begin, **args)
            add(f"bucket {layer}", COMMUNICATION, begin, end, **args)
            landed[layer] = max(landed[layer], end)
        now += 0.001
    return Trace(rank=0, spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))))


def _sent(ready: dict[int, float], seconds: float) -> Iterator[tuple[int, int, float, float]]:
    """Two sub-tasks in flight, served one after the other; of those that wait, the first layer goes first."""
    arriving = sorted((time, layer) for layer, time in ready.items())
    queue: list[tuple[int, int]] = []
    now, ends = 0.0, [0.0, 0.0]
    while arriving or queue:
        now = max(now, ends[-2])
        if not queue:
            now = max(now, arriving[0][0])
        while arriving and arriving[0][0] <= now:
            layer = arriving.pop(0)[1]
            for part in range(2 + layer // 2):
                heapq.heappush(queue, (layer, part))
        layer, part = heapq.heappop(queue)
        ends.append(max(now, ends[-1]) + seconds)
        yield layer, part, now, ends[-1]


def texts(path: Path) -> list[str]:
    """The words of an SVG, which matplotlib draws as paths and names in comments."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(), flags=re.DOTALL)


def steps_drawn(path: Path) -> list[str]:
    return sorted(text.strip() for text in texts(path) if text.strip().startswith("step "))


def coloured(path: Path, colour: str) -> int:
    """How many pixels have exactly this colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int)
    return int((pixels == wanted).all(axis=2).sum())


def with_duration(step: int, start: float, seconds: float) -> list[Span]:
    return [
        Span(name=name, category=COMPUTE, start=begin, end=begin + seconds / 2, lane="x", args={"step": step})
        for name, begin in (("forward", start), ("backward", start + seconds / 2))
    ]


def test_picture_shows_compute_cover_and_waits(tmp_path: Path) -> None:
    trace = simulated_trace()
    draw_timeline(trace, tmp_path / "new" / "waiting.png")
    draw_timeline(simulated_trace(milliseconds_per_partition=0.1), tmp_path / "fast.png")
    for colour in (picture._FORWARD, picture._BACKWARD):
        assert coloured(tmp_path / "new" / "waiting.png", colour) > 10_000
    # The legend has a patch of it in either picture.
    waiting, fast = (coloured(tmp_path / name, picture._WAIT) for name in ("new/waiting.png", "fast.png"))
    assert waiting > 5 * fast


def test_gates_are_drawn_without_communication_too(tmp_path: Path) -> None:
    steps = with_duration(0, 0.0, 0.1)
    gate = Span(name="layer", category=GATE, start=0.0, end=0.02, lane="x")
    for name, spans in (("plain.png", steps), ("gate.png", [*steps, gate])):
        draw_timeline(Trace(rank=0, spans=spans), tmp_path / name)
    plain, with_gate = (coloured(tmp_path / name, picture._WAIT) for name in ("plain.png", "gate.png"))
    assert with_gate > 5 * plain


def test_picture_is_labelled(tmp_path: Path) -> None:
    draw_timeline(simulated_trace(), tmp_path / "t.svg")
    words = texts(tmp_path / "t.svg")
    assert any(text.startswith("Rank 0, steps 2 to 4: ") for text in words)
    assert any(text.startswith("Training waits ") for text in words), "the heading says what is found"
    assert words.count("forward") == words.count("backward") == 3 + 3 + 1  # compute, cover, legend
    assert {"time (ms)", "0 first layers", "11 last layers", "deferred optimizer step"} <= set(words)


def test_the_line_of_numbers_agrees_with_the_bars(tmp_path: Path) -> None:
    spans = [
        *with_duration(0, 0.0, 0.1),
        *with_duration(1, 0.1, 0.1),
        Span(name="b", category=COMMUNICATION, start=0.06, end=0.11, lane="x", args={"priority": 0, "step": 0}),
        Span(name="b", category=COMMUNICATION, start=0.11, end=0.12, lane="x", args={"priority": 1, "step": 0}),
        Span(name="m", category=GATE, start=0.1, end=0.106, lane="x", args={}),
    ]
    draw_timeline(Trace(rank=1, spans=spans), tmp_path / "t.svg")
    # 60 ms in flight: 40 under backward, 20 under forward, of which 6 at the gate; two steps.
    words = texts(tmp_path / "t.svg")
    assert "Training waits 3.0 of 100.0 ms a step for gradients" in words
    hidden = "90 % of the communication is hidden (67 % under backward, 23 % under forward)"
    assert f"Rank 1, steps 0 to 1: {hidden}" in words


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((2, 4), ["step 2", "step 3"]),
        ((7, 100), ["step 7"]),
        (None, ["step 2", "step 3", "step 4"]),
    ],
)
def test_steps_are_chosen_as_in_range(tmp_path: Path, steps: tuple[int, int] | None, expected: list[str]) -> None:
    draw_timeline(simulated_trace(), tmp_path / "t.svg", steps=steps)
    assert steps_drawn(tmp_path / "t.svg") == expected


def test_a_single_step_without_communication_is_drawn(tmp_path: Path) -> None:
    draw_timeline(Trace(rank=4, spans=with_duration(9, 1.0, 0.1)), tmp_path / "t.svg")
    assert {"Rank 4, step 9", "No communication in these steps", "none"} <= set(texts(tmp_path / "t.svg"))


def of_kind(step: int, start: float, seconds: float, kind: str) -> list[Span]:
    forward, backward = with_duration(step, start, seconds)
    return [forward, replace(backward, args={"step": step, "kind": kind})]


def test_by_default_the_steps_are_of_the_kind_that_most_are_of(tmp_path: Path) -> None:
    kinds = ["synchronised", *["as DDP's"] * 4, *["overlapped"] * 7, *["as DDP's"] * 2]
    spans = [span for step, kind in enumerate(kinds) for span in of_kind(step, 0.1 * step, 0.1, kind)]
    draw_timeline(Trace(rank=0, spans=spans), tmp_path / "t.svg")
    assert steps_drawn(tmp_path / "t.svg") == ["step 7", "step 8", "step 9"]
    assert "Rank 0, steps 7 to 9 (overlapped)" in texts(tmp_path / "t.svg")
    draw_timeline(Trace(rank=0, spans=spans), tmp_path / "t.svg", steps=(4, 6))
    assert "Rank 0, steps 4 to 5 (as DDP's and overlapped)" in texts(tmp_path / "t.svg")


def test_what_ddp_waits_for_at_the_end_of_backward_is_not_hidden(tmp_path: Path) -> None:
    spans = [
        *of_kind(1, 0.0, 0.1, "as DDP's"),
        Span(name="all-reduce 0", category=COMMUNICATION, start=0.06, end=0.1, lane="x", args={"step": 1}),
        Span(name="gradients", category=WAIT, start=0.07, end=0.1, lane="x", args={"step": 1}),
    ]
    draw_timeline(Trace(rank=0, spans=spans), tmp_path / "t.svg")
    assert "Training waits 30.0 of 100.0 ms a step for gradients" in texts(tmp_path / "t.svg")


def test_a_thousand_partitions_can_be_seen(tmp_path: Path) -> None:
    draw_timeline(simulated_trace(layers=60, milliseconds_per_partition=0.3), tmp_path / "t.png")
    assert coloured(tmp_path / "t.png", picture._BACKWARD) > 10_000
    pixels = (image.imread(tmp_path / "t.png")[:, :, :3] * 255).round().astype(int)
    # The last layers' yellow, of bars as thin as a pixel.
    assert int((abs(pixels - [253, 231, 37]) < 12).all(axis=2).sum()) > 1_000


@pytest.mark.parametrize("steps", [(8, 9), (3, 3), (-4, 0)])
def test_steps_that_are_not_there_are_refused(tmp_path: Path, steps: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match="steps 0 to 7"):
        draw_timeline(simulated_trace(), tmp_path / "t.png", steps=steps)


def test_suffixes_count_in_any_case() -> None:
    assert picture.require_picture("out", "a/b.PNG") == Path("a/b.PNG")


@pytest.mark.parametrize("name", ["t.xyz", "t", "t.", "png"])
def test_a_suffix_that_is_no_picture_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="png") as caught:
        draw_timeline(simulated_trace(), tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    lone = Span(name="forward", category=COMPUTE, start=0.0, end=1.0, lane="x")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline(Trace(rank=0, spans=[lone]), tmp_path / "t.png")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.png").mkdir()
    with pytest.raises(OSError, match=r"t\.png"):
        draw_timeline(simulated_trace(), tmp_path / "t.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning-bytescheduler\[plots\]"):
        draw_timeline(simulated_trace(), tmp_path / "t.png")


def test_pyplot_and_its_global_state_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would now raise
    draw_timeline(simulated_trace(), tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=20).map(
    lambda drawn: [
        Span(name="x", category=QUEUE, start=start, end=start + duration, lane="x") for start, duration in sorted(drawn)
    ]
)


def depth_at(spans: list[Span], time: float) -> int:
    return sum(span.start <= time < span.end for span in spans)


@given(spans=SPANS)
def test_rows_are_disjoint_and_as_few_as_possible(spans: list[Span]) -> None:
    rows = picture._rows(spans)
    for row in set(rows):
        members = [span for span, its_row in zip(spans, rows, strict=True) if its_row == row]
        assert all(left.end <= right.start for left, right in itertools.pairwise(members))
    assert len(set(rows)) == max((depth_at(spans, time) for time in range(30)), default=0)
