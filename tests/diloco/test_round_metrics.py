from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco.round_roster import WorkerProgress, means_of


def progress(name: str, *, samples: int, trained_s: float, loss: float | None = None) -> WorkerProgress:
    return WorkerProgress(name=name, heard=0.0, samples=samples, trained_s=trained_s, loss=loss)


def test_means_are_weighted_by_samples() -> None:
    workers = [
        progress("a", samples=30, trained_s=1.0, loss=1.0),
        progress("b", samples=10, trained_s=2.0, loss=5.0),
        progress("c", samples=10, trained_s=1.0),
    ]
    assert means_of(workers) == {"loss": 2.0, "samples_per_second": pytest.approx(30 + 5 + 10)}
    assert means_of([]) == {}


def test_what_is_not_finite_is_left_out() -> None:
    diverged = progress("a", samples=4, trained_s=0.5, loss=1e308)
    assert means_of([diverged, diverged]) == {"samples_per_second": 16.0}


def test_one_that_has_taken_no_step_does_not_count() -> None:
    assert means_of([progress("a", samples=0, trained_s=0.0, loss=1.0)]) == {}
