from __future__ import annotations

import math

import pytest

from lightning_bytescheduler.gradients.mode_trial import ModeTrial


def trained(trial: ModeTrial, *, overlapped: float, as_ddp: float, slowest: float = 0.0) -> list[bool]:
    """Go through a trial, and return the mode of each step; the first step after a change takes ``slowest``."""
    modes: list[bool] = []
    step = 1
    while not trial.is_due(step):
        mode = trial.as_ddp(step)
        changed = bool(modes) and modes[-1] != mode
        modes.append(mode)
        trial.note(step, slowest if changed and slowest else as_ddp if mode else overlapped)
        step += 1
    return modes


def test_ways_take_turns_after_a_warm_up() -> None:
    modes = trained(ModeTrial(warm_up=3, turn=2, turns=4), overlapped=1.0, as_ddp=1.0)
    assert modes == [False] * 3 + [False, False, True, True] * 2


@pytest.mark.parametrize(
    ("overlapped", "as_ddp", "prefers_ddp"), [(1.0, 1.2, False), (1.2, 1.0, True), (1.0, 1.0, True), (0.98, 1.0, False)]
)
def test_the_faster_way_is_kept_and_a_tie_is_ddps(overlapped: float, as_ddp: float, prefers_ddp: bool) -> None:
    trial = ModeTrial()
    trained(trial, overlapped=overlapped, as_ddp=as_ddp, slowest=50.0)
    assert trial.medians() == (overlapped, as_ddp), "the first step of a turn does not count"
    assert trial.prefers_ddp() == prefers_ddp
    assert trial.settle(prefers_ddp)
    assert trial.as_ddp(trial.decision_step - 1) in (True, False)
    assert trial.as_ddp(100) == prefers_ddp


def test_it_is_tried_again_and_told_only_when_it_changes() -> None:
    trial = ModeTrial(warm_up=2, turn=2, turns=2, again_after=10)
    assert trial.decision_step == 7
    assert trial.settle(False)
    assert not any(trial.as_ddp(step) for step in range(7, 17))
    assert [trial.as_ddp(step) for step in range(17, 21)] == [False, False, True, True]
    assert trial.decision_step == 21
    assert not trial.settle(False)
    assert trial.settle(True)


def test_without_figures_nothing_changes() -> None:
    trial = ModeTrial()
    assert all(map(math.isnan, trial.medians()))
    assert not trial.prefers_ddp()
