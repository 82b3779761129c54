"""The rounds message by message; what comes of it with many workers is in test_rounds.py."""

from __future__ import annotations

import random

import pytest

from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    EndRound,
    JoinRounds,
    LeaveRounds,
    PseudoGradientArrived,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
    StepReport,
    TrainingOver,
)
from lightning_bytescheduler.diloco.round_end import FastestSteps, FixedSteps, RoundOptions, RoundTarget, SampleTarget
from lightning_bytescheduler.diloco.rounds import Rounds
from lightning_bytescheduler.exceptions import OptionError
from tests.diloco.bench import MERGED, Bench
from tests.diloco.simulated_run import Machine, simulate


def test_a_round_from_start_to_end() -> None:
    """Two workers of one sample a second: a hundred samples are there after 50 s. Three steps before that, the end is
    decided."""
    bench = Bench(start_workers=2)
    assert bench.say(JoinRounds(worker="a")) == {}
    assert bench.say(JoinRounds(worker="b")) == {"a": [StartRound(round=1)], "b": [StartRound(round=1)]}
    for name in "ab":
        assert bench.say(RoundStarted(worker=name, round=1)) == {name: [Acknowledge(round=1, reported=0)]}
    assert bench.steps(46, "a", "b") == {"b": [Acknowledge(round=1, reported=46)]}
    assert bench.scheduler.left == 8
    bench.now += 1.0
    decided = bench.say(bench.report("a", 47))
    assert decided["a"][-1] == SendAfter(round=1, steps=50, reported=47)
    assert decided["b"] == [SendAfter(round=1, steps=50, reported=46)]
    assert MERGED not in decided
    assert bench.scheduler._deadline == bench.now + 2 * 3.0 + 5.0
    assert bench.say(bench.report("b", 47)) == {"b": [SendAfter(round=1, steps=50, reported=47)]}
    bench.steps(3, "a", "b", first=48)
    assert bench.arrive("a") == {"a": [Acknowledge(round=1, reported=50)]}
    ended = bench.arrive("b")
    assert ended[MERGED] == [(1, ("a", "b"))]
    assert ended["a"] == [StartRound(round=2)]
    assert (bench.samples, bench.scheduler.round) == (100, 2)
    (record,) = bench.records
    assert (record.round, record.start, record.decided, record.end, record.samples) == (1, 0.0, 47.0, 50.0, 100)
    assert [worker.spans for worker in record.workers] == [(("working", 0.0, 50.0),)] * 2


def test_doubled_old_and_overtaken_messages_change_nothing() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(5, "a")
    before = (bench.scheduler.round - bench.scheduler.is_open), bench.scheduler.left
    for message in (
        bench.report("a", 5),
        bench.report("a", 2),
        bench.report("a", 90, round=7),
        bench.report("a", 90, round=0),
        RoundStarted(worker="a", round=1),
        RoundStarted(worker="a", round=0),
        PseudoGradientArrived(worker="a", round=0),
        SendingPseudoGradient(worker="a", round=0, steps=99, samples=99),
        JoinRounds(worker="a"),
        LeaveRounds(worker="unknown"),
    ):
        bench.say(message)
        assert ((bench.scheduler.round - bench.scheduler.is_open), bench.scheduler.left) == before, message
    assert bench.say(bench.report("a", 2)) == {"a": [Acknowledge(round=1, reported=5)]}


def test_a_lost_report_is_made_up_for() -> None:
    bench = Bench()
    bench.start("a")
    bench.now = 10.0
    bench.say(bench.report("a", 10))
    assert bench.scheduler.left == 90


def test_a_report_stands_in_for_a_lost_start() -> None:
    bench = Bench()
    bench.say(JoinRounds(worker="a"))
    assert bench.steps(1, "a") == {"a": [Acknowledge(round=1, reported=1)]}


