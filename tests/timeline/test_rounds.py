"""Where the time of workers that train in rounds went."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_bytescheduler.cli import main
from lightning_bytescheduler.timeline.timeline import CODEC, COMMUNICATION, COMPUTE, INNER, STEP, STILL, WAIT, Timeline
from lightning_bytescheduler.timeline.trace import Trace, in_rounds, read_timeline, rounds_summary


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


def test_the_command_sums_rounds_up_and_leaves_their_picture_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = str(written(tmp_path, 0, step=0.1))
    assert main(["timeline", file]) == 0
    assert "worker0" in capsys.readouterr().out
    assert main(["timeline", file, "--png", str(tmp_path / "r.png")]) == 2
    assert "the command rounds draws rounds" in capsys.readouterr().err
    with Timeline(tmp_path / "steps.json") as timeline:
        timeline.span("forward", COMPUTE, 0.0, 1.0, lane="training", args={"step": 0})
    assert not in_rounds(read_timeline(timeline.path))
