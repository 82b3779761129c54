"""Ranks do jobs in turn, on loopback; and ranks that fail are an error."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from benchmarks.ranks import MeasurementFailed, Place, in_turns, on_own_processors, ranks_of


def say(job: dict[str, Any]) -> dict[str, Any]:
    """What a rank says that it is, for a job."""
    if job.get("fails") == int(os.environ["RANK"]):
        raise RuntimeError("as asked")
    return {"number": job["number"], **{name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK")}}


@pytest.mark.slow
@pytest.mark.parametrize(("each", "local", "node"), [(1, "0", "1"), (2, "1", "0")])
def test_jobs_are_done_in_turn_by_all_ranks(each: int, local: str, node: str) -> None:
    answers = list(in_turns(Place(ranks=2, each=each), say, [{"number": 1}, {"number": 2}]))
    assert [[one["number"] for one in some] for some in answers] == [[1, 1], [2, 2]]
    assert answers[0][1] == {"number": 1, "RANK": "1", "LOCAL_RANK": local, "NODE_RANK": node}


@pytest.mark.slow
def test_sets_are_done_at_the_same_time() -> None:
    with ranks_of(Place(ranks=1), say, [{"number": 1}], [{"number": 2}]) as ranks:
        assert [next(ranks.results(number))[0]["number"] for number in (1, 0)] == [2, 1]


@pytest.mark.slow
def test_ranks_that_fail_are_an_error() -> None:
    with pytest.raises(MeasurementFailed, match=r"ended with codes .* in job 1"):
        list(in_turns(Place(ranks=2), say, [{"number": 1}, {"number": 2, "fails": 1}]))


def test_ranks_have_processors_of_their_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 7})
    monkeypatch.setattr(shutil, "which", lambda _: "taskset")
    assert on_own_processors(["run"], 1, 2) == ["taskset", "--cpu-list", "2,5", "run"]
    assert on_own_processors(["run"], 0, 6) == ["run"]
