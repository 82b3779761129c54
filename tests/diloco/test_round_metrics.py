from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco.round_record import RoundMetrics


def test_means_are_weighted_by_samples() -> None:
    metrics = RoundMetrics()
    metrics.add("a", batch_size=30, seconds=1.0, metrics={"loss": 1.0, "accuracy": 0.5})
    metrics.add("b", batch_size=10, seconds=2.0, metrics={"loss": 5.0, "accuracy": None})
    metrics.add("b", batch_size=10, seconds=2.0)
    assert metrics.take() == {"loss": 2.0, "accuracy": 0.5, "samples_per_second": pytest.approx(30 + 5)}
    assert metrics.take() == {}


def test_what_is_not_finite_is_left_out() -> None:
    metrics = RoundMetrics()
    metrics.add("a", batch_size=1, seconds=0.0, metrics={"loss": float("nan"), "norm": 1e308})
    metrics.add("a", batch_size=1, seconds=0.0, metrics={"loss": 1.0, "norm": 1e308})
    assert metrics.take() == {"samples_per_second": 0}


def test_a_step_without_samples_does_not_count_and_names_are_bounded() -> None:
    metrics = RoundMetrics()
    metrics.add("a", batch_size=0, seconds=1.0, metrics={"loss": 1.0})
    assert metrics.take() == {}
    for number in range(1000):
        metrics.add("a", batch_size=1, seconds=1.0, metrics={f"m{number}": 1.0})
    assert len(metrics.take()) == 257
