"""From where on a difference counts: between step times, links, and numbers of steps."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.tuning.record import StepTimeEstimate, TuningIdentity
from lightning_bytescheduler.tuning.search import DriftDetector
from lightning_bytescheduler.tuning.sizes import LinkEstimate


@pytest.mark.parametrize(("seconds", "lasts"), [(1.08, False), (1.12, True), (0.92, False), (0.88, True)])
def test_a_change_of_a_tenth_is_worth_another_search(seconds: float, lasts: bool) -> None:
    detector = DriftDetector(StepTimeEstimate.of([1.0] * 50))
    assert not any(detector.step_took(seconds) for _ in range(59))  # three windows of 20 steps
    assert detector.step_took(seconds) == lasts


@pytest.mark.parametrize(("factor", "same"), [(1.9, True), (2.1, False), (1 / 1.9, True), (1 / 2.1, False)])
def test_probes_of_one_link_differ_by_less_than_two(factor: float, same: bool) -> None:
    def identity(beta: float) -> TuningIdentity:
        link = LinkEstimate(alpha=0.0, beta=beta)
        return TuningIdentity(parameters=10**8, bytes_per_parameter=4, workers=4, backend="gloo", link=link)

    assert identity(1e-8 * factor).matches(identity(1e-8)) == same


def test_the_deviation_of_less_than_eight_steps_is_no_estimate() -> None:
    assert StepTimeEstimate.of([1.0] * 7, usual_noise=0.1).noise == pytest.approx(0.1)
    assert StepTimeEstimate.of([1.0] * 8, usual_noise=0.1).noise == pytest.approx(0.002)
