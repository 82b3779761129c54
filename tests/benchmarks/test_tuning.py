"""What is visited, and what is made of it; nothing is measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tuning import _options, fits_of, main, rows_of
from benchmarks.visits import Visits, grid
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, SearchSpace, TuningPoint

A, B = (TuningPoint(credit=size, partition_size=size) for size in (100, 200))


def test_a_grid_has_the_corners_of_its_space() -> None:
    space = SearchSpace(credits=(1_000, 8_000), partitions=(500, 4_000))
    points = grid(space)
    assert len(points) == len(set(points)) == 13  # some meet on the diagonal
    assert {(p.credit, p.partition_size) for p in points} >= {(1_000, 500), (8_000, 500), (8_000, 4_000)}
    assert all(point in space or point.sizes for point in points)


def test_visits_go_there_and_back_and_leave_out_changes() -> None:
    visits = Visits(lambda space, start: [start, B, PLAIN_DDP], turn=3)
    in_force = visits.begin(space=SearchSpace(credits=(1, 9), partitions=(1, 9)), start=A)
    assert in_force == A
    seen = []
    for step in range(1, 80):
        as_decided = in_force == visits.current
        visits.step_took(step, 100.0 if not as_decided else 1.0 + step / 1000, as_decided=as_decided)
        seen.append(in_force)
        if not as_decided:
            in_force = visits.current
    order = [point for index, point in enumerate(seen) if index == 0 or seen[index - 1] != point]
    assert order[:6] == [A, B, PLAIN_DDP, B, A, B]
    assert set(visits.seconds) == {A, B, PLAIN_DDP}
    assert all(len(taken) >= 6 and max(taken) < 2 for taken in visits.seconds.values())
    assert all(1 < median < 2 for median in visits.medians().values())


def tuned(**more: Any) -> dict[str, Any]:
    steps = [[[100, 10], 1.0]] * 400 + [[[200, 20], 0.5]] * 200
    entry = {"search": 0, "step": 30, "step_seconds": 1.0, "error_seconds": 0.1, "note": ""}
    return {
        "fit": {"kind": "tuned"},
        "start": [100, 10],
        "current": [200, 20],
        "settled": True,
        "steps": steps,
        "seconds": [1.0] * 100,
        "entries": [{**entry, "kind": "start", "credit": 100, "partition_size": 10}],
        **more,
    }


def test_tuned_against_the_best_of_a_grid() -> None:
    visited = {"fit": {"kind": "grid"}, "points": [[[100, 10], [1.0]], [[300, 20], [0.4]], [[0, 0], [2.0]]]}
    again = {
        "fit": {"kind": "again"},
        "points": [[[200, 20], [0.55, 9.0, 0.55]], [[300, 20], [0.5]], [[100, 10], [1.0]], [[0, 0], [2.0]]],
    }
    rows = dict(rows_of("grid", [tuned(), visited, again]))
    assert rows["tuned / best of the grid"] == "1.100"
    assert rows["not tuned / best of the grid"] == "2.000"
    assert rows["as DDP / best of the grid"] == "4.000"
    assert rows["trials"] == "1 in 1 search(es), settled"
    assert rows["the first 490 steps / as many at the start"] == f"{(390 + 50) / 490:.4f}"


def test_tuned_against_ddp() -> None:
    ddp, ours = {"fit": {"kind": "ddp"}, "seconds": [2.0] * 50}, tuned(seconds=[2.2] * 50, current=[0, 0])
    rows = dict(rows_of("loopback", [tuned(), ddp, ours, ddp, ours]))
    assert rows["tuned / ddp, median of the rounds"] == "1.100"
    assert rows["point in force"] == "plain DDP; settled after 2 of 2 rounds"


def test_every_kind_has_its_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("grid", "cost", "loopback", "reshape"):
        fits = fits_of(_options([kind, "--steps", "100"]))
        assert any(fit["kind"] == "tuned" for fit in fits)
        assert all(fit["steps"] > 0 for fit in fits)
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "invalid choice" in capsys.readouterr().err
