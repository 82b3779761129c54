from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import lightning_bytescheduler
from lightning_bytescheduler import __version__
from lightning_bytescheduler.__main__ import main
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, COMPUTE, GATE, STEP, Timeline
from lightning_bytescheduler.tuning.record import StepTimeEstimate, TrialEntry, append_entries
from lightning_bytescheduler.tuning.sizes import TuningPoint
from tests.diloco.records import written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three steps of 100 ms; 1.5 MB are sent during 50 ms of each backward and 10 ms of the next forward."""
    with closing(Timeline(tmp_path / "run.json")) as timeline:
        for step in range(3):
            start = step * 0.1
            timeline.span("forward", COMPUTE, start, start + 0.04, lane="training", args={"step": step})
            timeline.span("backward", COMPUTE, start + 0.04, start + 0.1, lane="training", args={"step": step})
            timeline.span(
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


EXPECTED = {
    "steps": "3",
    "sub-tasks": "3",
    "sent": "4.5 MB",
    "communication": "0.180 s",
    "under backward": "0.150 s (83%)",
    "under forward": "0.012 s (7%)",
    "hidden": "90%",
    "training waits": "0.008 s (2.7 ms a step)",
}


def rows(output: str) -> dict[str, str]:
    found = {}
    for line in output.splitlines():
        label, _, value = line.strip().partition("  ")
        found[label.strip()] = value.strip()
    return found


def test_a_summary(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(file)]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == str(file)
    assert EXPECTED.items() <= rows(output).items()


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
    monkeypatch.delitem(sys.modules, main.__module__)  # or runpy would warn that it is there twice
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
    assert "not a JSON object" in fails(["timeline", str(tmp_path / "a\nb")], capsys)


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


@pytest.mark.parametrize(
    "command",
    [
        "timeline",
        "predict",
        "advise",
        "check",
        "tuning",
        "rounds",
        "coordinator",
        "slices",
        "slices make",
        "slices serve",
        "server",
    ],
)
def test_every_help_has_an_example_and_says_defaults(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    output = capsys.readouterr().out
    if " " not in command:
        assert f"\nexample:\n  lightning-bytescheduler {command} " in output


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_fits_terminals(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    text, _, example = capsys.readouterr().out.partition("\nexample:\n")
    assert max(map(len, text.splitlines())) <= int(columns)
    assert len(example.splitlines()) == 1, "an example can be copied"


def test_without_arguments_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    for command in ("timeline", "predict", "check", "tuning", "rounds", "slices"):
        assert f"\n    {command} " in output


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["predct"], "invalid choice: 'predct' (choose from "),
        (["tunning", "x"], "Did you mean 'tuning'?"),
        (["predct"], "Did you mean 'predict'? Try 'lightning-bytescheduler --help'"),
        (["--verison"], "there is no option --verison. Did you mean '--version'?"),
        (["predict", "--key", "3"], "there is no option --key. Try"),
        (["coordinator", "--port", "7077"], "there is no option --port. Did you mean '--bind HOST:PORT'?"),
        (["slices", "serve", "--host=::1", "x"], "there is no option --host. Did you mean '--bind HOST:PORT'?"),
        (["slices", "make", "--seed", "3"], "there is no option --seed. Try"),
        (["tuning", "run", "--pgn", "a.png"], "there is no option --pgn. Did you mean '--png'?"),
        (["tuning", "--pgn=a.png"], "there is no option --pgn. Did you mean '--png'?"),
        (["tuning", "run", "more"], "more is one argument too many. Try"),
        (["slices", "verfy", "x"], "Did you mean 'verify'?"),
        (["rounds"], "For example: lightning-bytescheduler rounds lightning_logs/version_0"),
        (["check", "nope.py"], "command='nope.py' is not allowed: command must be a script that is there"),
        (["check", "--stepz", "5", "--", "train.py"], "Did you mean '--steps'?"),
        (["check", "--steps", "few", "--", "train.py"], "'few' is not a whole number"),
        (["check", "--timeout", "long", "--", "train.py"], "'long' is not a number"),
    ],
)
def test_what_was_meant(argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert meant in fails(argv, capsys)


@pytest.mark.parametrize(
    ("variables", "argv", "says"),
    [
        ({}, [], "Where is the training? Give --master-addr, or set MASTER_ADDR: that of the training's rank 0."),
        ({"MASTER_ADDR": "node0"}, [], "Where is the training? Give --master-port, or set MASTER_PORT"),
        ({}, ["--master-addr", "node0", "--master-port", "70000"], "'node0:70000' is not allowed"),
        ({"MASTER_PORT": "0"}, ["--master-addr", "node0"], "MASTER_PORT=0 is not allowed"),
        ({"MASTER_PORT": "http"}, ["--master-addr", "node0"], "MASTER_ADDR:MASTER_PORT='node0:http' is not allowed"),
    ],
)
def test_a_server_needs_the_trainings_address(
    variables: dict[str, str],
    argv: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert says in fails(["server", *argv], capsys)


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


# What is written.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two versions of a run, the second of which is newer."""
    for version, credit in enumerate((1_000_000, 2_000_000)):
        folder = tmp_path / "lightning_logs" / f"version_{version}"
        folder.mkdir(parents=True)
        append_entries(folder / "tuning.jsonl", [trial(credit)])
        os.utime(folder / "tuning.jsonl", (version, version))
    written(tmp_path / "lightning_logs" / "version_0" / "rounds.jsonl")
    return tmp_path


