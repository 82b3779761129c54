"""Where the time of workers that train in rounds went, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_bytescheduler.cli import main
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.timeline.rounds import draw_rounds_timeline, in_rounds, others_awaited, rounds_summary
from lightning_bytescheduler.timeline.timeline import CODEC, COMMUNICATION, COMPUTE, INNER, STEP, STILL, WAIT, Timeline
from lightning_bytescheduler.timeline.trace import Trace, read_timeline


def written(tmp_path: Path, rank: int, *, step: float, rounds: int = 4) -> Path:
    """Rounds of 2 s: 4 steps, a wait until 1.8 s, of which the last second has the network, and an outer step."""
    with Timeline(tmp_path / "run.json", rank=rank, clock=lambda: 0.0, wall_clock=lambda: 1e9) as timeline:
        for number in range(1, rounds + 1):
            start = 2.0 * number
            args = {"round": number, "worker": f"worker{rank}"}
            for taken in range(4):
                begin = start + taken * step
                timeline.span("inner step", INNER, begin, begin + step, lane="training thread", args=args)
            ready = start + 4 * step
            timeline.span("the mean", WAIT, ready, start + 1.8, lane="training thread", args=args)
            timeline.span("outer step", STEP, start + 1.8, start + 1.9, lane="training thread", args=args)
            timeline.span("validation", STILL, start + 1.9, start + 2, lane="training thread", args=args)
            sent = {**args, "bytes": 1000, "task": "fragment 0", "partition": 0}
            timeline.overlapping("push", COMMUNICATION, ready, start + 1.2, lane="COMMUNICATION", args=sent)
            timeline.overlapping("pull", COMMUNICATION, start + 1.3, start + 1.8, lane="COMMUNICATION", args=sent)
            timeline.span("add and encode", CODEC, start + 1.2, start + 1.3, lane="merging", args=args)
    return timeline.path


def read(tmp_path: Path) -> list[Trace]:
    return [read_timeline(written(tmp_path, rank, step=0.1 + 0.1 * rank)) for rank in range(2)]


def test_the_time_adds_up(tmp_path: Path) -> None:
    fast, slow = (rounds_summary(trace) for trace in read(tmp_path))
    assert (fast.worker, fast.rounds, fast.steps) == ("worker0", 4, 16)
    assert fast.training == pytest.approx(4 * 0.4)
    assert fast.waiting == pytest.approx(4 * 1.4)
    assert slow.waiting == pytest.approx(4 * 1.0)
    assert (fast.outer, fast.still, fast.coding) == pytest.approx((0.4, 0.4, 0.4))
    assert fast.network == pytest.approx(4 * (0.8 + 0.5))
    assert fast.hidden == pytest.approx(0.0)
    assert (fast.pushed, fast.pulled) == (4000, 4000)


def test_the_faster_worker_waits_for_the_slower_one_until_that_sends(tmp_path: Path) -> None:
    awaited = others_awaited(read(tmp_path))
    assert [end - start for start, end in awaited[0]] == pytest.approx([0.4] * 4)
    assert awaited[1] == []


def test_a_picture_of_several_workers(tmp_path: Path) -> None:
    out = tmp_path / "new" / "rounds.svg"
    draw_rounds_timeline(read(tmp_path), out, rounds=(2, 4))
    drawn = out.read_text()
    for text in ("worker0", "worker1", "round 2", "round 3", "Workers wait 60% of the time: 10% for others"):
        assert text in drawn
    assert "round 4" not in drawn.replace("rounds 2 to 3", "")


def test_one_worker_alone(tmp_path: Path) -> None:
    out = tmp_path / "rounds.svg"
    draw_rounds_timeline(read(tmp_path)[:1], out)
    assert "worker0 waits 70% of the time (rounds 1 to 3)" in out.read_text()


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    traces = read(tmp_path)
    with pytest.raises(OptionError, match="among the rounds of the trace, 1 to 4"):
        draw_rounds_timeline(traces, tmp_path / "rounds.svg", rounds=(9, 10))
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_rounds_timeline([], tmp_path / "rounds.svg")


def test_the_command_reads_several_workers_and_no_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(written(tmp_path, rank, step=0.1)) for rank in range(2)]
    assert main(["timeline", *files, "--png", str(tmp_path / "both.png")]) == 0
    said = capsys.readouterr().out
    assert "worker0" in said
    assert "worker1" in said
    with Timeline(tmp_path / "steps.json") as timeline:
        timeline.span("forward", COMPUTE, 0.0, 1.0, lane="training", args={"step": 0})
    assert not in_rounds(read_timeline(timeline.path))
    assert main(["timeline", files[0], str(timeline.path)]) != 0
    said = capsys.readouterr().err
    assert "name one file" in said
    assert f"no round in {timeline.path}: leave it out" in said
