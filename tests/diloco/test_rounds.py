"""The batch scheduler with simulated workers: every round ends, all workers end together, and little is too much.

Some two thousand rounds, most of them short.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.round_end import FastestSteps, FixedSteps, RoundOptions, RoundTarget, SampleTarget
from lightning_bytescheduler.diloco.round_record import waiting_share
from tests.diloco.simulated_run import Machine, SimulatedRun, simulate

ROUNDS = 12
few = settings(max_examples=20)


def play(machines: list[Machine], target: RoundTarget, seed: int = 0, rounds: int = ROUNDS, **how) -> SimulatedRun:
    options = RoundOptions(outer_steps=rounds, **{"start_workers": len(machines), **how.pop("options", {})})
    return simulate(machines, target, options, seed=seed, **how)


def target_for(machines: list[Machine], steps: float) -> SampleTarget:
    """So many samples that the slowest has time for ``steps`` steps."""
    seconds = max(machine.step_seconds for machine in machines) * steps
    return SampleTarget(max(round(seconds * sum(m.batch_size / m.step_seconds for m in machines)), 1))


def overshoots(run: SimulatedRun, target: SampleTarget) -> list[int]:
    return [sum(taken.values()) - target.samples for _, taken in sorted(run.taken.items())]


# Milliseconds that share no pattern, so that ties are rare, and those that do.
speeds = st.one_of(st.floats(0.05, 0.4), st.sampled_from([0.05, 0.1, 0.2, 0.4]))
steady_machines = st.lists(
    st.builds(Machine, batch_size=st.integers(1, 64), step_seconds=speeds), min_size=1, max_size=5
)


@few
@given(machines=steady_machines, steps=st.floats(0.2, 12))
def test_with_perfect_information(machines: list[Machine], steps: float) -> None:
    """Once speeds are known (after two steps of everyone), a round is too long by less than the largest batch, and the
    batches that end at the same instant, or by the one step that everybody takes at least."""
    target = target_for(machines, steps)
    run = play(machines, target)
    assert len(run.rounds) == ROUNDS
    slowest = max(machine.step_seconds for machine in machines)
    for number, record in enumerate(run.rounds):
        over = sum(run.taken[record.round].values()) - target.samples
        ends = run.ends[record.round].values()
        assert record.samples == sum(run.taken[record.round].values())
        assert over >= 0
        if number >= 2:
            largest = max(machine.batch_size for machine in machines)
            ended = [
                (run.ends[record.round].get(f"w{i}", 0.0), machine.batch_size) for i, machine in enumerate(machines)
            ]
            ties = max(sum(size for other, size in ended if abs(other - end) <= 1e-6 * slowest) for end, _ in ended)
            one_each = sum(machine.batch_size for machine in machines) - target.samples
            assert over < max(largest, ties) or over == one_each
            assert max(ends) - min(ends) <= slowest * (1 + 1e-6)
            assert {worker.worker for worker in record.workers} == {f"w{i}" for i in range(len(machines))}


@few
@given(
    machines=st.lists(
        st.builds(
            Machine,
            batch_size=st.integers(1, 64),
            step_seconds=st.just(0.2),
            delay=st.floats(0.0, 0.5),
            transfer=st.floats(0.0, 1.0),
        ),
        min_size=1,
        max_size=4,
    ),
    steps=st.floats(1, 25),
)
def test_with_delays_it_is_too_much_by_what_is_in_flight(machines: list[Machine], steps: float) -> None:
    """What a worker does before it hears of the end cannot be taken back."""
    target = target_for(machines, steps)
    run = play(machines, target)
    assert len(run.rounds) == ROUNDS
    largest = max(machine.batch_size for machine in machines)
    # The step in progress, the reports on their way, and one more while the decision travels.
    in_flight = sum((run.in_flight.get(f"w{i}", 0) + 2) * machine.batch_size for i, machine in enumerate(machines))
    assert all(0 <= over < largest + in_flight for over in overshoots(run, target)[2:])


@pytest.mark.parametrize("ratio", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_workers_hardly_wait(ratio: float, jitter: float) -> None:
    slow = Machine(batch_size=4, step_seconds=0.4, jitter=jitter)
    middle = Machine(batch_size=16, step_seconds=0.4 / (1 + (ratio - 1) / 3), jitter=jitter)
    fast = Machine(batch_size=64, step_seconds=0.4 / ratio, jitter=jitter)
    machines = [slow, middle, fast]
    run = play(machines, target_for(machines, 41), rounds=6)
    assert all(record.workers[0].steps >= 36 for record in run.rounds)
    assert waiting_share(run.rounds) < 0.02
    assert all(worker.merged for record in run.rounds for worker in record.workers)


@settings(max_examples=15)
@given(
    fastest=st.floats(0.05, 0.4),
    ratios=st.lists(st.floats(1, 8), min_size=1, max_size=3),
    jitter=st.floats(0.0, 0.1),
    warm_up=st.floats(0.0, 1.0),
    delay=st.floats(0.0, 0.1),
    seed=st.integers(0, 999),
)
def test_waiting_is_under_a_twentieth_in_long_rounds(fastest, ratios, jitter, warm_up, delay, seed) -> None:
    machines = [
        Machine(batch_size=8, step_seconds=fastest * ratio, jitter=jitter, warm_up=warm_up, delay=delay)
        for ratio in (1.0, *ratios)
    ]
    run = play(machines, target_for(machines, 44), seed=seed, rounds=4)
    assert waiting_share(run.rounds) < 0.05


def test_a_blip_costs_that_round_and_a_lasting_change_one_round() -> None:
    machines = [Machine(batch_size=8, step_seconds=0.1, slower_at=61.0, slower_by=3.0) for _ in range(2)]
    machines[1].slower_at = float("inf")
    run = play(machines, SampleTarget(1600), rounds=14)
    shares = [waiting_share([record]) for record in run.rounds]
    changed = next(i for i, record in enumerate(run.rounds) if record.end > 61.0)
    assert max(shares[:changed]) < 0.01
    assert max(shares[changed + 1 :]) < 0.03
    assert run.rounds[-1].workers[0].steps == pytest.approx(50, abs=2)
    assert run.rounds[-1].workers[1].steps == pytest.approx(150, abs=2)


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_a_racer_stops_at_the_cap(loss: float) -> None:
    machines = [Machine(batch_size=1, step_seconds=0.01, delay=0.001), Machine(batch_size=1, step_seconds=1.0)]
    run = play(machines, FastestSteps(20), loss=loss, rounds=5)
    assert len(run.rounds) == 5
    assert all(worker.steps <= 20 for record in run.rounds for worker in record.workers)


@pytest.mark.parametrize(("overlap", "least"), [(0, 0.0), (8, 0.95)])
def test_sending_beside_training_costs_no_time(overlap: int, least: float) -> None:
    """A second each way, while the slow worker takes eight steps of 0.4 s, and the fast one as many as that takes."""
    machines = [
        Machine(batch_size=8, step_seconds=0.4, transfer=1.0, overlap_steps=overlap),
        Machine(batch_size=8, step_seconds=0.1, transfer=1.0, overlap_steps=4 * overlap),
    ]
    run = play(machines, SampleTarget(1600))
    assert len(run.rounds) == ROUNDS
    shares = [seconds / run.rounds[-1].end for seconds in run.busy.values()]
    assert min(shares) >= least
    if not overlap:
        assert max(shares) < 0.92
    # The steps beside count for the next round, so that all rounds after the first are of one size.
    assert all(1600 <= record.samples < 1600 + 8 * 5 for record in run.rounds)


def test_the_fastest_workers_steps_end_a_round() -> None:
    machines = [Machine(batch_size=8, step_seconds=seconds) for seconds in (0.1, 0.2, 0.33, 0.8)]
    run = play(machines, FastestSteps(80))
    assert [[worker.steps for worker in record.workers] for record in run.rounds] == [[80, 40, 24, 10]] * ROUNDS
    assert waiting_share(run.rounds) < 0.01


def test_fixed_steps_wait_for_the_slowest() -> None:
    machines = [Machine(batch_size=8, step_seconds=seconds) for seconds in (0.1, 0.3)]
    run = play(machines, FixedSteps(30), rounds=5)
    assert [[worker.steps for worker in record.workers] for record in run.rounds] == [[30, 30]] * 5
    assert waiting_share(run.rounds) == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("target", [SampleTarget(16), FastestSteps(1), FixedSteps(1)])
def test_rounds_of_one_step_of_equal_workers(target: RoundTarget) -> None:
    run = play([Machine(batch_size=8, step_seconds=0.1) for _ in range(2)], target)
    first = 0 if target.step_cap else 1  # without a cap, speeds have to be known
    assert all(worker.steps == 1 for record in run.rounds[first + 1 :] for worker in record.workers)
    assert len(run.rounds) == ROUNDS


def test_a_late_joiner_shortens_the_round_that_is_on() -> None:
    machines = [Machine(batch_size=8, step_seconds=0.1), Machine(batch_size=8, step_seconds=0.1, joins=25.0)]
    run = play(machines, SampleTarget(800), options={"start_workers": 1}, rounds=6)
    before = [record for record in run.rounds if record.end <= 25.0]
    assert all(len(record.workers) == 1 for record in before)
    assert all(len(record.workers) == 2 for record in run.rounds[len(before) :])
    assert len(before) == 2
    joined = run.rounds[2]
    assert joined.samples >= 800
    assert joined.end - joined.start == pytest.approx(7.5, abs=0.5)  # five seconds alone, and half of the rest
    assert run.rounds[-1].end - run.rounds[-1].start == pytest.approx(5.0, abs=0.3)


def test_a_leavers_work_is_done_by_the_others() -> None:
    machines = [Machine(batch_size=8, step_seconds=0.1), Machine(batch_size=8, step_seconds=0.1, leaves=2.0)]
    run = play(machines, SampleTarget(800), rounds=3)
    assert [record.merged for record in run.rounds] == [("w0",)] * 3
    assert [record.samples for record in run.rounds] == [800] * 3


def test_a_silent_worker_is_not_waited_for_beyond_the_bound() -> None:
    machines = [Machine(batch_size=8, step_seconds=0.1), Machine(batch_size=8, step_seconds=0.1, dies=27.0)]
    options = {"grace": 5.0, "silent_after": 1.0}
    run = play(machines, SampleTarget(1600), options=options, rounds=6)
    assert [record.merged for record in run.rounds] == [("w0", "w1")] * 2 + [("w0",)] * 4
    # 160 steps of its own, as it heard late; then no worker is waited for.
    assert run.rounds[2].samples == pytest.approx(1600, abs=16)
    assert max(waiting_share([record]) for record in run.rounds[3:]) < 0.01


def test_one_who_dies_after_the_decision_is_waited_for_until_grace() -> None:
    """Both were told to send after 100 steps, at 9.8 s; one dies at 9.85 s."""
    machines = [Machine(batch_size=8, step_seconds=0.1), Machine(batch_size=8, step_seconds=0.1, dies=9.85)]
    options = {"grace": 5.0, "silent_after": 60.0}
    run = play(machines, SampleTarget(1600), options=options, rounds=2)
    first = run.rounds[0]
    assert first.merged == ("w0",)
    assert first.decided is not None
    assert first.end == pytest.approx(first.decided + 2 * (10.0 - first.decided) + 5.0, abs=0.05)
    assert len(run.rounds[1].workers) == 1


def test_without_a_quorum_the_weights_stay() -> None:
    machines = [Machine(batch_size=8, step_seconds=0.1)] + [
        Machine(batch_size=8, step_seconds=0.1, dies=1.0) for _ in range(3)
    ]
    options = {"grace": 1.0, "silent_after": 1.0, "quorum": 0.5}
    run = play(machines, SampleTarget(800), options=options, rounds=2)
    assert [record.merged for record in run.rounds] == [(), ("w0",)]
    assert run.rounds[0].samples == 0


def test_if_all_are_silent_the_round_ends_and_nothing_more_happens() -> None:
    machines = [Machine(batch_size=8, step_seconds=0.1, dies=1.0) for _ in range(2)]
    options = {"grace": 5.0, "silent_after": 1.0}
    run = play(machines, SampleTarget(800), options=options)
    assert [record.merged for record in run.rounds] == [()]
    assert run.rounds[0].end < 10.0


any_machine = st.builds(
    Machine,
    batch_size=st.integers(1, 64),
    step_seconds=speeds,
    jitter=st.sampled_from([0.0, 0.05, 0.3]),
    blips=st.sampled_from([0.0, 0.05]),
    warm_up=st.sampled_from([0.0, 2.0]),
    delay=st.floats(0.0, 0.5),
    transfer=st.floats(0.0, 2.0),
    joins=st.one_of(st.just(0.0), st.floats(0.0, 30.0)),
    leaves=st.one_of(st.just(float("inf")), st.floats(0.0, 60.0)),
    dies=st.one_of(st.just(float("inf")), st.floats(0.0, 60.0)),
    slower_at=st.floats(0.0, 60.0),
    slower_by=st.sampled_from([1.0, 4.0]),
)
targets = st.one_of(
    st.builds(SampleTarget, st.integers(1, 1500)), st.builds(FastestSteps, st.integers(1, 40)), st.just(FixedSteps(20))
)


@given(
    machines=st.lists(any_machine, min_size=1, max_size=5),
    target=targets,
    seed=st.integers(0, 10_000),
    loss=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    doubling=st.sampled_from([0.0, 0.0, 0.2]),
)
def test_every_round_ends_whatever_happens(machines, target, seed, loss, doubling) -> None:
    """Joins, leaves, deaths, blips, slow links, lost, doubled and overtaken messages: as long as a worker lives, rounds
    follow each other, and none lasts longer than its work, its deadline and its grace."""
    machines = [*machines, Machine(batch_size=8, step_seconds=0.2)]  # the one that lives
    options = {"grace": 4.0, "silent_after": 2.0, "first_step_limit": 20.0, "start_workers": 1}
    run = play(machines, target, seed, options=options, loss=loss, doubling=doubling)
    assert len(run.rounds) == ROUNDS
    assert [record.round for record in run.rounds] == list(range(1, ROUNDS + 1))
    for record in run.rounds:
        assert record.end - record.start < 600
        if record.decided is not None:
            slowest = max(machine.step_seconds * machine.slower_by for machine in machines)
            assert record.end - record.decided <= 2 * 60 * slowest + 2 * 4.0 + 4.0 + 30.0
        for worker in record.workers:
            assert all(left[2] == right[1] for left, right in itertools.pairwise(worker.spans))
            assert all(record.start <= start < end <= record.end for _, start, end in worker.spans)
