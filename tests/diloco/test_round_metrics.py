from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco.round_record import RoundMetrics


def test_means_are_weighted_by_samples() -> None:
    metrics = RoundMetrics()
    metrics.add("a", batch_size=30, seconds=1.0, loss=1.0)
    metrics.add("b", batch_size=10, seconds=2.0, loss=5.0)
    metrics.add("b", batch_size=10, seconds=2.0)
    assert metrics.take() == {"loss": 2.0, "samples_per_second": pytest.approx(30 + 5)}
    assert metrics.take() == {}


def test_what_is_not_finite_is_left_out() -> None:
    metrics = RoundMetrics()
    for loss in (float("nan"), 1.0):
        metrics.add("a", batch_size=1, seconds=0.0, loss=loss)
    assert metrics.take() == {"samples_per_second": 0}


def test_a_step_without_samples_does_not_count() -> None:
    metrics = RoundMetrics()
    metrics.add("a", batch_size=0, seconds=1.0, loss=1.0)
    assert metrics.take() == {}
