from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

from lightning_bytescheduler.diloco.round_record import add_arguments, draw_rounds, tables
from lightning_bytescheduler.exceptions import OptionError
from tests.diloco.records import small_run, written


def texts(svg: Path) -> list[str]:
    return [text.strip() for text in re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))]


def test_it_draws_the_last_rounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "rounds.svg"
    draw_rounds(small_run(), out)
    drawn = texts(out)
    assert "Rounds 3 to 8: workers waited 2.6% of their time" in drawn
    assert [text for text in drawn if re.fullmatch(r"round \d", text)] == [f"round {n}" for n in range(3, 9)]
    assert {"w0", "w1", "w2", "training", "waiting for the others", "sending its pseudo-gradient", "not merged"} <= set(
        drawn
    )
    assert any("of their time" in text for text in drawn)


def test_it_draws_the_rounds_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_rounds(small_run(), tmp_path / "r.svg", rounds=(1, 2))
    drawn = texts(tmp_path / "r.svg")
    assert any(text.startswith("Round 1: ") for text in drawn)
    assert "w0" not in drawn  # had not joined yet
    assert "not merged" not in drawn
    draw_rounds(small_run(), tmp_path / "r.png", rounds=(7, 99))
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(OptionError, match="among the rounds 1 to 8"):
        draw_rounds(small_run(), tmp_path / "r.png", rounds=(9, 12))
    with pytest.raises(OptionError, match="record"):
        draw_rounds([], tmp_path / "r.png")
    with pytest.raises(OptionError, match="png"):
        draw_rounds(small_run(), tmp_path / "r.xyz")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning-bytescheduler\[plots\]"):
        draw_rounds(small_run(), tmp_path / "r.png")


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(argv)


def test_it_sums_a_run_up(tmp_path: Path) -> None:
    file = str(written(tmp_path / "rounds.jsonl"))
    ((title, rows),) = tables(parse(file))
    found = dict(rows)
    assert title == file
    assert found["rounds"] == "8"
    assert found["samples"] == f"{sum(record.samples for record in small_run()):,}"
    steps = sum(worker.steps for record in small_run() for worker in record.workers if worker.worker == "w2")
    assert found["w2"].startswith(f"{steps:,} steps: training ")
    assert [label for label, _ in rows[-3:]] == ["w0", "w1", "w2"]
    assert float(found["waiting"].split("%")[0]) < 20


def test_it_draws_and_chooses_rounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, out = str(written(tmp_path / "rounds.jsonl")), tmp_path / "r.png"
    ((_, rows),) = tables(parse(file, "--png", str(out), "--rounds", "2:4"))
    assert dict(rows)["rounds"] == "2"
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["3", "4:3", "a:b", "2:2", ""])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a range A:B"):
        parse("file", "--rounds", text)


def test_what_the_command_does_not_find(tmp_path: Path) -> None:
    file = str(written(tmp_path / "rounds.jsonl"))
    with pytest.raises(OptionError, match="among the rounds 1 to 8"):
        tables(parse(file, "--rounds", "20:30"))
    (tmp_path / "empty").write_text("")
    with pytest.raises(OptionError, match="one round or more"):
        tables(parse(str(tmp_path / "empty")))
    with pytest.raises(OSError, match="missing"):
        tables(parse(str(tmp_path / "missing")))
