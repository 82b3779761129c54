"""A measurement on loopback, from end to end; and one whose ranks fail."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.measure import Measured, MeasurementFailed, _on_own_processors, measure
from benchmarks.report import Cell, draw, prediction_errors, save, show

CONTENDERS = ["alone", "ddp", "bytescheduler, as ddp"]


@pytest.mark.slow
def test_contenders_are_measured_in_turn() -> None:
    turns: list[str] = []
    small = {"emulated": {"network": "uniform", "ratio": 1.0, "workers": 2, "mbit": 8000.0, "megabytes": 0.5}}
    found = measure(small, CONTENDERS, workers=2, mbit=None, steps=2, rounds=2, on_contender=turns.append)
    assert turns == CONTENDERS * 2
    assert all(len(found[name].seconds) == 4 and len(found[name].round_medians) == 2 for name in CONTENDERS)


def test_what_was_measured_is_shown_kept_and_drawn(tmp_path: Path) -> None:
    found = {
        name: Measured(seconds=[0.1 * n, 0.2 * n], round_medians=[0.1 * n, 0.2 * n])
        for n, name in enumerate(CONTENDERS, 1)
    }
    cell = Cell(
        name="uniform",
        ratio=1.0,
        network="uniform",
        workers=2,
        communication_seconds=0.1,
        bounds={"any order": 0.1, "barrier": 0.2, "norm clipping": 0.1},
        measured=found,
        predicted={"ddp": 1.1 * found["ddp"].median},
    )
    assert cell.prediction_error("ddp") == pytest.approx(0.1)
    assert prediction_errors([cell]) == [pytest.approx(0.1)]
    assert cell.best_ddp == "ddp"
    console = Console(record=True, width=100)
    show(console, cell)
    shown = console.export_text()
    assert "× bound" in shown
    assert "+10.0%" in shown
    save(tmp_path / "result.json", [cell])
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept["cells"][0]["measured"]["ddp"]["seconds"] == found["ddp"].seconds
    assert kept["machine"]["torch"]
    draw(tmp_path / "result.png", [cell])
    assert (tmp_path / "result.png").stat().st_size > 1000


def test_hosts_have_processors_of_their_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 7})
    monkeypatch.setattr(shutil, "which", lambda _: "taskset")
    assert _on_own_processors(["run"], 1, 2) == ["taskset", "--cpu-list", "2,5", "run"]
    assert _on_own_processors(["run"], 0, 6) == ["run"]


@pytest.mark.slow
def test_ranks_that_fail_are_an_error() -> None:
    with pytest.raises(MeasurementFailed, match="ended with codes"):
        measure({"model": "none"}, ["ddp"], workers=2, mbit=None, steps=1, rounds=1, on_contender=lambda _: None)
