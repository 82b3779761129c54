"""The demo ends with its table and its files, or with one clear message."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.shaped_link import ShapedLink
from examples.demo import __main__ as main
from examples.demo import budget, comparison, launch, options
from examples.demo.report import RankResult, ReportReader, ReportWriter, report_path
from examples.demo.run_spec import ALONE, BYTESCHEDULER, DDP, RunSpec

REPOSITORY = Path(__file__).parents[2]
# The package of this checkout, whether or not one is installed.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "COLUMNS": "120"}

RESULT = RankResult(
    parameters=1_000_000,
    step_seconds=[9.0] * comparison.WARM_UP_STEPS + [0.3, 0.2, 0.4],
    communication_seconds=0.2,
    validation_loss=2.5,
    digests={"a": "1", "b": "2"},
    weights=None,
)


def _run_demo(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", "--tiny", "--steps=4", f"--output={output}", *arguments],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def _check(demo: subprocess.CompletedProcess[str], output: Path) -> None:
    assert demo.returncode == 0, demo.stdout + demo.stderr
    for row in (
        "validation loss",
        "median step",
        "speed-up",
        "communication hidden",
        "identical, bit for bit",
    ):
        assert row in demo.stdout
    for name in ("results.json", "timeline.json", "timeline.png"):
        assert str(output / name) in demo.stdout
    assert (output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((output / "timeline.json").read_text())["traceEvents"]
    results = json.loads((output / "results.json").read_text())
    assert [run["strategy"] for run in results["runs"]] == [DDP, BYTESCHEDULER]
    assert all(run["ranks_agree"] for run in results["runs"])
    assert results["runs"][0]["validation_loss"] == results["runs"][1]["validation_loss"]
    assert results["weights"]["different"] == []


@pytest.mark.slow
def test_demo_over_loopback(tmp_path: Path) -> None:
    available, _ = ShapedLink.available()
    if available:
        pytest.skip("the demo is run over a shaped link here")
    demo = _run_demo(tmp_path, "--no-shaping")
    _check(demo, tmp_path)


def test_a_link_is_not_shaped_if_that_is_asked_for(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    asked = options.parse(["--tiny", "--no-shaping", f"--output={tmp_path}"])
    assert not main._may_shape(asked, console)
    assert "The link is not shaped, as asked." in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.root
def test_demo_over_a_shaped_link(tmp_path: Path) -> None:
    available, reason = ShapedLink.available()
    if not available:
        pytest.skip(reason)
    demo = _run_demo(tmp_path, "--mbit=100")
    _check(demo, tmp_path)
    assert "Two network namespaces stand for two hosts." in demo.stdout
    assert "over a link of 100 Mbit/s" in demo.stdout


@pytest.mark.slow
def test_a_failing_rank_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    spec = RunSpec(strategy="nonsense", folder=tmp_path / "run", steps=2, tiny=True)
    with pytest.raises(
        launch.RunFailed, match=r"(?s)^run: the process ended with exit status 1\..*node0\.log.*nonsense"
    ):
        launch.train([spec], None, lambda step, loss: None)


@pytest.mark.slow
def test_a_silent_run_is_stopped(tmp_path: Path) -> None:
    spec = RunSpec(strategy=ALONE, folder=tmp_path / "run", steps=2, tiny=True)
    started = time.monotonic()
    with pytest.raises(launch.RunFailed, match=r"(?s)No rank reported anything for 0 s, after step 0\..*empty"):
        launch.train([spec], None, lambda step, loss: None, silence_seconds=0.2)
    assert time.monotonic() - started < 120


@pytest.mark.slow
def test_a_rank_ends_when_the_demo_is_gone(tmp_path: Path) -> None:
    spec = RunSpec(strategy=ALONE, folder=tmp_path, steps=1_000_000, tiny=True)
    command = [sys.executable, "-m", "examples.demo.worker", str(spec.save())]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            command, cwd=REPOSITORY, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    assert worker.stdin is not None
    reader = ReportReader(report_path(tmp_path, 0))
    while reader.step == 0:
        assert worker.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
        reader.poll()
    worker.stdin.close()
    assert worker.wait(timeout=120) == 1


def test_report_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "report"
    reader = ReportReader(path)
    assert not reader.poll()
    path.write_text('{"event": "step", "st')
    assert not reader.poll()
    path.write_text('{"event": "step", "step": 3, "loss": 1.5}\n')
    assert reader.poll()
    assert (reader.step, reader.loss, reader.result) == (3, 1.5, None)
    ReportWriter(path).result(RESULT)
    assert reader.poll()
    assert reader.result == RESULT
    assert not reader.poll()


def test_run_specification_survives_its_file(tmp_path: Path) -> None:
    spec = RunSpec(strategy=BYTESCHEDULER, folder=tmp_path / "run", steps=3, timeline=tmp_path / "trace.json")
    assert RunSpec.load(spec.save()) == spec
    assert RunSpec.load(replace(spec, timeline=None).save()).timeline is None


@pytest.mark.parametrize(
    ("compute", "hidden"),
    [(0.3, 1.0), (0.2, 0.5), (0.1, 0.0), (0.07, 0.0), (0.4, 1.0), (3.0, None), (0.05, None)],
)
def test_hidden_share_is_what_a_step_does_not_show(compute: float, hidden: float | None) -> None:
    row = comparison.outcome(DDP, [RESULT, RESULT], compute, None)
    assert row.step_seconds == 0.3
    assert row.hidden_estimate == (None if hidden is None else pytest.approx(hidden))


def test_ranks_that_disagree_are_noticed() -> None:
    other = replace(RESULT, digests={"a": "1", "b": "3"})
    assert comparison.outcome(DDP, [RESULT, RESULT], 0.1, None).ranks_agree
    assert not comparison.outcome(DDP, [RESULT, other], 0.1, None).ranks_agree


def test_weights_that_differ_are_measured(tmp_path: Path) -> None:
    assert comparison.weight_difference(RESULT, RESULT).different == []
    for name, value in (("left", 1.0), ("right", 1.25)):
        torch.save({"a": torch.zeros(2), "b": torch.tensor([0.0, value])}, tmp_path / name)
    left = replace(RESULT, weights=str(tmp_path / "left"))
    right = replace(RESULT, weights=str(tmp_path / "right"), digests={"a": "1", "b": "3"})
    difference = comparison.weight_difference(left, right)
    assert (difference.tensors, difference.different, difference.maximum) == (2, ["b"], 0.25)


def test_budget_balances_communication_with_computing() -> None:
    mbit = budget.balanced_mbit([RESULT])
    # 4 MB in each direction in 0.3 s, and a little more for headers; two digits are kept.
    assert mbit == 110.0
    assert budget.communication_seconds([RESULT], mbit) == pytest.approx(0.3, rel=0.05)
    assert budget.affordable_steps([RESULT], 0.3) == budget.MOST_STEPS
    assert budget.affordable_steps([RESULT], 1.7) == 25
    assert budget.affordable_steps([RESULT], 1000.0) == 12


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "1"], "argument --steps: must be at least 2, not 1"),
        (["--steps", "many"], "argument --steps: 'many' is not a number"),
        (["--mbit", "0"], "argument --mbit: must be at least 10.0, not 0"),
    ],
)
def test_wrong_options_are_explained(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(arguments)
    assert complaint in capsys.readouterr().err
