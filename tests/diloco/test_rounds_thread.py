"""The thread of the rounds: what a worker asks for happens at the end of a round, on all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_bytescheduler.diloco.messages import (
    EndRound,
    JoinRounds,
    PassedRoundEnd,
    PseudoGradientArrived,
    RoundEnded,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
    StepReport,
    TrainingOver,
    decode,
    encode,
)
from lightning_bytescheduler.diloco.round_end import FixedSteps, RoundOptions, SampleTarget
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.rounds import Rounds, RoundsThread

OPTIONS = RoundOptions(quorum=0.0, grace=100.0, silent_after=100.0)
WORKERS = ("a", "b")


class Mail:
    """Keeps what each worker was told, and waits for it."""

    def __init__(self) -> None:
        self.told: dict[str, list[Any]] = {name: [] for name in WORKERS}
        self.changed = threading.Condition()

    def post(self, name: str, message: Any) -> None:
        with self.changed:
            self.told[name].append(message)
            self.changed.notify_all()

    def wait(self, name: str, wanted: Callable[[Any], bool]) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: any(map(wanted, self.told[name])), 60.0), self.told
            return next(message for message in self.told[name] if wanted(message))


def hosted(
    target: Any,
    *,
    outer_steps: int | None = None,
    rounds_over: int = 0,
    look: Callable[[bool], object] = lambda halted: None,
) -> tuple[RoundsThread, Mail, list[RoundRecord], list[BaseException]]:
    mail, records, errors = Mail(), [], []  # type: Mail, list[RoundRecord], list[BaseException]
    thread = RoundsThread(
        target,
        replace(OPTIONS, outer_steps=outer_steps),
        workers=WORKERS,
        post=mail.post,
        on_round=records.append,
        look=look,
        on_error=errors.append,
    )
    thread.start(rounds_over)
    return thread, mail, records, errors


def start(thread: RoundsThread, mail: Mail, round: int) -> None:
    for name in WORKERS:
        mail.wait(name, lambda message: isinstance(message, StartRound) and message.round == round)
        thread.post(RoundStarted(worker=name, round=round))


def end(thread: RoundsThread, round: int, samples: int = 4) -> None:
    for name in WORKERS:
        thread.post(SendingPseudoGradient(worker=name, round=round, steps=2, samples=samples))
    for name in WORKERS:
        thread.post(PseudoGradientArrived(worker=name, round=round))


def report(name: str, *, seconds: float, loss: float | None) -> StepReport:
    """Of a first step of four samples."""
    return StepReport(worker=name, round=1, steps=1, samples=4, batch_size=4, seconds=seconds, loss=loss)


def join(thread: RoundsThread) -> None:
    for name in WORKERS:
        thread.post(JoinRounds(worker=name))


def test_rounds_follow_one_another_until_somebody_asks() -> None:
    thread, mail, records, errors = hosted(FixedSteps(2))
    join(thread)
    start(thread, mail, 1)
    thread.post(report("a", seconds=0.5, loss=2.0))
    thread.post(report("b", seconds=1.0, loss=4.0))
    end(thread, 1)
    first = mail.wait("a", lambda message: isinstance(message, RoundEnded))
    assert not first.halts
    assert first.samples == 8
    assert first.metrics == {"loss": 3.0, "samples_per_second": 12.0}
    start(thread, mail, 2)
    thread.post(EndRound(worker="a", round=2, now=True, steps=1, epoch=True))
    for name in WORKERS:  # a worker that is behind goes on until it has taken as many
        assert mail.wait(name, lambda message: isinstance(message, SendAfter) and message.round == 2).steps == 1
    thread.post(StepReport(worker="b", round=2, steps=1, samples=4, batch_size=4, seconds=0.1))
    end(thread, 2)
    second = mail.wait("b", lambda message: isinstance(message, RoundEnded) and message.round == 2)
    assert second.epoch
    assert not second.stop
    assert not any(isinstance(message, StartRound) and message.round == 3 for message in mail.told["a"])
    for name in WORKERS:
        thread.post(PassedRoundEnd(worker=name, round=2))
    start(thread, mail, 3)
    assert thread.stop(60.0)
    assert [record.round for record in records] == [1, 2]
    assert not errors


def test_one_that_stops_after_a_halt_stops_all() -> None:
    thread, mail, _, errors = hosted(SampleTarget(1000))
    join(thread)
    start(thread, mail, 1)
    thread.post(EndRound(worker="a", round=1, now=True, steps=1, validate=True))
    for name in WORKERS:  # however many steps it has taken
        assert mail.wait(name, lambda message: isinstance(message, SendAfter)).steps == 0
    end(thread, 1)
    assert mail.wait("a", lambda message: isinstance(message, RoundEnded)).validate
    thread.post(PassedRoundEnd(worker="a", round=1))
    thread.post(PassedRoundEnd(worker="b", round=1, stop=True))
    for name in WORKERS:
        mail.wait(name, lambda message: isinstance(message, TrainingOver))
    assert thread.stop(60.0)
    assert not errors


def test_all_are_told_at_once_of_a_training_that_was_over_before() -> None:
    """Worker 0 has the thread, and may have ended when another one joins."""
    thread, mail, _, errors = hosted(FixedSteps(2), outer_steps=3, rounds_over=3)
    assert thread.stop(60.0)
    assert mail.told == {name: [TrainingOver(round=3)] for name in WORKERS}
    assert not errors


def test_it_looks_after_all_workers_also_where_none_says_a_word() -> None:
    """One may have died before it has joined."""
    looks = threading.Semaphore(0)
    thread, *_ = hosted(FixedSteps(2), look=lambda halted: looks.release())
    assert all(looks.acquire(timeout=60.0) for _ in range(3))
    assert thread.stop(60.0)


def test_a_scheduler_that_fails_says_so() -> None:
    thread, _, _, errors = hosted(FixedSteps(2))
    thread.post(object())  # type: ignore[arg-type]
    thread.stop(60.0)
    assert len(errors) == 1


@pytest.mark.parametrize("loss", [1e308, None])
def test_means_that_are_not_finite_are_left_out(loss: float | None) -> None:
    """As JSON has none, and a training that diverges is to be told as always."""
    thread, mail, _, errors = hosted(FixedSteps(2))
    join(thread)
    start(thread, mail, 1)
    for name in WORKERS:
        thread.post(report(name, seconds=0.5, loss=loss))
    end(thread, 1)
    ended = mail.wait("a", lambda message: isinstance(message, RoundEnded))
    assert ended.metrics == {"samples_per_second": 16.0}
    assert decode(encode(ended)) == ended
    assert thread.stop(60.0)
    assert not errors


def test_no_round_ends_while_all_stand_still_however_long() -> None:
    """A validation of hours is no silence; and the round that follows begins when it is over."""
    told: list[Any] = []
    options = replace(OPTIONS, silent_after=5.0, start_workers=2)
    rounds = Rounds(
        SampleTarget(8), options, post=lambda name, message: told.append(message), end=lambda _: None, together=WORKERS
    )
    for name in WORKERS:
        rounds.handle(JoinRounds(worker=name), now=0.0)
    for name in WORKERS:
        rounds.handle(RoundStarted(worker=name, round=1), now=0.0)
        report = StepReport(worker=name, round=1, steps=1, samples=4, batch_size=4, seconds=1.0, in_flight=0)
        rounds.handle(report, now=1.0)
    rounds.handle(EndRound(worker="a", round=1, now=True, steps=1, validate=True), now=1.0)
    for name in WORKERS:
        rounds.handle(SendingPseudoGradient(worker=name, round=1, steps=1, samples=4), now=2.0)
        rounds.handle(PseudoGradientArrived(worker=name, round=1), now=2.0)
    ends = [message for message in told if isinstance(message, RoundEnded)]
    assert {(one.round, one.halts) for one in ends} == {(1, True)}
    for hour in range(1, 4):
        rounds.tick(now=3600.0 * hour)
    for name in WORKERS:
        rounds.handle(PassedRoundEnd(worker=name, round=1, stop=False), now=4 * 3600.0)
    rounds.tick(now=4 * 3600.0 + 1.0)
    assert [message for message in told if isinstance(message, RoundEnded)] == ends
    assert [message.round for message in told if isinstance(message, StartRound)] == [1, 1, 2, 2]
