"""What is compared with what; nothing is measured."""

from __future__ import annotations

from typing import Any

import pytest

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