def test_an_arrival_stands_in_for_what_came_before() -> None:
    bench = Bench(outer_steps=1)
    bench.start("a")
    bench.steps(98, "a")
    assert bench.say(PseudoGradientArrived(worker="a", round=1))[MERGED] == [(1, ("a",))]
    assert bench.samples == 98


def test_the_last_word_on_samples_is_the_senders() -> None:
    bench = Bench(outer_steps=1)
    bench.start("a")
    bench.steps(98, "a")
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=100, samples=100))
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=0, samples=0))  # not its last word
    bench.say(PseudoGradientArrived(worker="a", round=1))
    assert bench.samples == 100


def test_a_target_that_was_reached_unseen_ends_the_round_now() -> None:
    """The speed of b is not known yet."""
    bench = Bench(start_workers=2)
    bench.start("a", "b")
    told = bench.steps(2, "a", batch_size=50)
    assert told["a"][-1] == SendAfter(round=1, steps=0, reported=2)
    assert told["b"][-1] == SendAfter(round=1, steps=0)
    assert bench.say(bench.report("b", 1)) == {"b": [SendAfter(round=1, steps=0, reported=1)]}


def test_one_who_starts_late_is_told_when_it_starts() -> None:
    bench = Bench(start_workers=2)
    for name in "ab":
        bench.say(JoinRounds(worker=name))
    bench.say(RoundStarted(worker="a", round=1))
    bench.steps(2, "a", batch_size=50)
    assert bench.say(RoundStarted(worker="b", round=1)) == {"b": [SendAfter(round=1, steps=0)]}


def test_the_end_of_the_run() -> None:
    bench = Bench(outer_steps=1)
    bench.start("a")
    bench.say(JoinRounds(worker="late"))
    bench.steps(100, "a")
    ended = bench.arrive("a")
    assert ended["a"][-1] == TrainingOver(round=1)
    assert ended["late"] == [TrainingOver(round=1)]
    assert bench.scheduler.finished
    assert bench.scheduler.next_tick is None
    assert bench.say(bench.report("a", 9)) == {"a": [TrainingOver(round=1)]}
    assert bench.say(JoinRounds(worker="new")) == {"new": [TrainingOver(round=1)]}
    assert bench.tick() == {}


def test_the_cap_is_told_at_the_start() -> None:
    assert Bench(FastestSteps(5)).say(JoinRounds(worker="a")) == {"a": [StartRound(round=1, step_cap=5)]}


def test_a_joiner_begins_in_the_round_that_is_on() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(40, "a")
    assert bench.say(JoinRounds(worker="b")) == {"b": [StartRound(round=1)]}
    assert bench.say(bench.report("b", 3)) == {"b": [Acknowledge(round=1, reported=3)]}
    assert bench.scheduler.left == 57
    for step in range(4, 32):
        bench.now += 1.0
        bench.say(bench.report("a", 37 + step))
        bench.say(bench.report("b", step))
    bench.arrive("a")
    bench.arrive("b")
    assert bench.records[0].merged == ("a", "b")


def test_a_joiner_waits_for_the_next_round_if_the_end_is_decided() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(97, "a")
    assert bench.say(JoinRounds(worker="b")) == {}
    assert bench.say(bench.report("b", 3)) == {}
    bench.steps(3, "a", first=98)
    assert bench.arrive("a")["b"] == [StartRound(round=2)]


@pytest.mark.parametrize("target", [SampleTarget(100), FastestSteps(100)])
def test_no_worker_waits_for_the_first_step_of_one_that_has_begun_late(target: RoundTarget) -> None:
    bench = Bench(target)
    bench.start("a")
    bench.steps(20, "a")
    bench.say(JoinRounds(worker="b"))
    bench.say(RoundStarted(worker="b", round=1))
    bench.steps(77, "a", first=21)
    assert bench.scheduler.collecting
    bench.steps(3, "a", first=98)
    assert bench.arrive("a")["b"] == [StartRound(round=2, step_cap=target.step_cap)]
    assert bench.records[0].merged == ("a",)


