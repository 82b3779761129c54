"""Simulated trainings with a simulated clock: what comes into force, and what is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_bytescheduler import CreditTuner, OptionError
from lightning_bytescheduler.ddp.decided_fit import PointInForce
from lightning_bytescheduler.tuning.record import TuningIdentity, read_record
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, SearchSpace, TuningPoint

PARAMETERS = 6_250_000
IDENTITY = TuningIdentity(parameters=PARAMETERS, bytes_per_parameter=4, workers=4, backend="gloo")
START = TuningPoint(credit=389_120, partition_size=97_280)
SPACE = SearchSpace.for_model(PARAMETERS, START)


class OneRank:
    """`AgreedValues` of a world of one; exchanges are when they would be."""

    def __init__(self) -> None:
        self.exchanges: list[int] = []
        self._next = 0
        self._posted: tuple[list[int], int] | None = None

    def before_step(
        self, step: int, wanted: Sequence[int], *, interval: int, seen: Sequence[int] = ()
    ) -> list[int] | None:
        if step < self._next:
            return None
        agreed, apart = self._posted or (None, 1)
        self._next = step + apart
        self._posted = [*wanted, *seen], interval
        self.exchanges.append(step)
        return agreed


class SimulatedFit:
    """Steps whose time depends on the point in force."""

    def __init__(
        self,
        tuner: CreditTuner,
        seconds: Callable[[TuningPoint], float],
        folder: Path | None = None,
        **given: Any,
    ) -> None:
        self.core = SimpleNamespace(credit=0, partition_size=0)
        self.tuner, self.seconds, self.now, self.step = tuner, seconds, 0.0, 0
        self.points: list[TuningPoint] = []
        self.changes: list[TuningPoint] = []
        self.values = OneRank()
        first = tuner.begin(
            **{
                "space": SPACE,
                "start": START,
                "identity": IDENTITY,
                "plain_ddp": True,
                "as_ddp": False,
                "folder": None if folder is None else str(folder),
                **given,
            }
        )
        self.in_force = PointInForce(
            core=self.core,  # type: ignore[arg-type]
            values=self.values,  # type: ignore[arg-type]
            point=first,
            tuner=tuner,
            device=torch.device("cpu"),
            clock=lambda: self.now,
        )

    @property
    def point(self) -> TuningPoint:
        if self.in_force.ddp_mode:
            return PLAIN_DDP
        return TuningPoint(credit=self.core.credit, partition_size=self.core.partition_size)

    def run(self, steps: int) -> SimulatedFit:
        for _ in range(steps):
            self.step += 1
            self.in_force.before_forward(self.step)
            self.in_force.before_forward(self.step)  # accumulated gradients
            if not self.points or self.points[-1] != self.point:
                self.changes.append(self.point)
            self.points.append(self.point)
            if self.in_force.ddp_mode:
                self.in_force.add_exposed(math.inf)
            # Steps differ a little, as they do.
            self.now += self.seconds(self.point) * (1 + 0.001 * (self.step % 7))
        return self


def faster_with_more_credit(point: TuningPoint) -> float:
    if point.is_plain_ddp:
        return 0.15
    return 0.1 + 0.05 * abs(1 - point.credit / 1_000_000)


def nothing_to_gain(point: TuningPoint) -> float:
    return 0.1


def best_as_ddp(point: TuningPoint) -> float:
    return 0.08 if point.is_plain_ddp else 0.1


@pytest.fixture
def tuner() -> Any:
    return CreditTuner()


def test_it_ends_as_plain_ddp_where_nothing_is_gained(tuner: CreditTuner) -> None:
    fit = SimulatedFit(tuner, nothing_to_gain).run(1200)
    assert tuner.is_settled
    assert tuner.current == fit.point == fit.changes[-1] == PLAIN_DDP


def test_it_finds_what_is_faster_and_costs_little(tuner: CreditTuner) -> None:
    fit = SimulatedFit(tuner, faster_with_more_credit).run(500)
    assert sum(map(faster_with_more_credit, fit.points)) <= 1.02 * 500 * faster_with_more_credit(START)
    fit.run(2000)
    assert tuner.is_settled
    assert faster_with_more_credit(fit.point) <= 1.03 * 0.1


def test_the_first_steps_are_at_the_start(tuner: CreditTuner) -> None:
    fit = SimulatedFit(tuner, faster_with_more_credit).run(29)
    assert set(fit.points) == {START}
    assert fit.changes == [START]


def test_exchanges_become_rare_when_a_choice_was_made_and_frequent_when_it_is_tuned_again(tuner: CreditTuner) -> None:
    fit = SimulatedFit(tuner, nothing_to_gain).run(1200)
    assert len([step for step in fit.values.exchanges if step > 1000]) <= 200 // 16 + 1
    fit.seconds = lambda point: 0.3 if point.is_plain_ddp else 0.2
    fit.run(2000)
    assert tuner.is_settled
    assert not fit.point.is_plain_ddp
    assert {entry.search for entry in tuner.entries} == {0, 1}


def test_a_blip_changes_nothing(tuner: CreditTuner) -> None:
    fit = SimulatedFit(tuner, nothing_to_gain).run(1200)
    fit.seconds = lambda point: 1.0
    fit.run(30)
    fit.seconds = nothing_to_gain
    fit.run(300)
    assert {entry.search for entry in tuner.entries} == {0}


def test_a_validation_now_and_then_changes_no_step_time(tuner: CreditTuner) -> None:
    """A fifth of the steps takes thirty times as long."""
    fit = SimulatedFit(tuner, nothing_to_gain)
    for _ in range(400):
        fit.run(5)
        fit.now += 3.0
    assert len([entry for entry in tuner.entries if entry.is_trial]) > 2
    assert max(entry.time.seconds for entry in tuner.entries if entry.is_trial) < 0.11


def test_steps_that_are_all_disturbed_alike_are_compared(tuner: CreditTuner) -> None:
    """One step an epoch, for example."""
    fit = SimulatedFit(tuner, lambda point: best_as_ddp(point) + 0.1).run(400)
    assert fit.point == PLAIN_DDP


def test_a_search_has_room_for_plain_ddp() -> None:
    with pytest.raises(OptionError, match=r"trials.*2 or more"):
        CreditTuner(trials=1)


def test_everything_is_in_the_record(tuner: CreditTuner, tmp_path: Path) -> None:
    SimulatedFit(tuner, nothing_to_gain, tmp_path / "run").run(1200)
    record = read_record(tmp_path / "run" / "tuning.jsonl")
    assert record == tuner.entries
    assert record[-1].kind == "chosen"


# `pytest.warns` repeats other warnings, not as SciPy's.
@pytest.mark.filterwarnings("ignore:np.find_common_type is deprecated:DeprecationWarning")
def test_a_record_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tuner = CreditTuner(record=folder / "record.jsonl")
    folder.rmdir()
    folder.write_text("")  # as when a disk goes away
    with pytest.warns(UserWarning, match="no longer written"):
        SimulatedFit(tuner, nothing_to_gain).run(1200)
    assert tuner.is_settled


@pytest.mark.parametrize("crash_after", [5, 60, 1500])
def test_a_crash_at_any_time_and_a_resumed_fit_that_goes_on(crash_after: int) -> None:
    tuner = CreditTuner()
    fit = SimulatedFit(tuner, faster_with_more_credit).run(crash_after)
    checkpoint: dict[str, Any] = {}
    tuner.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    kept = checkpoint["bytescheduler_tuning"]["current"]
    fit.run(3)  # lost
    known = len(tuner.entries)
    resumed = CreditTuner()
    resumed.on_load_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    again = SimulatedFit(resumed, faster_with_more_credit)
    assert again.point == TuningPoint(*kept), "before the first step"
    again.run(3000)
    assert resumed.is_settled
    assert faster_with_more_credit(again.point) <= 1.03 * 0.1
    assert not [entry for entry in resumed.entries if entry.kind == "start"] or crash_after <= 35
    assert known + len(resumed.entries) < 40


def test_a_checkpoint_of_another_model_says_nothing(tuner: CreditTuner) -> None:
    SimulatedFit(tuner, nothing_to_gain).run(1200)
    checkpoint: dict[str, Any] = {}
    tuner.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    checkpoint["bytescheduler_tuning"]["identity"]["parameters"] += 1
    other = CreditTuner()
    other.on_load_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    assert SimulatedFit(other, nothing_to_gain).point == START


def fixed(partition: int, credit: int = 400_000) -> dict[str, Any]:
    """Where only the credit is tuned, as a probe of the link suggests."""
    start = TuningPoint(credit=credit, partition_size=partition)
    return {"start": start, "space": SearchSpace.for_model(PARAMETERS, start, tunes_partitions=False)}


def test_a_probe_that_says_something_else_is_no_reason_to_begin_anew(tuner: CreditTuner) -> None:
    fit = SimulatedFit(tuner, faster_with_more_credit, **fixed(90_001)).run(2000)
    assert tuner.is_settled
    chosen = fit.point
    again = SimulatedFit(tuner, faster_with_more_credit, **fixed(110_003, credit=110_003))
    assert tuner.is_settled
    assert again.point == chosen
    identity = replace(IDENTITY, partition_size=110_003)
    by_hand = SimulatedFit(tuner, faster_with_more_credit, **fixed(110_003), identity=identity)
    assert by_hand.point == fixed(110_003)["start"], "what was chosen by hand is kept"
    assert not tuner.is_settled


def test_plain_ddp_of_a_checkpoint_is_not_used_where_steps_have_to_overlap(tuner: CreditTuner) -> None:
    SimulatedFit(tuner, best_as_ddp).run(1200)
    assert tuner.current.is_plain_ddp
    assert SimulatedFit(tuner, nothing_to_gain, plain_ddp=False).run(300).point != PLAIN_DDP


def test_a_checkpoint_beats_what_the_last_fit_knew(tuner: CreditTuner) -> None:
    fit = SimulatedFit(tuner, nothing_to_gain).run(20)
    checkpoint: dict[str, Any] = {}
    tuner.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    fit.run(1200)
    assert tuner.is_settled
    tuner.on_load_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    assert SimulatedFit(tuner, nothing_to_gain).point == START


def test_a_checkpoint_that_cannot_be_read_is_no_reason_to_stop() -> None:
    tuner = CreditTuner()
    tuner.on_load_checkpoint(None, None, {"bytescheduler_tuning": {"version": 99, "plain_ddp": True}})  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="begins anew"):
        assert SimulatedFit(tuner, nothing_to_gain).point == START


def test_the_next_fit_goes_on_with_what_this_one_knows(tuner: CreditTuner) -> None:
    SimulatedFit(tuner, nothing_to_gain).run(1200)
    assert SimulatedFit(tuner, nothing_to_gain).point == PLAIN_DDP
    assert tuner.is_settled
