from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_bytescheduler.gradients.early_steps import EarlySteps

LONG = 10.0


class Buckets:
    """A number of buckets that have arrived."""

    def __init__(self) -> None:
        self.arrived = 0
        self.stepped = 0
        self.broken = False
        self.seen = threading.Condition()

    def step_one(self) -> bool:
        with self.seen:
            if self.broken:
                raise RuntimeError("the step broke off")
            if not self.arrived:
                return False
            self.arrived -= 1
            self.stepped += 1
            self.seen.notify_all()
            return True

    def arrive(self, count: int, steps: EarlySteps) -> None:
        with self.seen:
            self.arrived += count
        steps.wake()


@pytest.fixture
def buckets() -> Buckets:
    return Buckets()


@pytest.fixture
def steps(buckets: Buckets) -> Iterator[EarlySteps]:
    thread = EarlySteps(buckets.step_one)
    yield thread
    assert thread.stop(LONG)


def test_all_that_has_arrived_is_stepped(buckets: Buckets, steps: EarlySteps) -> None:
    for total in (3, 5):
        buckets.arrive(total - buckets.stepped, steps)
        with buckets.seen:
            assert buckets.seen.wait_for(lambda total=total: buckets.stepped == total, LONG)


def test_it_ends_when_told_to_and_again(buckets: Buckets) -> None:
    thread = EarlySteps(buckets.step_one)
    assert thread.stop(LONG)
    assert thread.stop(LONG)
    assert not [t for t in threading.enumerate() if t.name == "bytescheduler-steps"]


def test_a_step_that_breaks_off_ends_the_thread_and_nothing_else(buckets: Buckets) -> None:
    buckets.broken = True
    thread = EarlySteps(buckets.step_one)
    thread.wake()
    thread._thread.join(LONG)
    assert not thread._thread.is_alive()
    thread.wake()
    assert thread.stop(LONG)