def test_the_first_step_of_one_who_has_begun_late_is_not_counted_on() -> None:
    bench = Bench(start_workers=2)
    bench.start("a", "b")
    bench.steps(20, "a", "b")
    bench.say(LeaveRounds(worker="b"))  # its step times stay known
    bench.steps(70, "a", first=21)
    assert bench.say(JoinRounds(worker="b")) == {"b": [StartRound(round=1)]}
    bench.say(RoundStarted(worker="b", round=1))
    step = 91
    while not bench.scheduler.collecting:
        bench.steps(1, "a", first=step)
        step += 1
    assert bench.scheduler.workers["a"].send_after == 100
    assert not bench.scheduler.workers["b"].is_member


def test_where_all_take_equally_many_steps_a_joiner_waits_for_the_next_round() -> None:
    bench = Bench(FixedSteps(10))
    bench.start("a")
    assert bench.say(JoinRounds(worker="b")) == {}


def test_a_worker_that_was_started_anew_has_lost_its_steps() -> None:
    bench = Bench(start_workers=2)
    bench.start("a", "b")
    bench.steps(5, "a", "b")
    assert bench.scheduler.left == 90
    assert bench.say(JoinRounds(worker="b", session=2)) == {"b": [StartRound(round=1)]}
    assert bench.scheduler.left == 95
    bench.say(JoinRounds(worker="b", session=2))
    assert bench.scheduler.left == 95


def test_one_who_has_left_does_not_come_back_with_an_old_report() -> None:
    bench = Bench()
    bench.start("a")
    bench.say(JoinRounds(worker="b"))
    bench.say(LeaveRounds(worker="b"))
    assert bench.say(bench.report("b", 3)) == {}
    assert set(bench.scheduler.workers) == {"a"}
    assert bench.say(JoinRounds(worker="b")) == {"b": [StartRound(round=1)]}


def test_when_the_last_one_leaves_and_has_sent_nothing_the_next_joiner_begins_the_round_anew() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(5, "a")
    assert bench.say(LeaveRounds(worker="a")) == {}
    assert bench.scheduler.next_tick is None
    assert bench.say(JoinRounds(worker="b")) == {"b": [StartRound(round=1)]}
    assert bench.scheduler.left == 100


def test_what_is_said_while_a_round_is_merged_is_answered_when_the_next_one_begins() -> None:
    told: list[tuple[str, object]] = []
    options = RoundOptions(outer_steps=2)
    rounds = Rounds(FixedSteps(1), options, post=lambda *given: told.append(given), end=lambda _: None)
    for round in (1, 2):
        rounds.handle(JoinRounds(worker="a", session=1), now=0.0)
        rounds.handle(StepReport(worker="a", round=round, steps=1, samples=1, batch_size=1, seconds=1.0), now=1.0)
        rounds.handle(PseudoGradientArrived(worker="a", round=round), now=1.0)
        del told[:]
        rounds.handle(JoinRounds(worker="late"), now=2.0)
        rounds.tick(now=1000.0)
        assert rounds.stand_still
        assert not told
        rounds.go_on()
        said = StartRound(round=2, step_cap=1) if round == 1 else TrainingOver(round=2)
        assert sorted(told, key=str) == [("a", said), ("late", said)]
        rounds.handle(LeaveRounds(worker="late"), now=1000.0)
    assert rounds.finished


