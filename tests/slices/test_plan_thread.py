"""The tracker is asked from a separate thread: the training makes no call, and all promises hold."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_bytescheduler.slices.epoch_plan import EpochPlan, ReadReport, SliceBatch
from lightning_bytescheduler.slices.tracker import ReportProgress
from lightning_bytescheduler.slices.training import TrackedTraining
from tests.slices.tracker_workers import make_tracker, tracked_training


class SlowTracker:
    """A tracker that takes its time, and notes on which thread it was called, and what was begun when."""

    def __init__(self, tracker: Any, seconds: float = 0.05) -> None:
        self.tracker = tracker
        self.seconds = seconds
        self.threads: set[str] = set()
        self.calls: Counter[type] = Counter()
        self.begun: set[int] = set()

    def answer(self, message: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.calls[type(message)] += 1
        time.sleep(self.seconds)
        reply = self.tracker.answer(message)
        if isinstance(message, ReportProgress) and reply.accepted:
            self.begun.add(message.grant)
        return reply


@pytest.fixture
def made() -> Iterator[list[TrackedTraining]]:
    plans: list[TrackedTraining] = []
    yield plans
    for plan in plans:
        assert plan.halt()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler-slice")]


def plan_of(
    made: list[TrackedTraining], client: Any, slices: Any, *, worker: int = 0, batch_size: int = 1
) -> TrackedTraining:
    made.append(tracked_training(client, slices, worker=worker, batch_sizes=(batch_size,)))
    return made[-1]


def train(plan: TrackedTraining, batches: Iterator[SliceBatch], trained: Counter[Any], most: int = 1000) -> None:
    for batch in batches:
        plan.received(ReadReport({}))
        trained.update((run.slice_index, sample) for run in batch.runs for sample in range(run.start, run.stop))
        plan.trained()
        most -= 1
        if not most:
            return


def test_the_training_thread_makes_no_call(made: list[TrackedTraining]) -> None:
    tracker = make_tracker([6, 5, 4])
    slow = SlowTracker(tracker)
    plan = plan_of(made, slow, tuple(tracker.catalogue), batch_size=1)
    trained: Counter[Any] = Counter()
    train(plan, iter(plan), trained)
    plan.settle()
    assert trained == Counter((index, sample) for index, count in enumerate([6, 5, 4]) for sample in range(count))
    assert slow.threads == {"bytescheduler-slice-plan"}
    assert tracker.report().trained == 15
    # What was trained on while a call was under way is reported together.
    assert len(slow.begun) == 3
    assert slow.calls[ReportProgress] < 15 + 3  # of batches, and before the first of a slice


def test_a_checkpoint_where_the_tracker_is_not_has_the_epoch_that_comes_next(made: list[TrackedTraining]) -> None:
    tracker = make_tracker([4, 3])
    slices = tuple(tracker.catalogue)
    plan = plan_of(made, tracker, slices)
    train(plan, iter(plan), Counter(), most=2)
    run = plan.state_dict()["run"]
    assert plan.state_dict() == {"run": run, "epoch": 0}
    train(plan, iter(plan), Counter())
    saved = plan.state_dict()
    assert saved == {"run": run, "epoch": 1}
    assert plan.halt()  # the training is over here
    assert plan.state_dict() == saved
    plan.close()
    assert plan.state_dict() == {}  # a further fit goes on where the tracker is
    EpochPlan(tracker.catalogue, batch_sizes=(1,)).load_state_dict(saved)  # has a position of its own


def test_a_checkpoint_before_the_first_batch_keeps_the_epoch_that_it_began_with(made: list[TrackedTraining]) -> None:
    tracker = make_tracker([4, 3])
    plan = plan_of(made, tracker, tuple(tracker.catalogue))
    saved = {"run": "another", "epoch": 5}
    plan.close()
    plan.load_state_dict(saved)
    assert plan.state_dict() == saved
    plan.open(None)
    assert plan.state_dict() == saved
    batches = iter(plan)
    next(batches)
    assert plan.state_dict()["epoch"] == 0  # of the tracker that there is


def test_a_batch_is_there_only_when_its_slices_are_begun(made: list[TrackedTraining]) -> None:
    tracker = make_tracker([2, 2, 2, 2])
    slow = SlowTracker(tracker, 0.01)
    plan = plan_of(made, slow, tuple(tracker.catalogue), batch_size=2)
    for taken, _ in enumerate(plan, start=1):
        assert len(slow.begun) >= taken
        plan.received(ReadReport({}))
        plan.trained()


def test_what_was_made_ahead_and_not_taken_is_not_reported(made: list[TrackedTraining]) -> None:
    tracker = make_tracker([8])
    plan = plan_of(made, tracker, tuple(tracker.catalogue), batch_size=1)
    trained: Counter[Any] = Counter()
    train(plan, iter(plan), trained, most=3)
    plan.trained()  # nothing was taken that is not trained on
    plan.close()
    assert tracker.report().trained == 3
    plan.open(None)
    train(plan, iter(plan), trained)
    plan.settle()
    assert trained == Counter((0, sample) for sample in range(8))


def test_what_a_tracker_raises_is_raised_where_batches_are_taken(made: list[TrackedTraining]) -> None:
    class Broken:
        def answer(self, message: Any) -> Any:
            raise ConnectionError("on purpose")

    tracker = make_tracker([3])
    plan = plan_of(made, Broken(), tuple(tracker.catalogue), batch_size=1)
    with pytest.raises(ConnectionError, match="on purpose"):
        next(iter(plan))
    plan.close()  # does not hang


def test_a_worker_that_waits_for_others_can_be_stopped(made: list[TrackedTraining]) -> None:
    tracker = make_tracker([3])
    slices = tuple(tracker.catalogue)
    holder = plan_of(made, tracker, slices, worker=0, batch_size=1)
    next(iter(holder))
    idle = plan_of(made, tracker, slices, worker=1, batch_size=1)
    trained: list[Counter[Any]] = [Counter(), Counter()]
    for each in trained:
        train(idle, iter(idle), each)
    assert [len(each) for each in trained] == [0, 3]  # of the next epoch
    timer = threading.Timer(0.3, idle.halt)
    timer.start()
    assert list(idle) == []
    timer.join()
