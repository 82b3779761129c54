"""What is compared, kept and made of it; nothing is trained."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import diloco
from benchmarks.contenders import contender as contender_of
from benchmarks.diloco import at_loss, at_samples, best, gaps, sooner, times
from benchmarks.diloco_figures import FIGURES, SYNCHRONOUS
from benchmarks.record import Record, read, record
from lightning_bytescheduler import DiLoCoStrategy


def _row(what: str, points: list[tuple[float, int, float]], seed: int = 1, **asked: Any) -> Record:
    seconds, samples, loss = points[-1] if points else (1.0, 1, 1.0)
    values = {"trained [s]": seconds, "samples": samples, "loss": loss, "waited": 0.2}
    return record("diloco race", what, {**asked, "seed": seed}, values, points=points)


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


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    diloco.add_options(parser)
    options = parser.parse_args(arguments)
    options.steps = options.steps or 60
    return options


@pytest.mark.parametrize("figure", list(FIGURES))
def test_every_contender_of_a_figure_can_be_made(figure: str) -> None:
    names = []
    for group in FIGURES[figure](_options(figure)):
        for contender in group:
            names.append(contender["name"])
            assert contender["validate"] > 0
            if "diloco" in contender:
                DiLoCoStrategy(**contender["diloco"])
            else:
                assert contender_of(contender["name"])
    assert len(set(names)) == len(names) > 2
    assert figure != "race" or set(SYNCHRONOUS) < set(names)


@pytest.mark.parametrize("figure", list(FIGURES))
def test_what_was_measured_is_not_measured_again(
    figure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def rows_of(name: str, contenders: Any, ends: Any, *, seed: int, folder: str) -> list[Record]:
        assert len(ends) == len(contenders)
        measured.extend(asked["name"] for asked in contenders)
        points = [(float(second), 20 * second, 5.0 - second / 10) for second in range(1, 40)]
        return [replace(_row(asked["name"], points, seed, **asked), benchmark=name) for asked in contenders]

    monkeypatch.setattr(diloco, "rows_of", rows_of)
    monkeypatch.setattr(diloco.ShapedLink, "available", staticmethod(lambda: (True, "")))
    results, picture = tmp_path / "results.jsonl", tmp_path / "picture.png"
    arguments = ["diloco", figure, "--seeds", "1", "2", "--out", str(results)]
    assert command.main([*arguments, "--png", str(picture)]) == 0
    assert len(set(measured)) == len(measured) / 2
    assert picture.stat().st_size > 1000
    first = read(results)
    assert {one.benchmark for one in first} == {f"diloco {figure}", f"diloco {figure}, all seeds"}
    measured.clear()
    assert command.main(arguments) == 0
    assert not measured
    assert read(results) == first
    assert command.main([*arguments, "--again", "--only", "ddp"]) == 0
    assert all("ddp" in name for name in measured)
    measured.clear()
    assert command.main([*arguments, "--batch", "2"]) == 0
    assert measured
    assert "Traceback" not in capsys.readouterr().out


def test_nothing_is_measured_where_links_cannot_be_shaped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diloco.ShapedLink, "available", staticmethod(lambda: (False, "No root.")))
    assert command.main(["diloco", "race", "--out", str(tmp_path / "results.jsonl")]) == 1
    assert "No root. Nothing was measured." in capsys.readouterr().out
    assert not (tmp_path / "results.jsonl").exists()


def test_the_race_says_how_much_sooner_the_best_are() -> None:
    options = _options("race", "--seeds", "1", "2")
    compared = diloco.conclude(options, ROWS)["how much sooner"]
    assert [one.what for one in compared] == ["N=6", "N=13", "N=20"]
    medians = {one.what: one.medians for one in diloco.conclude(options, ROWS)["medians"]}
    assert medians["ddp"]["s to ddp's loss after 20"] == 20.0
    assert "s to ddp's loss after 20" not in medians["diloco, H=9"]  # not with every seed