@pytest.mark.parametrize(("target", "after"), [(SampleTarget(100), 0), (FixedSteps(50), 20)])
def test_a_worker_may_ask_for_the_end_of_a_round(target: RoundTarget, after: int) -> None:
    """Where all take equally many steps, the others take as many as that one."""
    bench = Bench(target, start_workers=2, outer_steps=1)
    bench.start("a", "b")
    bench.steps(5, "b")
    bench.steps(20, "a")
    told = bench.say(EndRound(worker="a", round=1, now=True, steps=20))
    assert told["b"] == [SendAfter(round=1, steps=after, reported=5)]
    assert bench.say(bench.report("b", 6)) == {"b": [SendAfter(round=1, steps=after, reported=6)]}
    assert bench.say(EndRound(worker="a", round=1, now=True, steps=20)) == {
        "a": [SendAfter(round=1, steps=after, reported=20)],
        "b": [SendAfter(round=1, steps=after, reported=6)],
    }
    bench.arrive("a", "b")
    assert bench.samples == 26


def test_time_is_told_by_ticks() -> None:
    """The round ends without any message: a worker is silent after three steps and ten seconds."""
    bench = Bench()
    bench.start("a")
    bench.steps(5, "a")
    assert bench.scheduler.next_tick == 5.0 + 3.0 + 10.0
    bench.now = 17.9
    assert bench.tick() == {}
    bench.now = 18.0
    ended = bench.tick()
    assert ended["a"] == [SendAfter(round=1, steps=0, reported=5)]
    assert ended[MERGED][-1] == (1, ())
    assert bench.scheduler.next_tick is None
    # It was only asleep: it takes part in the next round.
    assert StartRound(round=2) in bench.say(bench.report("a", 6, round=1))["a"]


def test_a_tick_is_never_asked_for_twice() -> None:
    """As a timer that is set to what has passed would run without end."""
    bench = Bench(start_workers=2, silent_after=1.0)
    bench.start("a", "b")
    bench.steps(5, "a", "b")
    bench.steps(20, "a", first=6)  # b is silent since 9.0
    assert bench.scheduler.next_tick == bench.now + 3.0 + 1.0
    for _ in range(10):
        if bench.scheduler.next_tick is None:
            break
        before = bench.now
        bench.pass_time()
        assert bench.now > before
        bench.tick()
    assert bench.scheduler.next_tick is None


def test_more_in_flight_than_was_reported_is_not_believed() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(5, "a")
    liar = StepReport(worker="a", round=1, steps=6, samples=6, batch_size=1, seconds=1.0, in_flight=10**9)
    bench.say(liar)
    assert bench.scheduler.workers["a"].in_flight == 6


def test_the_deadline_leaves_time_for_the_longest_transfer() -> None:
    bench = Bench(start_workers=2, silent_after=1000.0)
    bench.start("a", "b")
    bench.steps(50, "a", "b")
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=50, samples=50))
    bench.arrive("b")
    bench.pass_time()
    assert bench.tick()[MERGED] == [(1, ("b",))]
    bench.now = 70.0  # twenty seconds after it was sent
    assert bench.say(PseudoGradientArrived(worker="a", round=1)) == {}
    bench.say(RoundStarted(worker="b", round=2))
    bench.steps(99, "b")
    before = bench.now
    bench.pass_time()
    assert bench.now >= before + 2 * 20.0


@pytest.mark.parametrize(("quorum", "merged"), [(0.0, ("a",)), (0.3, ("a",)), (0.5, ()), (1.0, ())])
def test_the_quorum(quorum: float, merged: tuple[str, ...]) -> None:
    bench = Bench(start_workers=3, quorum=quorum)
    bench.start("a", "b", "c")
    bench.steps(34, "a", "b", "c")
    bench.arrive("a")
    bench.pass_time()
    assert bench.tick()[MERGED] == [(1, merged)]


@pytest.mark.parametrize(("workers", "merged"), [(2, ("a",)), (3, ())])
def test_half_of_the_pseudo_gradients_are_enough(workers: int, merged: tuple[str, ...]) -> None:
    names = ("a", "b", "c")[:workers]
    bench = Bench(start_workers=workers)
    bench.start(*names)
    bench.steps(34 if workers == 3 else 50, *names)
    bench.arrive("a")
    bench.pass_time()
    assert bench.tick()[MERGED] == [(1, merged)]


