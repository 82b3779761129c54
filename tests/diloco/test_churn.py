"""Workers that leave, pause, come late or come back, message by message; many at once are in test_churned_runs.py."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    JoinRounds,
    LeaveRounds,
    PauseRounds,
    PseudoGradientArrived,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
)
from lightning_bytescheduler.diloco.round_end import FixedSteps
from lightning_bytescheduler.diloco.round_roster import RETURN_S
from tests.diloco.bench import MERGED, Bench


def merged(told: dict[str, list[Any]]) -> tuple[str, ...]:
    ((_, workers),) = told[MERGED]
    return tuple(workers)


# ── Leaving ───────────────────────────────────────────────────────────


def test_what_has_arrived_counts_though_its_worker_leaves() -> None:
    bench = Bench(start_workers=2, outer_steps=1)
    bench.start("a", "b")
    bench.steps(50, "a", "b")
    bench.arrive("a")
    assert bench.say(LeaveRounds(worker="a")) == {}
    assert merged(bench.arrive("b")) == ("a", "b")
    assert bench.samples == 100
    assert {worker.worker: worker.merged for worker in bench.records[0].workers} == {"a": True, "b": True}


def test_what_is_under_way_counts_if_it_comes_in_time_and_is_not_waited_for() -> None:
    bench = Bench(start_workers=3, outer_steps=2, quorum=0.0)
    bench.start("a", "b", "c")
    bench.steps(34, "a", "b", "c")
    for name in "ab":
        bench.say(SendingPseudoGradient(worker=name, round=1, steps=34, samples=34))
        bench.say(LeaveRounds(worker=name))
    assert bench.scheduler.expects("a", 1)
    assert MERGED not in bench.say(PseudoGradientArrived(worker="a", round=1))
    assert not bench.scheduler.expects("a", 1)
    assert merged(bench.arrive("c")) == ("a", "c")
    assert bench.samples == 68
    assert bench.say(PseudoGradientArrived(worker="b", round=1)) == {}


def test_one_who_leaves_before_the_decision_is_not_counted_on_and_one_who_leaves_after_it_is() -> None:
    bench = Bench(start_workers=4, quorum=0.5)
    bench.start(*"abcd")
    bench.steps(5, *"abcd")
    bench.say(LeaveRounds(worker="d"))
    told = bench.steps(29, *"abc", first=6)
    assert bench.scheduler.collecting
    assert MERGED not in told
    bench.arrive("a")
    bench.say(LeaveRounds(worker="b"))
    assert merged(bench.say(LeaveRounds(worker="c"))) == ()  # one of three
    assert [len(record.workers) for record in bench.records] == [1]


def test_a_process_that_is_started_anew_keeps_what_it_had_sent() -> None:
    bench = Bench(start_workers=2, outer_steps=2)
    bench.start("a", "b")
    bench.steps(50, "a", "b")
    bench.arrive("a")
    assert bench.say(JoinRounds(worker="a", session=9)) == {"a": [Acknowledge(round=1, reported=50)]}
    told = bench.arrive("b")
    assert merged(told) == ("a", "b")
    assert told["a"] == [StartRound(round=2)]
    assert [worker.worker for worker in bench.records[0].workers] == ["a", "b"]


@pytest.mark.parametrize("target", [None, FixedSteps(50)])
def test_what_a_process_that_is_started_anew_had_not_sent_is_lost(target: FixedSteps | None) -> None:
    bench = Bench(target)
    bench.start("a")
    bench.steps(50, "a")
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=50, samples=50))
    assert bench.say(JoinRounds(worker="a", session=9)) == {"a": [StartRound(round=1, step_cap=target and 50)]}
    assert bench.scheduler.workers["a"].samples == 0


def test_one_who_left_with_its_update_sent_is_back_in_its_place() -> None:
    bench = Bench(start_workers=2, outer_steps=2)
    bench.start("a", "b")
    bench.steps(50, "a", "b")
    bench.arrive("a")
    bench.say(LeaveRounds(worker="a"))
    assert bench.say(JoinRounds(worker="a", round=1, steps=50, samples=50)) == {
        "a": [Acknowledge(round=1, reported=50)]
    }
    told = bench.arrive("b")
    assert merged(told) == ("a", "b") or merged(told) == ("b", "a")
    assert told["a"] == [StartRound(round=2)]
    assert bench.samples == 100


# ── Coming back in the middle of a round ───────────────────────────────────────────────────────────


def test_after_a_restart_the_steps_of_the_open_round_count() -> None:
    bench = Bench(start_workers=2)
    bench.start("a", "b")
    bench.steps(20, "a", "b")
    again = Bench(start_workers=2)
    again.scheduler.resume(bench.scheduler.round - bench.scheduler.is_open)
    again.scheduler.expect(2)
    again.now = 5.0
    assert again.say(JoinRounds(worker="a", session=1, round=1, steps=20, samples=20)) == {}
    told = again.say(JoinRounds(worker="b", session=1, round=1, steps=22, samples=22))
    assert told == {"a": [Acknowledge(round=1, reported=20)], "b": [Acknowledge(round=1, reported=22)]}
    assert again.scheduler.left == 58
    again.say(again.report("b", 23))
    assert again.scheduler.left == 57
    # Steps of another round do not count, and a worker that joins without steps begins without.
    assert again.say(JoinRounds(worker="c", round=7, steps=5, samples=5)) == {"c": [StartRound(round=1)]}
    assert again.say(JoinRounds(worker="d")) == {"d": [StartRound(round=1)]}
    assert again.scheduler.left == 57


def test_one_who_was_given_up_comes_back_into_its_round() -> None:
    bench = Bench(start_workers=2)
    bench.start("a", "b")
    bench.steps(20, "a", "b")
    bench.say(LeaveRounds(worker="a"))
    assert bench.scheduler.left == 80
    assert bench.say(JoinRounds(worker="a", round=1, steps=21, samples=21)) == {
        "a": [Acknowledge(round=1, reported=21)]
    }
    assert bench.scheduler.left == 59


def test_one_who_comes_back_after_the_decision_is_told_to_send_and_counted_on() -> None:
    bench = Bench(start_workers=2, quorum=1.0)
    bench.start("a", "b")
    bench.steps(20, "a", "b")
    bench.say(LeaveRounds(worker="a"))
    bench.steps(78, "b", first=21)
    assert bench.scheduler.collecting
    assert bench.say(JoinRounds(worker="a", round=1, steps=20, samples=20)) == {
        "a": [SendAfter(round=1, steps=0, reported=20)]
    }
    assert bench.arrive("b") == {"b": [Acknowledge(round=1, reported=98)]}
    assert sorted(merged(bench.arrive("a"))) == ["a", "b"]


def test_one_that_calls_its_update_off_and_trains_on_is_told_to_send_again() -> None:
    """Its connection broke while it waited for the end of the round. Else all would wait for it until the deadline."""
    bench = Bench(start_workers=2)
    bench.start("a", "b")
    bench.steps(50, "a", "b")
    bench.arrive("b")
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=50, samples=50))
    assert bench.say(back(50)) == {"a": [Acknowledge(round=1, reported=50)]}
    assert bench.say(bench.report("a", 51)) == {"a": [SendAfter(round=1, steps=50, reported=51)]}
    assert merged(bench.arrive("a")) == ("a", "b")
    assert bench.samples == 101


# ── Pausing ───────────────────────────────────────────────────────────


def back(steps: int) -> JoinRounds:
    """What one says who has paused in round 1 after so many steps."""
    return JoinRounds(worker="a", round=1, steps=steps, samples=steps)


def test_one_who_pauses_is_not_counted_on_nor_silent_and_goes_on() -> None:
    bench = Bench(start_workers=2, outer_steps=1)
    bench.start("a", "b")
    bench.steps(10, "a", "b")
    assert bench.say(PauseRounds(worker="a")) == {}
    assert bench.scheduler.left == 90  # 10 of a may not come
    assert bench.scheduler.workers["a"].step_time.is_known  # its pace is kept
    told = bench.steps(60, "b", first=11)
    assert told == {"b": [Acknowledge(round=1, reported=70)]}
    assert bench.scheduler.next_tick == 70.0 + 3.0 + 10.0  # of b
    assert bench.say(back(10)) == {"a": [Acknowledge(round=1, reported=10)]}
    # Both do the last twenty together.
    for step in range(1, 8):
        bench.now += 1.0
        bench.say(bench.report("b", 70 + step))
        bench.say(bench.report("a", 10 + step))
    assert bench.scheduler.collecting
    assert [bench.scheduler.workers[name].send_after for name in "ab"] == [20, 80]


@pytest.mark.parametrize("ends", ["arrived", "left", "cut off", "late"])
def test_an_update_that_one_who_pauses_is_still_sending_is_waited_for(ends: str) -> None:
    bench = Bench(start_workers=2, outer_steps=2)
    bench.start("a", "b")
    bench.steps(50, "a", "b")
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=50, samples=50))
    assert bench.say(PauseRounds(worker="a")) == {}
    assert MERGED not in bench.arrive("b")
    if ends == "arrived":
        assert merged(bench.say(PseudoGradientArrived(worker="a", round=1))) == ("a", "b")
    elif ends == "left":
        assert merged(bench.say(LeaveRounds(worker="a"))) == ("b",)
    else:
        if ends == "cut off":
            bench.scheduler.note_connections({"b": 0.0}, now=bench.now)
        began = bench.now
        bench.pass_time()
        assert merged(bench.tick()) == ("b",)
        assert bench.now > began + RETURN_S if ends == "late" else bench.now == began + RETURN_S


def test_what_the_only_one_has_not_yet_sent_as_it_pauses_is_waited_for() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(60, "a")
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=60, samples=60))
    assert MERGED not in bench.say(PauseRounds(worker="a"))
    assert merged(bench.say(PseudoGradientArrived(worker="a", round=1))) == ("a",)


def test_one_who_pauses_after_the_decision_counts_once_for_the_quorum() -> None:
    bench = Bench(start_workers=2, quorum=1.0)
    bench.start("a", "b")
    bench.steps(48, "a", "b")
    assert bench.scheduler.collecting
    bench.say(PauseRounds(worker="a"))
    assert bench.say(back(48)) == {"a": [SendAfter(round=1, steps=0, reported=48)]}
    bench.steps(2, "a", "b", first=49)
    bench.arrive("a")
    assert sorted(merged(bench.arrive("b"))) == ["a", "b"]


def test_a_round_ends_without_one_who_pauses_and_it_starts_with_what_it_can() -> None:
    bench = Bench(start_workers=2)
    bench.start("a", "b")
    bench.steps(10, "a", "b")
    bench.say(PauseRounds(worker="a"))
    bench.steps(87, "b", first=11)
    told = bench.arrive("b")
    assert merged(told) == ("b",)
    assert "a" not in told
    bench.now += 1000.0
    bench.say(RoundStarted(worker="b", round=2))
    bench.steps(5, "b")
    # Its speed is known and no worker waits for its steps, so it need not wait for the next round.
    assert bench.say(JoinRounds(worker="a")) == {"a": [StartRound(round=2)]}


def test_where_all_take_equal_steps_one_who_has_paused_waits_for_the_next_round() -> None:
    bench = Bench(FixedSteps(20), start_workers=2)
    bench.start("a", "b")
    bench.say(PauseRounds(worker="a"))
    bench.steps(20, "b")
    bench.arrive("b")
    assert bench.scheduler.round == 2
    assert bench.say(JoinRounds(worker="a")) == {}


def test_if_all_pause_nothing_is_lost() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(10, "a")
    bench.say(PauseRounds(worker="a"))
    assert bench.scheduler.next_tick is None
    bench.now += 10_000.0
    assert bench.tick() == {}
    assert bench.say(back(10)) == {"a": [Acknowledge(round=1, reported=10)]}
    assert bench.scheduler.left == 90


def test_the_only_one_pauses_between_rounds() -> None:
    bench = Bench()
    bench.start("a")
    bench.steps(100, "a")
    bench.arrive("a")
    assert bench.scheduler.round == 2
    bench.say(PauseRounds(worker="a"))
    bench.now += 10_000.0
    assert bench.tick() == {}
    assert bench.say(JoinRounds(worker="a")) == {"a": [StartRound(round=2)]}


# ── Quorum, grace, transfers ───────────────────────────────────────────────────────────


def test_one_long_transfer_is_forgotten() -> None:
    """It made every later timeout twenty minutes long."""
    bench = Bench(start_workers=1)
    timeouts = []
    for round in range(1, 7):
        if round == 1:
            bench.start("a")
        else:
            bench.say(RoundStarted(worker="a", round=round))
        bench.steps(97, "a")
        timeouts.append(bench.scheduler._deadline - bench.now)
        bench.say(SendingPseudoGradient(worker="a", round=round, steps=97, samples=97))
        bench.now += 600.0 if round == 1 else 1.0
        bench.scheduler._deadline = bench.now + 1.0  # or that round would have ended without it
        bench.say(PseudoGradientArrived(worker="a", round=round))
    assert timeouts[1] == 6.0 + 2 * 600.0 + 5.0
    assert timeouts[3:] == [6.0 + 2 * 1.0 + 5.0] * 3


def test_one_who_waits_for_large_weights_is_not_silent() -> None:
    """A transfer takes 100 s here, either way."""
    bench = Bench(first_step_limit=300.0)
    bench.start("a")
    bench.steps(100, "a")
    bench.say(SendingPseudoGradient(worker="a", round=1, steps=100, samples=100))
    bench.now += 100.0
    bench.scheduler._deadline = bench.now
    bench.say(PseudoGradientArrived(worker="a", round=1))
    began = bench.now
    assert bench.scheduler.next_tick == began + 3.0 + 10.0 + 200.0
    bench.now += 150.0
    bench.scheduler.note_connections({"a": bench.now}, now=bench.now)
    assert bench.scheduler.next_tick == began + 300.0  # alive and stuck, it is given up
    bench.say(RoundStarted(worker="a", round=2))
    assert bench.scheduler.next_tick == bench.now + 3.0 + 10.0
    bench.now += 5.0
    bench.scheduler.note_connections({"a": bench.now}, now=bench.now)  # a worker that trains reports steps
    assert bench.scheduler.next_tick == bench.now - 5.0 + 3.0 + 10.0


# ── Memory ───────────────────────────────────────────────────────────


@pytest.mark.slow
def test_memory_is_bounded_after_a_hundred_thousand_names() -> None:
    """Each joins and leaves; who dies is said to have left by the host."""
    bench = Bench(first_step_limit=1.0, silent_after=1.0)
    bench.start("steady")
    bench.steps(3, "steady")
    for number in range(100_000):
        bench.say(JoinRounds(worker=f"w{number}"))
        bench.say(LeaveRounds(worker=f"w{number}"))
    assert set(bench.scheduler.workers) == {"steady"}


def test_a_round_whose_end_is_decided_is_not_lost_while_all_pause() -> None:
    bench = Bench(grace=5.0)
    bench.start("a")
    bench.steps(97, "a")
    assert bench.scheduler.collecting
    bench.say(PauseRounds(worker="a"))
    bench.now += 1000.0
    bench.tick()
    assert bench.scheduler.next_tick is None
    assert not bench.records
    bench.say(back(97))
    bench.steps(3, "a", first=98)
    bench.arrive("a")
    assert bench.records[0].samples == 100


def test_no_other_worker_waits_for_one_that_pauses() -> None:
    bench = Bench(start_workers=2, grace=5.0)
    bench.start("a", "b")
    bench.steps(47, "a", "b")
    assert bench.scheduler.collecting
    bench.say(PauseRounds(worker="a"))
    bench.steps(3, "b", first=48)
    bench.arrive("b")
    assert bench.records[0].merged == ("b",)


# ── Without a connection ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("sends", [False, True])
def test_a_worker_whose_connection_closes_is_waited_for_as_long_as_a_live_one_needs_to_be_back(sends: bool) -> None:
    bench = Bench(FixedSteps(10), start_workers=3, outer_steps=2)
    bench.start("a", "b", "c")
    bench.steps(9, "a", "b", "c")
    bench.steps(1, "a", "b", first=10)
    if sends:
        bench.say(bench.report("c", 10))
        bench.say(SendingPseudoGradient(worker="c", round=1, steps=10, samples=10))
    bench.arrive("a", "b")
    bench.scheduler.note_connections({"a": 0.0, "b": 0.0}, now=bench.now)
    closed = bench.now
    assert bench.scheduler.next_tick == closed + RETURN_S
    bench.now = closed + RETURN_S - 0.01
    bench.scheduler.note_connections({"a": 0.0, "b": 0.0}, now=bench.now)
    assert MERGED not in bench.tick(), "it may be back"
    bench.now = closed + RETURN_S
    assert set(merged(bench.tick())) == {"a", "b"}


def test_a_worker_that_is_back_in_time_has_its_place_in_the_round() -> None:
    bench = Bench(FixedSteps(10), start_workers=2, outer_steps=2)
    bench.start("a", "b")
    bench.steps(9, "a", "b")
    bench.steps(1, "a", first=10)
    bench.arrive("a")
    bench.scheduler.note_connections({"a": 0.0}, now=bench.now)
    bench.now += RETURN_S - 0.5
    bench.say(bench.report("b", 10))
    bench.scheduler.note_connections({"a": 0.0, "b": 0.0}, now=bench.now)
    bench.now += 1.0
    assert MERGED not in bench.tick()
    assert set(merged(bench.arrive("b"))) == {"a", "b"}


def test_a_worker_that_is_gone_does_not_make_the_first_round_begin() -> None:
    bench = Bench(start_workers=2)
    bench.say(JoinRounds(worker="a", session=1))
    bench.scheduler.note_connections({}, now=bench.now)
    assert bench.say(JoinRounds(worker="b", session=2)) == {}
    assert bench.scheduler.round == 0
    assert bench.say(JoinRounds(worker="a", session=1)) == {"a": [StartRound(round=1)], "b": [StartRound(round=1)]}


def test_steps_of_a_worker_that_is_gone_are_left_to_the_others() -> None:
    bench = Bench(start_workers=2, outer_steps=2)
    bench.start("a", "b")
    bench.steps(20, "a", "b")
    bench.scheduler.note_connections({"a": 0.0}, now=bench.now)
    while not bench.scheduler.collecting:
        bench.steps(1, "a", first=bench.scheduler.workers["a"].steps + 1)
    progress = bench.scheduler.workers["a"]
    bench.steps((progress.send_after or progress.steps) - progress.steps, "a", first=progress.steps + 1)
    assert merged(bench.arrive("a")) == ("a",)
    assert bench.records[0].samples >= 100, "those of the one that is gone count for nothing"
