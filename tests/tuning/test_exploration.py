"""Proposals that are computed elsewhere, and a search that fails."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from lightning_bytescheduler.tuning import PLAIN_DDP, TrialEntry, TuningOptions, TuningPoint, exploration
from lightning_bytescheduler.tuning.exploration import Exploration, TimeBudget
from tests.tuning.test_decisions import FASTEST, OPTIMUM, bowl
from tests.tuning.training import SPACE, START, Training, tuning


class Later:
    """An executor that computes when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple] = []

    def submit(self, compute) -> Future:
        future: Future = Future()
        self.waiting.append((future, compute))
        return future

    def work(self) -> None:
        for future, compute in self.waiting:
            future.set_result(compute())
        self.waiting.clear()


def test_training_goes_on_with_the_best_while_a_proposal_is_computed() -> None:
    later = Later()
    seconds = bowl(OPTIMUM)
    training = Training(tuning(submit=later.submit), seconds, outliers=0.0)
    while not later.waiting:
        training.run(1)
    decisions = len(training.decisions)
    training.run(30)
    best = min((e for e in training.tuning.entries if e.outcome == "measured"), key=lambda e: e.step_seconds)
    assert training.point == training.tuning.current == best.point
    assert len(training.decisions) <= decisions + 1
    later.work()
    training.run(2)
    assert training.point not in {entry.point for entry in training.tuning.entries}, "the proposal is in force"
    for _ in range(2000):
        later.work()
        training.run(1)
    assert training.tuning.is_settled
    assert seconds(training.tuning.current) <= 1.05 * FASTEST


def test_a_proposal_that_was_under_way_at_a_crash_is_asked_for_again() -> None:
    later = Later()
    training = Training(tuning(submit=later.submit), bowl(OPTIMUM))
    while not later.waiting:
        training.run(1)
    resumed = tuning(submit=later.submit)
    assert resumed.load_state_dict(json.loads(json.dumps(training.tuning.state_dict())))
    later.waiting.clear()
    training.tuning = resumed
    training.run(1)
    assert len(later.waiting) == 1


def test_a_thread_can_do_it() -> None:
    seconds = bowl(OPTIMUM)
    with ThreadPoolExecutor(1, thread_name_prefix="tuning") as executor:

        def submit(compute) -> Future:
            future = executor.submit(compute)
            wait([future], timeout=60)  # steps without a clock would run away from it
            return future

        training = Training(tuning(submit=submit), seconds, seed=2).run(3000, until_settled=True)
    assert training.tuning.is_settled
    assert seconds(training.tuning.current) <= 1.05 * FASTEST


def test_a_search_that_fails_ends_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args, **kwargs):
        raise ValueError("not positive definite")

    monkeypatch.setattr(exploration, "propose", fail)
    training = Training(tuning(), bowl(OPTIMUM)).run(500)
    assert training.tuning.is_settled
    failed = [entry for entry in training.tuning.entries if entry.kind == "failed"]
    assert [entry.note for entry in failed] == ["ValueError: not positive definite"]
    assert training.tuning.current == training.tuning.entries[0].point


def test_an_executor_that_is_shut_down_ends_the_search() -> None:
    later = Later()
    training = Training(tuning(submit=later.submit), bowl(OPTIMUM))
    while not later.waiting:
        training.run(1)
    later.waiting[0][0].cancel()
    training.run(300)
    assert training.tuning.is_settled
    assert "CancelledError" in next(entry.note for entry in training.tuning.entries if entry.kind == "failed")


def test_plain_ddp_is_measured_again_however_many_points_are_faster_by_a_hair() -> None:
    explored = Exploration(
        SPACE, first=[START], budget=TimeBudget(share=0.02, first_steps=500), options=TuningOptions()
    )
    for number, seconds in enumerate((0.3, 0.3001, 0.3002, 0.3003)):
        explored.take(trial(TuningPoint(credit=2**20 + number, partition_size=97_280), seconds))
    explored.take(trial(PLAIN_DDP, 0.304, outcome="abandoned"))
    assert [entry.step_seconds for entry in explored.contenders()] == [0.3, 0.3001, 0.304]
    explored.take(trial(PLAIN_DDP, 0.3005))
    assert [entry.step_seconds for entry in explored.contenders()] == [0.3005, 0.3, 0.3001], "it wins a tie"


def trial(point: TuningPoint, seconds: float, outcome: str = "measured") -> TrialEntry:
    return TrialEntry(
        search=0,
        kind="search",
        step=0,
        credit=point.credit,
        partition_size=point.partition_size,
        step_seconds=seconds,
        error_seconds=seconds / 1000,
        noise=0.01,
        steps=20,
        outcome=outcome,
        lost_seconds=0.0,
        note="",
    )
