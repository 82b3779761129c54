"""What rounds do unless somebody says otherwise, and the first steps that must not be taken for usual ones."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from lightning_bytescheduler.diloco.messages import PARAMETER_SERVER, MergeUpdates, Report
from lightning_bytescheduler.diloco.round_options import RoundOptions
from lightning_bytescheduler.diloco.worker_progress import WorkerProgress
from tests.diloco.test_batch_scheduler import Bench


def test_the_defaults_of_rounds() -> None:
    assert asdict(RoundOptions()) == {
        "outer_steps": None,
        "start_workers": 1,
        "restart_workers": 1,
        "step_cap": None,
        "lead_steps": 3,
        "quorum": 0.5,
        "grace": 60.0,
        "silent_after": 10.0,
        "first_step_limit": 600.0,
    }


@pytest.mark.parametrize(("workers", "merged"), [(2, ("a",)), (3, ())])
def test_half_of_the_updates_are_enough(workers: int, merged: tuple[str, ...]) -> None:
    names = ("a", "b", "c")[:workers]
    bench = Bench(start_workers=workers)
    bench.start(*names)
    bench.steps(34 if workers == 3 else 50, *names)
    bench.arrive("a")
    bench.pass_time()
    assert bench.tick()[PARAMETER_SERVER] == [MergeUpdates(round=1, workers=merged)]


def reported(worker: WorkerProgress, *seconds: float) -> None:
    """Reports of one round, in order."""
    worker.tell_to_start(0.0)
    worker.start(0.0)
    for step, took in enumerate(seconds, start=1):
        report = Report(worker="a", round=1, steps=step, samples=8 * step, seconds=took, batch_size=8)
        worker.note(report, float(step))


def test_the_first_step_of_each_round_does_not_count() -> None:
    worker = WorkerProgress(name="a", heard=0.0)
    reported(worker, 30.0, 1.0)
    assert worker.step_time.seconds == 1.0
    reported(worker, 20.0, 1.2)
    assert worker.step_time.seconds == pytest.approx(1.1)
    reported(worker, 25.0)
    assert worker.step_time.seconds == pytest.approx(1.1)


def test_only_the_first_step_does_not_count() -> None:
    worker = WorkerProgress(name="a", heard=0.0)
    reported(worker, 1.0, 3.0)
    assert worker.step_time.seconds == 3.0
