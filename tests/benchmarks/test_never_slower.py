"""What is compared with what; nothing is measured."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import never_slower
from benchmarks.never_slower import order, ratios, records_of, windows_of


def fit(contender: str, step_s: float, steps: int = 100) -> dict[str, Any]:
    """One that begins half a second after it is asked for."""
    return {
        "contender": contender,
        "moments": [0.5 + step_s * step for step in range(steps + 1)],
        "ended": 0.5 + step_s * steps,
        "overlapped_steps": 3,
        "plan": "as it is",
    }


def test_turns_are_in_both_orders() -> None:
    assert order("ours", 3) == ["ddp", "ours", "ours", "ddp", "ddp", "ours"]


def test_windows_that_a_fit_shows() -> None:
    assert windows_of(60) == [(0, 60)]
    assert windows_of(500) == [(0, 500), (0, 60), (0, 100), (200, 450)]


def test_neighbours_are_compared() -> None:
    fits = [fit("ddp", 0.1), fit("ours", 0.2), fit("ours", 0.3), fit("ddp", 0.3)]
    assert ratios(fits, (10, 20)) == pytest.approx([2.0, 1.0])
    records = {one.what: one for one in records_of(fits, {"steps": 100})}
    whole = records["a step, 0 to 100"]
    assert whole.medians == pytest.approx({"ddp [ms]": 200.0, "ours [ms]": 250.0})
    assert whole.ratios == pytest.approx({"ours / ddp": 1.5})
    assert whole.seen["overlapped_steps"] == [3, 3]
    assert whole.seen["plan"] == "as it is"
    assert records["before the first step"].medians == {"ddp [ms]": 500.0, "ours [ms]": 500.0}


def test_a_first_pair_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def in_turns(place: Any, work: Any, jobs: list[dict[str, Any]], **_: Any) -> list[list[dict[str, Any]]]:
        asked.extend(jobs)
        return [[fit(job["contender"], 9.0 if number < 2 else 0.1, job["steps"])] for number, job in enumerate(jobs)]

    monkeypatch.setattr(never_slower, "in_turns", in_turns)
    parser = argparse.ArgumentParser()
    never_slower.add_options(parser)
    arguments = ["--steps", "30", "--pairs", "1", "--contender", "bytescheduler, as ddp"]
    ((title, records),) = never_slower.measure(parser.parse_args(arguments))
    assert title == "bytescheduler, as ddp / ddp: 100 layers, 2 ranks, 1 pairs"
    assert [(job["contender"], job["steps"]) for job in asked] == [
        ("ddp", 20),
        ("bytescheduler, as ddp", 20),
        ("ddp", 30),
        ("bytescheduler, as ddp", 30),
    ]
    assert {job["model"] for job in asked} == {"100 layers"}
    assert records[0].medians == pytest.approx({"ddp [ms]": 100.0, "ours [ms]": 100.0})
