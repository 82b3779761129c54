from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
    StepReport,
)
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from lightning_bytescheduler.exceptions import OptionError


def started(step_cap: int | None = None) -> RoundCounter:
    counter = RoundCounter("a")
    counter.receive(StartRound(round=3, step_cap=step_cap))
    assert counter.next_round == 3
    assert counter.start() == RoundStarted(worker="a", round=3)
    return counter


def step(counter: RoundCounter) -> StepReport:
    return counter.step(batch_size=8, seconds=0.5)


def test_reports_are_sums_of_the_round() -> None:
    counter = started()
    step(counter)
    assert step(counter) == StepReport(worker="a", round=3, steps=2, samples=16, batch_size=8, seconds=0.5, in_flight=1)
    assert not counter.due
    assert counter.steps_left is None


def test_the_loss_is_the_mean_of_the_round_by_samples() -> None:
    counter = started()
    assert step(counter).loss is None
    assert counter.step(batch_size=30, seconds=1.0, loss=1.0).loss == 1.0
    assert step(counter).loss == 1.0
    last = counter.step(batch_size=10, seconds=1.0, loss=5.0)
    assert last.loss == 2.0
    counter.send()
    assert step(counter) == StepReport(worker="a", round=4, steps=1, samples=8, batch_size=8, seconds=0.5)


def test_what_is_sent_again_is_counted() -> None:
    """As where the connection was lost."""
    counter = started()
    counter.step(batch_size=30, seconds=3.0, loss=1.0)
    sent = counter.send()
    counter = counter.carried_into(3, sent)
    last = counter.step(batch_size=10, seconds=1.0, loss=5.0)
    assert (last.round, last.steps, last.samples) == (3, 2, 40)


def test_what_is_not_acknowledged_is_in_flight() -> None:
    counter = started()
    assert step(counter).in_flight == 0
    counter.receive(Acknowledge(round=3, reported=1))
    assert step(counter).in_flight == 0
    assert step(counter).in_flight == 1
    counter.receive(SendAfter(round=3, steps=20, reported=3))
    counter.receive(Acknowledge(round=3, reported=2))  # overtaken
    assert step(counter).in_flight == 0


def test_it_counts_to_what_was_scheduled() -> None:
    counter = started()
    step(counter)
    counter.receive(SendAfter(round=3, steps=3))
    assert counter.steps_left == 2
    step(counter)
    assert not counter.due
    step(counter)
    assert counter.due
    assert counter.send() == SendingPseudoGradient(worker="a", round=3, steps=3, samples=24)


def test_now_is_after_the_step_in_progress() -> None:
    counter = started()
    counter.receive(SendAfter(round=3, steps=0))
    step(counter)
    assert counter.due


def test_a_counter_that_comes_too_late_is_due_at_once() -> None:
    counter = started()
    for _ in range(5):
        step(counter)
    counter.receive(SendAfter(round=3, steps=2))
    assert counter.due
    assert counter.steps_left == 0


def test_the_cap_holds_whatever_is_scheduled() -> None:
    counter = started(step_cap=2)
    counter.receive(SendAfter(round=3, steps=9))
    step(counter)
    step(counter)
    assert counter.due


@pytest.mark.parametrize("message", [SendAfter(round=2, steps=0), SendAfter(round=4, steps=0)])
def test_other_rounds_change_nothing(message) -> None:
    counter = started()
    counter.receive(message)
    step(counter)
    assert not counter.due


def test_a_start_that_is_doubled_or_old_changes_nothing() -> None:
    counter = started()
    step(counter)
    counter.receive(StartRound(round=3))
    counter.receive(StartRound(round=1))
    assert counter.next_round is None
    with pytest.raises(RuntimeError, match="announced none"):
        counter.start()


def test_a_round_that_was_missed_is_left_behind() -> None:
    counter = started(step_cap=9)
    step(counter)
    counter.receive(StartRound(round=4))
    counter.start()
    assert (counter.steps, counter.samples, counter.due) == (0, 0, False)


def test_steps_since_sending_count_for_the_next_round() -> None:
    counter = started(step_cap=2)
    step(counter)
    step(counter)
    counter.send()
    assert not counter.due
    assert step(counter) == StepReport(worker="a", round=4, steps=1, samples=8, batch_size=8, seconds=0.5)
    # Late answers to reports of the old round are about that round.
    counter.receive(Acknowledge(round=3, reported=2))
    counter.receive(SendAfter(round=3, steps=0))
    assert step(counter).in_flight == 1
    counter.receive(StartRound(round=4, step_cap=3))
    counter.start()
    assert (counter.steps, counter.due) == (2, False)
    step(counter)
    assert counter.due


def test_what_is_no_step() -> None:
    counter = started()
    with pytest.raises(OptionError, match="batch_size"):
        counter.step(batch_size=0, seconds=1.0)
    with pytest.raises(OptionError, match="seconds"):
        counter.step(batch_size=1, seconds=-1.0)
