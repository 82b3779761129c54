from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco.round_roster import WorkerProgress, means_of


def progress(name: str, *, samples: int, step_s: float | None, loss: float | None = None) -> WorkerProgress:
    """A worker with ten samples in a step."""
    made = WorkerProgress(name=name, heard=0.0, samples=samples, loss=loss)
    if step_s is not None:
        made.step_time.observe(step_s, 10)
    return made


def test_means_are_weighted_by_samples() -> None:
    workers = [
        progress("a", samples=30, step_s=0.5, loss=1.0),
        progress("b", samples=10, step_s=2.0, loss=5.0),
        progress("c", samples=10, step_s=1.0),
    ]
    assert means_of(workers) == {"loss": 2.0, "samples_per_second": pytest.approx(20 + 5 + 10)}
    assert means_of([]) == {}


def test_what_is_not_finite_is_left_out() -> None:
    diverged = progress("a", samples=4, step_s=0.5, loss=1e308)
    assert means_of([diverged, diverged]) == {"samples_per_second": 40.0}


def test_one_that_has_taken_no_step_does_not_count() -> None:
    assert means_of([progress("a", samples=0, step_s=0.5, loss=1.0), progress("b", samples=10, step_s=None)]) == {}
