from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_bytescheduler.checking.procedure import investigate
from lightning_bytescheduler.checking.report import CheckReport
from tests.checking.runs import NAMES, Trainings


def test_what_is_the_same_takes_four_runs(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path)
    findings = investigate(trainings, steps=10)
    assert findings.verdict == "identical"
    assert [spec.strategy for spec, _ in trainings.made] == ["ddp", "configured", "ddp", "strict"]
    report = CheckReport(findings=findings, command="train.py", steps=10)
    assert report.exit_code == 0
    assert report.headline() == "identical, 1.50x faster"
    assert "Step times are those of deterministic algorithms" in report.text()
    assert "OMP_NUM_THREADS" not in report.text()


@pytest.mark.parametrize("stale", [(0,), (5,), (7,)])
def test_the_parameter_that_is_read_unseen_is_found(stale: tuple[int, ...], tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, stale=stale)
    findings = investigate(trainings, steps=10)
    assert findings.verdict == "different"
    assert findings.first is not None
    assert findings.first.step == 4
    assert findings.cause is not None
    assert findings.cause.parameters == (NAMES[stale[0]],)
    assert findings.cause.narrowed
    assert len(trainings.made) <= 4 + 2 + 1 + 3 + 1  # as it is, traced, all, halves, and to be sure
    report = CheckReport(findings=findings, command="train.py", steps=10)
    assert report.exit_code == 1
    assert report.headline().startswith("different from step 4 on")
    assert f"{NAMES[stale[0]]!r} is read before the update of the last step has landed" in report.text()


def test_two_parameters_that_are_read_unseen_are_no_single_culprit(tmp_path: Path) -> None:
    findings = investigate(Trainings(tmp_path, stale=(1, 6)), steps=10)
    assert findings.cause is not None
    assert set(findings.cause.parameters) >= {NAMES[1], NAMES[6]}
    assert not findings.cause.narrowed


def test_the_search_ends_when_its_time_is_up(tmp_path: Path) -> None:
    now = iter(range(0, 10_000, 50))
    findings = investigate(Trainings(tmp_path, stale=(5,)), steps=10, search_seconds=60, clock=lambda: float(next(now)))
    assert findings.cause is not None
    assert NAMES[5] in findings.cause.parameters
    assert not findings.cause.narrowed


def test_a_difference_that_no_deferral_explains_has_no_cause(tmp_path: Path) -> None:
    def always(spec, record):
        return record if not spec.scheduled else replace(record, losses=("0x1p+0", *record.losses[1:], "0x1p+9"))

    findings = investigate(Trainings(tmp_path, change=always), steps=10)
    assert findings.verdict == "different"
    assert findings.cause is None


def test_what_does_not_differ_again_depends_on_timing(tmp_path: Path) -> None:
    def once(spec, record):
        return record if spec.strategy != "configured" else replace(record, weights={**record.weights, NAMES[0]: "x"})

    def untraced(spec, record):
        return record if spec.traced else once(spec, record)

    findings = investigate(Trainings(tmp_path, change=untraced), steps=10)
    assert findings.verdict == "different"
    assert findings.again is False
    assert "depends on timing" in CheckReport(findings=findings, command="c", steps=10).text()


def test_ddp_that_differs_from_itself_is_not_blamed_on_anybody(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, noisy=True)
    findings = investigate(trainings, steps=10)
    assert findings.verdict == "not reproducible"
    assert len(trainings.made) == 3
    report = CheckReport(findings=findings, command="c", steps=10)
    assert report.exit_code == 2
    assert report.headline().startswith("could not check: the script is not reproducible under ddp itself from step 1")
    assert "OMP_NUM_THREADS=1 may help" in report.text()


def test_a_metric_that_changes_by_itself_is_left_out(tmp_path: Path) -> None:
    times = iter("abcdefgh")

    def with_time(_, record):
        return replace(record, metrics={**record.metrics, "samples_per_second": next(times)})

    findings = investigate(Trainings(tmp_path, change=with_time), steps=10)
    assert findings.verdict == "identical"
    assert findings.changing_metrics == ("samples_per_second",)


def test_a_metric_that_differs_counts(tmp_path: Path) -> None:
    def other(spec, record):
        return record if not spec.scheduled else replace(record, metrics={"loss": "0x1p+7"})

    trainings = Trainings(tmp_path, change=other)
    report = CheckReport(findings=investigate(trainings, steps=10), command="c", steps=10)
    assert report.exit_code == 1
    assert len(trainings.made) == 4  # no step differs, so there is none to look for
    assert report.headline() == "different in what is logged: 'loss'; weights are identical"


@pytest.mark.parametrize("setup", [{"world_size": 4}, {"needs_norm": True}])
def test_another_order_of_sums_is_rounding(setup: dict, tmp_path: Path) -> None:
    findings = investigate(Trainings(tmp_path, sum_order=1e-7, **setup), steps=10)
    assert findings.verdict == "rounding"
    report = CheckReport(findings=findings, command="c", steps=10)
    assert report.exit_code == 0
    assert report.headline().startswith("equal to rounding (largest relative difference")


def test_the_same_is_a_difference_where_the_order_is_one(tmp_path: Path) -> None:
    assert investigate(Trainings(tmp_path, sum_order=1e-7), steps=10).verdict == "different"


def test_more_ranks_are_held_against_the_same_partitions(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, sum_order=1e-7, world_size=4, stale=(5,))
    findings = investigate(trainings, steps=10)
    assert "synchronised" in [spec.strategy for spec, _ in trainings.made]
    assert findings.cause is not None
    assert findings.cause.parameters == (NAMES[5],)


def test_what_is_beyond_rounding_is_found_under_norm_clipping(tmp_path: Path) -> None:
    findings = investigate(Trainings(tmp_path, sum_order=1e-7, needs_norm=True, stale=(5,)), steps=10)
    assert findings.verdict == "different"
    assert findings.first is not None
    assert findings.first.step == 4
    assert findings.cause is not None
    assert findings.cause.parameters == (NAMES[5],)


@pytest.mark.parametrize(
    ("strategy", "verdict", "code"), [("ddp", "unchecked", 2), ("configured", "fails", 1), ("strict", "fails", 1)]
)
def test_who_fails_is_told(strategy: str, verdict: str, code: int, tmp_path: Path) -> None:
    report = CheckReport(
        findings=investigate(Trainings(tmp_path, error={strategy: "ValueError: boom"}), steps=10), command="c", steps=10
    )
    assert report.verdict == verdict
    assert report.exit_code == code
    assert "boom" in report.headline()