def test_it_carries_on_after_a_restart() -> None:
    bench = Bench(outer_steps=3)
    bench.start("a")
    bench.steps(100, "a")
    bench.arrive("a")
    again = Bench(outer_steps=3)
    again.scheduler.resume(bench.scheduler.round - bench.scheduler.is_open)
    assert again.scheduler.round == 1
    # What the worker reports is heard once it has joined; nothing of the round that was on is left.
    assert again.say(again.report("a", 4, round=2)) == {}
    assert again.say(JoinRounds(worker="a")) == {"a": [StartRound(round=2)]}
    assert again.scheduler.left == 100


def test_a_run_that_was_over_stays_over() -> None:
    bench = Bench(outer_steps=1)
    bench.start("a")
    bench.steps(100, "a")
    bench.arrive("a")
    again = Bench(outer_steps=1)
    again.scheduler.resume(bench.scheduler.round - bench.scheduler.is_open)
    assert again.scheduler.finished


@pytest.mark.parametrize(
    "options",
    [
        {"outer_steps": 0},
        {"start_workers": 0},
        {"quorum": 1.1},
        {"grace": -1.0},
        {"silent_after": float("nan")},
        {"first_step_limit": float("inf")},
    ],
)
def test_what_is_not_allowed(options: dict) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        RoundOptions(**options)


def test_a_training_is_closed_by_rounds_without_a_step() -> None:
    """One for each other fragment: what the last steps have left of it counts, though its worker reports none."""
    bench = Bench(outer_steps=1, closing_rounds=2)
    bench.start("a")
    bench.steps(100, "a")
    assert bench.arrive("a")["a"][-1] == StartRound(round=2, step_cap=0)
    for round in (2, 3):
        assert not bench.scheduler.finished
        started = bench.say(RoundStarted(worker="a", round=round))
        assert started["a"][-1] == SendAfter(round=round, steps=0)
        bench.say(SendingPseudoGradient(worker="a", round=round, steps=0, samples=0))
        ended = bench.say(PseudoGradientArrived(worker="a", round=round))
        assert ended[MERGED] == [(round, ("a",))]
    assert bench.scheduler.finished
    assert ended["a"][-1] == TrainingOver(round=3)
    assert bench.samples == 100


@pytest.mark.parametrize(
    "target",
    [
        SampleTarget(120 * 8 * 30),
        pytest.param(FastestSteps(30), marks=pytest.mark.slow),
        pytest.param(FixedSteps(30), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("spread", "jitter"),
    [(1.0, 0.0), pytest.param(1.0, 0.1, marks=pytest.mark.slow), pytest.param(4.0, 0.02, marks=pytest.mark.slow)],
)
def test_a_crowd_is_looked_at_seldom_and_ends_its_rounds_together(
    target: RoundTarget, spread: float, jitter: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    crowd = [Machine(batch_size=8, step_seconds=0.1 * chance.uniform(1, spread), jitter=jitter) for _ in range(120)]
    looks = 0
    decide = Rounds._decide

    def counted(rounds: Rounds, now: float) -> None:
        nonlocal looks
        looks += 1
        decide(rounds, now)

    monkeypatch.setattr(Rounds, "_decide", counted)
    run = simulate(crowd, target, RoundOptions(outer_steps=2, start_workers=120))
    reports = sum(worker.steps for record in run.rounds for worker in record.workers)
    assert looks < 0.4 * reports
    for record in run.rounds:
        assert len(record.merged) == 120
        ends = run.ends[record.round].values()
        if not isinstance(target, FixedSteps):  # else the fastest waits for the slowest
            assert max(ends) - min(ends) < 2.5 * 0.1 * spread * (1 + 3 * jitter)
        if isinstance(target, SampleTarget):
            assert target.samples <= record.samples < target.samples + 120 * 8 * 2
