from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.cli import main
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, COMPUTE, GATE, STEP, Timeline
from lightning_bytescheduler.tuning import TrialEntry, append_entries
from tests.diloco.records import written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three steps of 100 ms; 1.5 MB are sent during 50 ms of each backward and 10 ms of the next forward."""
    with Timeline(tmp_path / "run.json") as timeline:
        for step in range(3):
            start = step * 0.1
            timeline.span("forward", COMPUTE, start, start + 0.04, lane="training", args={"step": step})
            timeline.span("backward", COMPUTE, start + 0.04, start + 0.1, lane="training", args={"step": step})
            timeline.overlapping(
                "bucket 0",
                COMMUNICATION,
                start + 0.05,
                start + 0.11,
                lane="network",
                args={"bytes": 1_500_000, "priority": 0, "step": step, "task": "bucket 0", "partition": 0},
            )
            if step:
                timeline.span("layer", GATE, start, start + 0.004, lane="training")
                timeline.span("layer", STEP, start + 0.01, start + 0.011, lane="training")
    return timeline.path


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rich", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, module, None)


EXPECTED = {
    "steps": "3",
    "sub-tasks": "3",
    "sent": "4.5 MB",
    "communication": "0.180 s",
    "under backward": "0.150 s (83%)",
    "under forward": "0.020 s (11%)",
    "under the next step's forward": "0.020 s (11%)",
    "hidden": "90%",
    "exposed": "0.018 s (10%)",
    "waiting at gates": "0.008 s",
    "deferred steps": "0.002 s",
}


def rows(output: str) -> dict[str, str]:
    found = {}
    for line in output.splitlines():
        label, _, value = line.strip("│ ").replace("│", "  ").partition("  ")
        found[label.strip()] = value.strip()
    return found


def test_summary_as_plain_text(file: Path, capsys: pytest.CaptureFixture[str], without_rich: None) -> None:
    assert main(["timeline", str(file)]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == str(file)
    assert "│" not in output
    assert EXPECTED.items() <= rows(output).items()


def test_summary_as_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main(["timeline", str(file)]) == 0
    output = capsys.readouterr().out
    assert "│" in output
    assert EXPECTED.items() <= rows(output).items()


def test_nothing_is_cut_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "60")
    entry = TrialEntry(
        search=0,
        kind="start",
        step=123456,
        credit=123456789,
        partition_size=12345678,
        step_seconds=12.3456,
        error_seconds=1.2345,
        noise=0.1,
        steps=20,
        outcome="abandoned",
    )
    append_entries(tmp_path / "tuning.jsonl", [entry])
    assert main(["tuning", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert all(len(line) <= 60 for line in output.splitlines())
    words = output.replace("│", " ").split()
    assert {"123,456", "start", "123,456,789,", "12,345,678", "12,345.6", "abandoned"} <= set(words)


def test_a_file_name_is_not_taken_for_markup(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.rename(file.with_name("[red]run.json"))
    monkeypatch.chdir(file.parent)
    assert main(["timeline", "[red]run.json"]) == 0
    assert "[red]run.json" in capsys.readouterr().out


def test_picture_of_chosen_steps(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["timeline", str(file), "--png", str(tmp_path / "t.svg"), "--steps", "1:3"]) == 0
    assert "Rank 0, steps 1 to 2" in (tmp_path / "t.svg").read_text()
    assert main(["timeline", str(file), "--png", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_arguments_come_from_the_process_by_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bytescheduler", "timeline", str(file)])
    assert main() == 0


@pytest.mark.parametrize(("argument", "code"), [("run.json", 0), ("missing.json", 2)])
def test_python_m(file: Path, monkeypatch: pytest.MonkeyPatch, argument: str, code: int) -> None:
    monkeypatch.setattr(sys, "argv", ["python", "timeline", str(file.with_name(argument))])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("lightning_bytescheduler", run_name="__main__")
    assert caught.value.code == code


def fails(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run, expect a single line on stderr and exit code 2, and return the line."""
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning-bytescheduler: error: ")
    return line


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["paint"], "'paint'"),
        (["timeline"], "FILE"),
        (["timeline", "{file}", "--jpg"], "--jpg"),
        (["timeline", "{file}.missing"], "{file}.missing"),
        (["timeline", "{directory}"], "{directory}"),
        (["timeline", "{other}"], "'{other}'"),
        (["timeline", "{file}", "--steps", "0:2"], "needs --png"),
        (["timeline", "{file}", "--png", "{directory}/t.png", "--steps", "3"], "'3' is not a range A:B"),
        (["timeline", "{file}", "--png", "{directory}/t.png", "--steps", "a:b"], "'a:b'"),
        (["timeline", "{file}", "--png", "{directory}/t.png", "--steps", "2:2"], "'2:2'"),
        (["timeline", "{file}", "--png", "{directory}/t.png", "--steps", "7:9"], "steps 0 to 2"),
        (["timeline", "{file}", "--png", "{directory}/t.xyz"], "{directory}/t.xyz"),
        (["timeline", "{file}", "--png", "{file}/t.png"], "{file}"),
    ],
)
def test_bad_input_is_one_line(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents":\n 1}')
    names = {"file": file, "directory": tmp_path, "other": other}
    line = fails([argument.format(**names) for argument in argv], capsys)
    assert reason.format(**names) in line


def test_an_error_about_a_name_with_a_newline_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a\nb").touch()
    assert "not valid JSON" in fails(["timeline", str(tmp_path / "a\nb")], capsys)


def test_a_picture_without_matplotlib_names_the_extra(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = fails(["timeline", str(file), "--png", str(tmp_path / "t.png")], capsys)
    assert "lightning-bytescheduler[plots]" in line


@pytest.mark.parametrize("argv", [["--help"], ["timeline", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert "timeline" in capsys.readouterr().out


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lightning-bytescheduler {__version__}\n"


def test_rounds_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path / "rounds.jsonl"))
    assert main(["rounds", file, "--rounds", "2:4"]) == 0
    assert rows(capsys.readouterr().out)["rounds"] == "2"
    assert main(["rounds", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
