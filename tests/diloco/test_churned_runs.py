"""Whole runs in which workers die, sleep, leave, come back and join, and the scheduler is restarted.

Every round ends, no worker waits for a dead one beyond the announced time, and samples count once.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.round_end import FastestSteps, FixedSteps, RoundOptions, RoundTarget, SampleTarget
from tests.diloco.simulated_run import Machine, SimulatedRun, simulate

ROUNDS = 10


def check(run: SimulatedRun, machines: list[Machine], *, silent_after: float, first_step_limit: float) -> None:
    numbers = [record.round for record in run.rounds]
    assert numbers == sorted(set(numbers))
    slowest = max(machine.step_seconds * machine.slower_by for machine in machines)
    for record in run.rounds:
        if record.decided is not None:
            assert record.end <= run.bounds[record.round] + 1e-6
        for worker in record.workers:
            waited = max((end - start for kind, start, end in worker.spans if kind == "waiting"), default=0.0)
            # Until the others are seen to be silent, and then until the deadline and grace.
            announced = run.bounds[record.round] - (record.decided or record.start)
            assert waited <= announced + 3 * 10 * slowest + max(silent_after, first_step_limit) + 3 * 10 * slowest
        names = [worker.worker for worker in record.workers if worker.merged]
        assert len(set(names)) == len(names)
        # What is merged is what was said to be sent, and nothing is counted on that was not.
        taken = run.taken.get(record.round, {})
        assert all(worker.samples <= taken[worker.worker] for worker in record.workers if worker.merged)


naps = st.lists(st.tuples(st.floats(0, 60), st.floats(0.1, 25)), max_size=2).map(
    lambda spans: tuple((start, start + length) for start, length in spans)
)
machines = st.builds(
    Machine,
    batch_size=st.integers(1, 64),
    step_seconds=st.floats(0.05, 0.4),
    jitter=st.sampled_from([0.0, 0.1]),
    delay=st.sampled_from([0.0, 0.02, 0.3]),
    transfer=st.floats(0.0, 2.0),
    joins=st.one_of(st.just(0.0), st.floats(0.0, 30.0)),
    leaves=st.one_of(st.just(math.inf), st.floats(0.0, 60.0)),
    dies=st.one_of(st.just(math.inf), st.floats(0.0, 60.0)),
    returns=st.one_of(st.just(math.inf), st.floats(0.0, 80.0)),
    sleeps=naps,
)
targets = st.one_of(
    st.builds(SampleTarget, st.integers(50, 1500)),
    st.builds(FastestSteps, st.integers(2, 40)),
    st.builds(FixedSteps, st.integers(2, 30)),
)


@given(
    crowd=st.lists(machines, min_size=1, max_size=6),
    target=targets,
    quorum=st.sampled_from([0.0, 0.5]),
    lease=st.sampled_from([3.0, 15.0, math.inf]),
    restarts=st.lists(st.floats(0, 60), max_size=2).map(tuple),
    seed=st.integers(0, 10_000),
)
def test_every_round_ends_whichever_worker_dies_sleeps_or_comes_back(
    crowd: list[Machine],
    target: RoundTarget,
    quorum: float,
    lease: float,
    restarts: tuple[float, ...],
    seed: int,
) -> None:
    crowd = [*crowd, Machine(batch_size=8, step_seconds=0.2)]  # the one that lives
    options = RoundOptions(
        outer_steps=ROUNDS, grace=4.0, quorum=quorum, silent_after=2.0, first_step_limit=20.0, start_workers=1
    )
    run = simulate(crowd, target, options, seed=seed, lease=lease, restarts=restarts, until=20_000.0)
    assert [record.round for record in run.rounds] == list(range(1, ROUNDS + 1))
    check(run, crowd, silent_after=2.0, first_step_limit=20.0)


@pytest.mark.slow
def test_many_kills_and_returns_cost_little() -> None:
    """Eight workers; one is killed every four seconds, and is back after three."""
    crowd = [
        Machine(batch_size=8, step_seconds=0.1, jitter=0.05, dies=10.0 + 4 * index, returns=13.0 + 4 * index)
        for index in range(7)
    ]
    crowd += [Machine(batch_size=8, step_seconds=0.1, jitter=0.05)]
    options = RoundOptions(outer_steps=60, quorum=0.5, grace=4.0, silent_after=1.0, start_workers=8)
    run = simulate(crowd, SampleTarget(8 * 8 * 10), options, lease=2.0)
    check(run, crowd, silent_after=1.0, first_step_limit=600.0)
    assert len(run.rounds) == 60
    undisturbed = simulate([Machine(batch_size=8, step_seconds=0.1)] * 8, SampleTarget(8 * 8 * 10), options)
    goodput = [one.samples / one.rounds[-1].end for one in (run, undisturbed)]
    assert goodput[0] > 0.75 * goodput[1]


@pytest.mark.parametrize("lease", [5.0, math.inf])
def test_a_worker_that_is_stopped_for_twenty_seconds_is_back_at_work(lease: float) -> None:
    crowd = [Machine(batch_size=8, step_seconds=0.1) for _ in range(4)]
    crowd[0] = Machine(batch_size=8, step_seconds=0.1, sleeps=((20.0, 40.0),))
    options = RoundOptions(outer_steps=20, grace=4.0, silent_after=1.0, start_workers=4)
    run = simulate(crowd, SampleTarget(4 * 8 * 50), options, lease=lease)
    check(run, crowd, silent_after=1.0, first_step_limit=600.0)
    asleep = [record for record in run.rounds if record.start > 21.0 and record.end < 40.0]
    assert all("w0" not in record.merged for record in asleep)
    assert len(asleep) >= 2
    assert all("w0" in record.merged for record in run.rounds[-5:])


@pytest.mark.parametrize("target", [SampleTarget(4 * 8 * 50), FastestSteps(50), FixedSteps(50)], ids=str)
def test_a_restart_in_the_middle_of_a_round_loses_no_step(target: RoundTarget) -> None:
    crowd = [Machine(batch_size=8, step_seconds=0.1, delay=0.01) for _ in range(4)]
    options = RoundOptions(outer_steps=4, start_workers=4)
    restarted = simulate(crowd, target, options, restarts=(12.53, 12.61))
    plain = simulate(crowd, target, options)
    assert [record.merged for record in restarted.rounds] == [("w0", "w1", "w2", "w3")] * 4
    assert [record.samples for record in restarted.rounds] == pytest.approx(
        [record.samples for record in plain.rounds], rel=0.05
    )
    assert restarted.rounds[-1].end < plain.rounds[-1].end + 1.0
