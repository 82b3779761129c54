"""A worker of DiLoCo that fails ends all, and is named by the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ranks import Ended, Nursery
from tests.support.cases import cases

_SCRIPT = Path(__file__).with_name("train_diloco.py")


def run(nursery: Nursery, folder: Path, cases: Sequence[dict[str, Any]]) -> list[list[Ended]]:
    def one(number: int, options: dict[str, Any]) -> list[Ended]:
        place = folder / str(number)
        place.mkdir()
        options = {"step": 10, **options}
        return nursery.run(_SCRIPT, options, world_size=options.get("ranks", 2), folder=place, timeout=120.0)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(len(cases)), cases))


def check_ends(cases: Sequence[dict[str, Any]], runs: Sequence[Sequence[Ended]], says: Sequence[str]) -> None:
    """Rank ``rank`` has failed, and each other rank says so."""
    for case, ranks, text in zip(cases, runs, says, strict=True):
        failed = case["rank"]
        assert ranks[failed].stamp("FAILED_AT") is not None, ranks[failed].log
        for survivor in (rank for number, rank in enumerate(ranks) if number != failed):
            assert survivor.code == 1, survivor.log
            assert f"Rank {failed} failed: {text}" in survivor.log, survivor.log
            assert "THREADS []" in survivor.log, survivor.log


SILENT = "it shows no sign of life"
FAILURES = {
    "in a round": {
        "its process is gone": {"kind": "SIGKILL", "rank": 0, "inner_steps": 2},
        SILENT: {"kind": "SIGKILL", "rank": 1, "inner_steps": 200_000},
        "ValueError: boom": {"kind": "raise", "rank": 1, "inner_steps": 2},
    },
    "asked to end, or at the first step": {
        "SIGTERM": {"kind": "SIGTERM", "rank": 0, "inner_steps": 2},
        SILENT: {"kind": "SIGKILL", "rank": 1, "inner_steps": 200_000, "step": 0},
    },
    "in a validation": {SILENT: {"kind": "SIGKILL", "rank": 1, "inner_steps": 2, "val_batches": 2}},
}


@pytest.mark.parametrize("failures", cases(FAILURES, quick={"in a round"}))
def test_the_worker_that_fails_is_named(nursery: Nursery, tmp_path: Path, failures: dict[str, dict[str, Any]]) -> None:
    """In short rounds, where the others wait for it, in one that would take an hour, and while all stand still."""
    ways = list(failures.values())
    check_ends(ways, run(nursery, tmp_path, ways), list(failures))


def test_a_sigterm_to_all_ends_all_as_lightning_does(nursery: Nursery, tmp_path: Path) -> None:
    """Also a worker that waits for another one's update: that one has ended for the same reason, and not failed."""
    options = {"kind": "SIGTERM", "rank": 0, "step": 10, "inner_steps": 2, "everybody": str(tmp_path)}
    for rank in nursery.run(_SCRIPT, options, world_size=2, folder=tmp_path, timeout=120.0):
        assert rank.code == 143, rank.log
        # Torch's store says so of its connections, where rank 0 has gone first.
        log = re.sub(r".*failed on SocketImpl.*", "", rank.log)
        # The first one to end says so; the other may hear of it before its own signal is handled.
        assert "failed" not in re.sub(r"Rank \d failed: SIGTERMException", "", log), rank.log
        assert "RankFailedError" not in rank.log
        assert "THREADS []" in rank.log, rank.log


@pytest.mark.slow
def test_any_rank_of_a_worker_is_named(nursery: Nursery, tmp_path: Path) -> None:
    """The second worker's leader, and its other rank, which exchanges no messages with other workers."""
    ways = [
        {"kind": kind, "rank": rank, "inner_steps": 8, "ranks": 4, "groups": {"inner": {"strategy": inner, "size": 2}}}
        for kind, rank, inner in (("SIGKILL", 2, "bytescheduler"), ("SIGTERM", 3, "ddp"))
    ]
    check_ends(ways, run(nursery, tmp_path, ways), ["it shows no sign of life", "SIGTERM"])


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (0, "ValueError: no space is left"),
        pytest.param(1, SILENT, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_fails_when_all_have_trained_is_named_soon(
    rank: int, says: str, nursery: Nursery, tmp_path: Path
) -> None:
    """The first worker in its last checkpoint, and another one that is asked for its state there."""
    ends = {"kind": "", "step": 10**9, "inner_steps": 2, "groups": {"outer_steps": 2}, "timeout": 1800, "native": 2.0}
    ways = [{**ends, "rank": rank, "in_the_end": rank, "last": str(tmp_path / "last")}]
    check_ends(ways, run(nursery, tmp_path, ways), [says])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "SIGTERM"])
def test_a_fit_that_fails_leaves_its_last_whole_checkpoint(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    """In a round's middle, three steps behind the last checkpoint; none is written that is of different moments."""
    saved = tmp_path / "saved"
    options = {"kind": kind, "rank": 0, "step": 8, "inner_steps": 20, "checkpoint": str(saved)}
    ranks = nursery.run(_SCRIPT, options, world_size=2, folder=tmp_path, timeout=120.0)
    assert "FAILED_AT" in ranks[0].log
    assert f"as it would be of different moments. The last whole one is {saved}/" in ranks[0].log
    assert sorted(file.name for file in saved.iterdir()) == ["last.ckpt", "step=5.ckpt"]
    if kind != "raise":
        return
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    options = {**options, "rank": -1, "resume": str(saved / "last.ckpt"), "max_steps": 30, "checkpoint": str(resumed)}
    for rank in nursery.run(_SCRIPT, options, world_size=2, folder=resumed, timeout=120.0):
        assert rank.code == 0, rank.log
        assert "another strategy" not in rank.log
