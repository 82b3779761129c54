from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.lightning_suite.outcome import Outcome, summarise
from tests.lightning_suite.report import SuiteReport
from tests.lightning_suite.skips import Skip

_TRAINED = Outcome("passed", made=1, ranks=2, steps=4, overlapped=3)


def _shown(report: SuiteReport) -> str:
    text = io.StringIO()
    report.show(Console(file=text, width=160))
    return text.getvalue()


def test_holds_when_all_passed_and_some_trained() -> None:
    assert SuiteReport({"a": _TRAINED, "b": Outcome("passed")}).holds


@pytest.mark.parametrize("result", ["failed", "lost"])
def test_a_failure_counts_unless_ddp_fails_as_well(result: str) -> None:
    report = SuiteReport({"a": _TRAINED, "b": Outcome(result, "E   boom")})
    assert not report.holds
    assert "FAILED, but pass with ddp:\n  b: boom" in _shown(report)

    report.with_ddp["b"] = Outcome("passed")
    assert not report.holds

    report.with_ddp["b"] = Outcome("failed")
    assert report.holds
    assert "Fail with ddp itself too:\n  b: boom" in _shown(report)


def test_does_not_hold_when_nothing_trained_or_a_skip_is_stale_or_a_file_is_missing() -> None:
    assert not SuiteReport({"b": Outcome("passed", made=1)}).holds
    assert not SuiteReport({"a": _TRAINED}, stale=[Skip("x", "why")]).holds
    assert not SuiteReport({"a": _TRAINED}, unreadable={"file": "no module"}).holds


def test_tests_that_never_made_the_strategy_are_listed_apart() -> None:
    text = _shown(SuiteReport({"a": _TRAINED, "idle_test": Outcome("passed")}))

    assert "prove nothing:\n  idle_test\n" in text
    assert [
        word for word in next(line for line in text.splitlines() if "passed" in line).split() if word.isdigit()
    ] == [
        "2",
        "1",
        "1",
        "1",
    ]


def test_events_of_all_ranks_make_one_outcome() -> None:
    events = [
        {"kind": "collected", "test": "other"},
        {"kind": "started", "test": "a"},
        {"kind": "made", "test": "a"},
        {"kind": "scheduled", "test": "a", "ranks": 2},
        {"kind": "trained", "test": "a", "steps": 4, "overlapped": 3},
        {"kind": "trained", "test": "a", "steps": 1, "overlapped": 0},
        {"kind": "passed", "test": "a", "message": ""},
        {"kind": "started", "test": "b"},
        {"kind": "failed", "test": "b", "message": "in the test"},
        {"kind": "passed", "test": "b", "message": "when it was cleaned up"},
        {"kind": "started", "test": "c"},
    ]

    assert summarise(events) == {"a": _TRAINED, "b": Outcome("failed", "in the test"), "c": Outcome("lost")}
