"""A search that fails, and points that are measured again."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.tuning import search
from lightning_bytescheduler.tuning.search import Exploration, TuningOptions
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, TuningPoint
from tests.tuning.test_decisions import OPTIMUM, bowl
from tests.tuning.training import SPACE, START, Training, trial, tuning


def test_a_search_that_fails_ends_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args, **kwargs):
        raise ValueError("not positive definite")

    monkeypatch.setattr(search, "propose", fail)
    training = Training(tuning(), bowl(OPTIMUM)).run(500)
    assert training.tuning.is_settled
    assert caplog.text.count("no more is tried") == 1
    assert "ValueError: not positive definite" in caplog.text
    assert training.tuning.current == training.tuning.entries[0].point


def test_plain_ddp_is_measured_again_however_many_points_are_faster_by_a_hair() -> None:
    explored = Exploration(SPACE, first=[START], options=TuningOptions())
    for number, seconds in enumerate((0.3, 0.3001, 0.3002, 0.3003)):
        explored.trials.append(trial(TuningPoint(credit=2**20 + number, partition_size=97_280), seconds, 0.0003))
    fastest = explored.trials[0].point
    explored.trials.append(trial(PLAIN_DDP, 0.304, 0.0003, outcome="abandoned"))
    assert explored.contenders() == [fastest, PLAIN_DDP]
    explored.trials[-1] = trial(PLAIN_DDP, 0.3005, 0.0003)
    assert explored.contenders() == [fastest, PLAIN_DDP]
    explored.trials[-1] = trial(PLAIN_DDP, 0.33, 0.0003)
    assert explored.contenders() == [fastest]
    explored.trials[-1] = trial(PLAIN_DDP, 0.28, 0.0003)
    assert explored.contenders() == [PLAIN_DDP]
