"""What is compared, kept and made of it; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import diloco
from benchmarks.contenders import CONTENDERS
from benchmarks.diloco_figures import FIGURES, SYNCHRONOUS
from benchmarks.diloco_rank import SIZES
from benchmarks.diloco_results import Kept, at_loss, at_samples
from benchmarks.diloco_summary import best, gaps, slowed, sooner, times
from lightning_bytescheduler import DiLoCoStrategy


def _row(name: str, points: list[tuple[float, int, float]], seed: int = 1) -> dict[str, Any]:
    return {
        "seed": seed,
        "name": name,
        "asked": {},
        "points": points,
        "step_s": [0.05, 0.15],
        "waited_in_rounds": [0.1, 0.2],
    }


ROWS = [
    _row("ddp", [(10.0, 20, 4.0), (20.0, 40, 3.0)]),
    _row("ddp", [(10.0, 20, 4.2), (20.0, 40, 3.4)], seed=2),
    _row("diloco, H=8", [(2.0, 40, 3.5), (4.0, 80, 3.0)]),
    _row("diloco, H=8", [(2.0, 40, 3.5), (4.0, 80, 3.0)], seed=2),
    _row("diloco, H=9", [(1.0, 40, 3.5), (2.0, 80, 3.1)], seed=2),
    _row("diloco, H=9", [(1.0, 40, 3.5), (2.0, 80, 3.1)]),
    _row("diloco, H=7", [(1.0, 40, 2.5)]),  # with one seed only
]


def test_time_and_loss_on_a_curve() -> None:
    points = [(1.0, 10, 4.0), (2.0, 20, 3.0), (3.0, 30, 3.2)]
    assert at_loss(points, 3.1) == 2.0
    assert at_loss(points, 2.9) is None
    assert at_samples(points, 9) is None
    assert at_samples(points, 10) == 4.0
    assert at_samples(points, 15) == pytest.approx(3.5)
    assert at_samples(points, 31) is None


def test_the_best_gets_there_with_every_seed() -> None:
    taken = times(ROWS, 40)
    assert taken["ddp"] == {1: 20.0, 2: 20.0}
    assert taken["diloco, H=9"] == {1: None, 2: 2.0}
    assert best(taken, "diloco") == "diloco, H=8"
    assert best(taken, "diloco by pace") is None
    assert sooner(taken, "diloco, H=8", "ddp") == [5.0, 5.0]
    assert sooner(taken, None, "ddp") == []
    assert sooner({"a": {2: 1.0, 1: 2.0}, "b": {1: 6.0, 2: 4.0, 3: 9.0}}, "a", "b") == [3.0, 4.0]


def test_gaps_are_between_runs_of_one_seed() -> None:
    found = gaps(ROWS, 40)
    assert found["diloco, H=8"] == pytest.approx([0.5, 0.1])
    assert "ddp" not in found


def test_a_busy_machine_is_noticed() -> None:
    row = {**_row("diloco, H=8", []), "asked": {"diloco": {}, "step_s": [0.05, 0.15]}}
    assert not slowed(row)
    assert slowed({**row, "step_s": [0.05, 0.19]})
    assert not slowed({**row, "step_s": [0.05, None]})
    assert not slowed({**row, "asked": {"step_s": [0.05, 0.05]}})  # communicates in every step


@pytest.mark.parametrize("figure", list(FIGURES))
def test_every_contender_of_a_figure_can_be_made(figure: str) -> None:
    names = []
    for group in FIGURES[figure](diloco._options([figure])):
        for contender in group:
            names.append(contender["name"])
            assert contender.get("size", "5M") in SIZES
            assert contender["validate"] > 0
            if "diloco" in contender:
                DiLoCoStrategy(**contender["diloco"])
            else:
                assert contender["name"] in CONTENDERS
    assert len(set(names)) == len(names) > 2
    assert figure != "race" or set(SYNCHRONOUS) < set(names)


@pytest.mark.parametrize("figure", list(FIGURES))
def test_what_was_measured_is_not_measured_again(
    figure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(contenders: Any, ends: Any, *, seed: int, folder: str) -> list[dict[str, Any]]:
        assert len(ends) == len(contenders)
        measured.extend(asked["name"] for asked in contenders)
        points = [(float(second), 20 * second, 5.0 - second / 10) for second in range(1, 40)]
        return [{**_row(asked["name"], points, seed), "asked": asked} for asked in contenders]

    monkeypatch.setattr(diloco, "measure", measure)
    monkeypatch.setattr(diloco.ShapedLink, "available", staticmethod(lambda: (True, "")))
    results = tmp_path / "results.json"
    arguments = [figure, "--seeds", "1", "2", "--results", str(results)]
    assert diloco.main(arguments) == 0
    assert len(set(measured)) == len(measured) / 2
    first = json.loads(results.read_text())
    assert first["machine"]["torch"]
    assert first[figure]["summary"]
    measured.clear()
    assert diloco.main(arguments) == 0
    assert not measured
    assert diloco.main([*arguments, "--again", "--only", "ddp"]) == 0
    assert all("ddp" in name for name in measured)
    measured.clear()
    assert diloco.main([*arguments, "--batch", "2"]) == 0
    assert bool(measured) == (figure != "stall")
    assert "Traceback" not in capsys.readouterr().out


def test_nothing_is_measured_where_links_cannot_be_shaped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diloco.ShapedLink, "available", staticmethod(lambda: (False, "No root.")))
    assert diloco.main(["race", "--results", str(tmp_path / "results.json")]) == 1
    assert "No root. Nothing was measured." in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()


def test_rows_survive_and_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Kept(path, "race").add(_row("ddp", [(1.0, 2, 3.0)]))
    Kept(path, "gap").add(_row("ddp", [(5.0, 2, 3.0)]))
    Kept(path, "race").add(_row("ddp", [(2.0, 2, 3.0)]))
    (row,) = Kept(path, "race").rows
    assert row["points"] == [[2.0, 2, 3.0]]
    assert Kept(path, "gap").find(1, "ddp") is not None
    assert Kept(path, "gap").find(2, "ddp") is None
