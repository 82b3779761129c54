"""The timeline of a fit in rounds, of workers launched together and of a coordinator's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.timeline.timeline import (
    CODEC,
    COMMUNICATION,
    INNER,
    QUEUE,
    STEP,
    STILL,
    WAIT,
    Trace,
    read_timeline,
)
from tests.diloco.coordinated_fits import coordinator_options, fit_coordinated
from tests.diloco.fits import calm_tower, fit_diloco
from tests.support.rank_pool import RankPool


def check(trace: Trace, *, worker: str, steps: int, rounds: int) -> None:
    """What holds for each worker's."""
    taken = trace.select(INNER)
    assert (len(taken), len({span.args["round"] for span in taken})) == (steps, rounds)
    assert {span.args["worker"] for span in taken} == {worker}
    assert all(span.args["bytes"] > 0 for span in trace.select(COMMUNICATION))
    own = [span for span in trace.spans if span.category in (INNER, WAIT, STEP, STILL)]
    assert all(one.end <= other.start for one, other in pairwise(own))  # one thread
    assert {span.name for span in trace.select(STEP)} == {"pseudo-gradient", "outer step"}


def test_workers_that_are_launched_together(diloco_ranks: RankPool, tmp_path: Path) -> None:
    results = diloco_ranks.run(
        fit_diloco,
        options={
            "inner_steps": 3,
            "equal_steps": True,
            "fragments": 2,
            "overlap_steps": 1,
            "timeline": str(tmp_path / "run.json"),
        },
        sizes=(300, 600),
        model=calm_tower,
        max_steps=9,
        limit_val_batches=1,
        val_check_interval=6,
        default_root_dir=str(tmp_path),
    )
    for rank, result in enumerate(results):
        trace = read_timeline(tmp_path / ("run.json" if rank == 0 else "run.rank1.json"))
        check(trace, worker=f"worker{rank}", steps=result.global_step, rounds=3)
        assert any(span.name == "validation" for span in trace.select(STILL))
        assert {span.name for span in trace.select(CODEC)} == {"encode", "add and encode", "decode"}
        pushes, pulls = trace.select(COMMUNICATION, "push"), trace.select(COMMUNICATION, "pull")
        assert len(pushes) == len(pulls) == len(trace.select(QUEUE))
        assert {span.args["task"] for span in pushes} == {"fragment 0", "fragment 1"}
        assert max(span.args["partition"] for span in pushes) > 0


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_workers_of_a_coordinator(overlap_steps: int, diloco_ranks: RankPool, tmp_path: Path) -> None:
    options = {"inner_steps": 4, "equal_steps": True, "outer_steps": 2, "overlap_steps": overlap_steps}
    with CoordinatorServer(coordinator_options(rounds={"start_workers": 2}, **options)) as server:
        workers = diloco_ranks.run(
            fit_coordinated,
            url=server.url,
            options={"timeline": str(tmp_path / "run.json")},
            default_root_dir=str(tmp_path),
        )
    for number, result in enumerate(workers):
        trace = read_timeline(tmp_path / f"run.w{number}.json")
        check(trace, worker=f"w{number}", steps=result.global_step, rounds=2)
        assert len(trace.select(COMMUNICATION, "push")) == len(trace.select(COMMUNICATION, "pull")) == 2
        assert {span.name for span in trace.select(CODEC)} == {"encode", "decode"}
