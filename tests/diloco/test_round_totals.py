"""Sums that are kept up to date, and bounds that spare projections: never another decision than a plain look at all."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.projection import Pace, RunningMaximum, RunningSum, Tally
from lightning_bytescheduler.diloco.round_end import FastestSteps, FixedSteps, RoundOptions, RoundTarget, SampleTarget
from lightning_bytescheduler.diloco.round_roster import LEAD_STEPS, WorkerProgress
from tests.diloco.simulated_run import Machine, simulate


class Plain(BatchScheduler):
    """Beside each decision, one by a look at every worker: as it was made before sums were kept."""

    checked = 0
    decided = 0
    worker_looks = 0

    def _decide(self, now: float) -> None:
        expected = self.plainly(now)
        worker_left = self.left
        assert worker_left == self.left_of(self._roster.members())
        super()._decide(now)
        found: Any = None
        if self.collecting:
            found = {w.name: w.send_after for w in self._roster.members() if w.is_training}, self._deadline - now
        assert found == expected
        Plain.checked += 1
        Plain.decided += found is not None

    def left_of(self, counted: list[WorkerProgress]) -> int:
        samples, steps = sum(worker.samples for worker in counted), [worker.steps for worker in counted]
        return self._target.left(samples=samples, steps=steps)

    def plainly(self, now: float) -> Any:
        members = [worker for worker in self._roster.members() if not worker.left or worker.arrived is not None]
        training = [
            worker
            for worker in members
            if worker.is_training and not worker.paused and now < worker.silent_at(self._options)
        ]
        # One who has begun late and has no step yet has its first one in the next round.
        told = [worker for worker in members if worker.is_training and not (worker.began_late and not worker.steps)]
        sent = [worker.transfer.mean for worker in self.workers.values() if worker.state.value != "lost"]
        transfer = 2 * max((seconds for seconds in sent if seconds is not None), default=0.0)
        if not training:
            if members and all(worker.paused and not worker.has_ended for worker in members):
                return None
            return {worker.name: None for worker in told}, pytest.approx(transfer)
        # One who has begun late is counted on for what it has shown, and not at all where steps are capped.
        paces = {
            worker.name: worker.pace(self._target.step_cap)
            for worker in training
            if not worker.began_late or (worker.steps and self._target.step_cap is None)
        }
        known = {name: pace for name, pace in paces.items() if pace is not None}
        left = self.left_of([*training, *(worker for worker in members if worker.has_ended)])
        if left <= 0:
            slowest = max(worker.step_time.seconds or 0.0 for worker in training)
            seconds = slowest * max(worker.in_flight + 1 for worker in training)
            return {worker.name: None for worker in told}, pytest.approx(2 * seconds + transfer)
        if not all(worker.step_time.is_known or worker.began_late for worker in training) or not known:
            return None
        slowest = max(pace.step_seconds for pace in known.values())
        in_time = max((pace.committed + 1) * pace.step_seconds for pace in known.values())
        lead = max(LEAD_STEPS * slowest, in_time)
        plan = self._target.plan(left, list(known.values()), now=now, within=lead)
        if plan is None:
            return None
        counters = {
            name: pace.steps + max(steps, pace.sure)
            for (name, pace), steps in zip(known.items(), plan.steps, strict=True)
        }
        return {worker.name: counters.get(worker.name) for worker in told}, pytest.approx(2 * plan.seconds + transfer)


speeds = st.one_of(st.floats(0.05, 0.4), st.sampled_from([0.05, 0.1, 0.2, 0.4]))
machines = st.builds(
    Machine,
    batch_size=st.integers(1, 64),
    step_seconds=speeds,
    jitter=st.sampled_from([0.0, 0.05, 0.3]),
    blips=st.sampled_from([0.0, 0.05]),
    warm_up=st.sampled_from([0.0, 2.0]),
    delay=st.sampled_from([0.0, 0.01, 0.5]),
    transfer=st.floats(0.0, 2.0),
    joins=st.one_of(st.just(0.0), st.floats(0.0, 30.0)),
    leaves=st.one_of(st.just(math.inf), st.floats(0.0, 60.0)),
    dies=st.one_of(st.just(math.inf), st.floats(0.0, 60.0)),
    slower_at=st.floats(0.0, 60.0),
    slower_by=st.sampled_from([1.0, 0.5, 4.0]),
)
targets = st.one_of(
    st.builds(SampleTarget, st.integers(1, 3000)), st.builds(FastestSteps, st.integers(1, 40)), st.just(FixedSteps(20))
)


@settings(deadline=None, max_examples=60)
@given(
    crowd=st.lists(machines, min_size=1, max_size=6),
    target=targets,
    seed=st.integers(0, 10_000),
    loss=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_the_decision_is_that_of_a_plain_look_at_all(
    crowd: list[Machine], target: RoundTarget, seed: int, loss: float
) -> None:
    """After every message, whether the end is decided, who sends after how many steps, and until when that is waited
    for."""
    options = RoundOptions(outer_steps=6, grace=4.0, silent_after=1.0, first_step_limit=20.0, start_workers=1)
    run = simulate([*crowd, Machine(batch_size=8, step_seconds=0.2)], target, options, seed=seed, loss=loss, kind=Plain)
    assert len(run.rounds) == 6


@pytest.mark.parametrize("target", [SampleTarget(20 * 8 * 30), FastestSteps(30), FixedSteps(30)], ids=str)
@pytest.mark.parametrize(("spread", "jitter"), [(1.0, 0.0), (1.0, 0.1), (4.0, 0.02)])
def test_a_crowd_is_decided_on_as_plainly_and_seldom_looked_at(
    monkeypatch: pytest.MonkeyPatch, target: RoundTarget, spread: float, jitter: float
) -> None:
    chance = random.Random(1)
    crowd = [Machine(batch_size=8, step_seconds=0.1 * chance.uniform(1, spread), jitter=jitter) for _ in range(20)]
    looks = 0
    plan = type(target).plan

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal looks
        looks += 1
        return plan(self, *args, **more)

    options = RoundOptions(outer_steps=2, start_workers=20)
    Plain.checked = 0
    simulate(crowd, target, options, kind=Plain)
    assert Plain.checked > 300
    monkeypatch.setattr(type(target), "plan", counted)
    run = simulate(crowd, target, options)
    reports = sum(worker.steps for record in run.rounds for worker in record.workers)
    # In lockstep to the last digit, all reports of an instant may lie within rounding of the end.
    assert looks < (0.1 if jitter else 0.4) * reports


@given(st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(-9, 9))), max_size=300))
def test_running_sums_and_maxima(changes: list[tuple[int, int | None]]) -> None:
    total, largest, tally, plain = RunningSum(), RunningMaximum(), Tally(), dict[int, int]()
    for key, value in changes:
        if value is None:
            for one in (total, largest, tally):
                one.discard(key)
            plain.pop(key, None)
        else:
            total.set(key, value)
            largest.set(key, value)
            tally.set(key, samples=value, steps=abs(value))
            plain[key] = value
        assert (total.total, len(total)) == (sum(plain.values()), len(plain))
        assert largest.value == max(plain.values(), default=None)
        steps = [abs(value) for value in plain.values()]
        assert tally.steps == ((min(steps), max(steps)) if steps else ())
        assert tally.samples == sum(plain.values())


def test_what_was_replaced_does_not_pile_up() -> None:
    largest = RunningMaximum()
    for value in range(10_000):
        largest.set(value % 3, -value)
    assert len(largest._heap) < 100


paces = st.builds(
    Pace,
    batch_size=st.integers(1, 40),
    step_seconds=st.floats(0.01, 5),
    began=st.floats(0, 10),
    steps=st.integers(0, 9),
    most=st.one_of(st.none(), st.integers(0, 30)),
    committed=st.integers(0, 3),
)


@settings(deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), paces, paces)), min_size=1, max_size=12),
    target=st.sampled_from([SampleTarget(1), FastestSteps(12), FixedSteps(12)]),
    lefts=st.lists(st.integers(1, 400), min_size=12, max_size=12),
    later=st.lists(st.floats(0, 3), min_size=12, max_size=12),
    wider=st.floats(0, 10),
)
def test_what_is_called_far_is_not_planned(changes, target, lefts, later, wider) -> None:
    outlook, known, now = target.outlook(), dict[int, Pace](), 10.0
    for (key, pace), left, seconds in zip(changes, lefts, later, strict=False):
        now += seconds
        if pace is None:
            outlook.discard(key)
            known.pop(key, None)
        else:
            outlook.set(key, pace)
            known[key] = pace
        if known:
            within = wider + max((pace.committed + 1) * pace.step_seconds for pace in known.values())
            if outlook.is_far(left, now=now, within=within):
                assert target.plan(left, list(known.values()), now=now, within=within) is None