def trial(credit: int) -> TrialEntry:
    return TrialEntry(
        search=0,
        kind="start",
        step=1,
        point=TuningPoint(credit, 1000),
        time=StepTimeEstimate(0.1, 0.0, 0.0, 9),
    )


@pytest.mark.parametrize(
    "place", [".", "lightning_logs", "lightning_logs/version_1", "lightning_logs/version_1/tuning.jsonl"]
)
def test_a_record_is_found_in_the_folders_of_a_run(run: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tuning", str(run / place)]) == 0
    output, notes = capsys.readouterr()
    assert "version_1" in "".join(output.split())
    assert "2,000,000" in " ".join(output.split())
    others = str(run / "lightning_logs/version_0/tuning.jsonl")
    assert ("the newest of 2" in notes) == (others in notes) == ("version_1" not in place)


def test_rounds_are_found_as_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rounds", str(run)]) == 0
    assert rows(capsys.readouterr().out)["rounds"] == "8"


@pytest.mark.parametrize("command", ["tuning", "rounds"])
def test_what_is_not_there(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"a folder with {command}.jsonl in it" in fails([command, str(tmp_path)], capsys)
    assert "a file or a folder that is there" in fails([command, str(tmp_path / "missing")], capsys)


def test_what_was_written_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = run / "search.png"
    assert main(["tuning", str(run), "--png", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Wrote {picture}"


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("/dev/null/a.png", "a file in a folder, and '/dev/null' is none"),
        ("", "a file path"),
        (".", "a file path, and that is a folder"),
        ("a", "a file name with one of the suffixes"),
        ("a.json", "a file name with one of the suffixes"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_done(
    out: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    line = fails(["tuning", "not-even-there", "--png", out], capsys)
    assert f"--png={out!r} is not allowed" in line
    assert reason in line
    line = fails(["predict", "--profile", "absent", "--workers", "4", "--bandwidth", "1Gbit", "--png", out], capsys)
    assert reason in line
    assert not list(tmp_path.iterdir())


# Terminals and pipes.


def test_an_output_in_the_home_is_written_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``--png=~/plan.png``, where the shell leaves the ``~``."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main(["predict", "--profile", "9M", "--workers", "4", "--bandwidth", "1Gbit", "--png=~/plan.png"]) == 0
    assert f"Wrote {tmp_path / 'home' / 'plan.png'}" in capsys.readouterr().out
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")] == [Path("home/plan.png")]


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_bytescheduler.predicting.command.tables", interrupted)
    assert main(["predict", "--profile", "vgg16", "--workers", "4", "--bandwidth", "1Gbit"]) == 130
    assert capsys.readouterr().err == "lightning-bytescheduler: interrupted\n"


def process(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_bytescheduler", *argv]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=480, check=False, **options)


def test_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = process(["--help"], stdout=writing)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = process([], stdout=full)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


IMPORTED = """
import contextlib, io, json, sys, types

package = types.ModuleType("lightning_bytescheduler")  # without what its __init__ imports
package.__path__ = [sys.argv[1]]
sys.modules["lightning_bytescheduler"] = package
from lightning_bytescheduler.__main__ import main

found = {}
for command in sys.argv[2:]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(command.split())
    found[command] = [name for name in sys.modules if "." not in name], len(sys.modules)
print(json.dumps(found))
"""
HEAVY = {
    *("torch", "lightning", "pytorch_lightning", "numpy", "scipy", "sklearn", "matplotlib", "pandas", "jsonargparse"),
    *("aiohttp", "bayes_opt", "filelock", "fsspec", "platformdirs", "tenacity", "xxhash"),
}


def test_nothing_heavy_is_imported_that_was_not_asked_for(run: Path) -> None:
    """Counted rather than timed."""
    package = str(Path(lightning_bytescheduler.__file__).parent)
    commands = [
        *("--version", "--help", "", "predict --profile 9M --workers 4 --bandwidth 1Gbit", "predict --help"),
        *("predict --network transformer --workers 4 --bandwidth 1Gbps", "check --help"),
        *("tuning --help", f"tuning {run}", f"rounds {run}", "timeline --help"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, package, *commands], capture_output=True, text=True, timeout=480, check=True
    )
    for command, (modules, number) in json.loads(done.stdout.splitlines()[-1]).items():
        assert not HEAVY & set(modules), command
        assert number < 500, command
