"""What is compared with what; nothing is measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.never_slower import order, ratios, rows_of, windows_of


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
    rows = dict(rows_of(fits, 100))
    assert rows["steps 0 to 100"].startswith("1.500 (1.000 to 2.000), 200.00 and 250.00 ms")
    assert rows["steps overlapped"] == "3, 3"
    assert rows["plan"] == "as it is"
