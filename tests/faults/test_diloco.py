"""A worker of DiLoCo that fails ends all, and is named by the others."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.ranks import Ended, Nursery

_SCRIPT = Path(__file__).with_name("train_diloco.py")
_BOUND_S = 25.0


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("SIGKILL", ["Rank 0 failed: its process is gone", "Rank 1 failed: it shows no sign of life"]),
        ("raise", ["Rank 0 failed: ValueError: boom", "Rank 1 failed: ValueError: boom"]),
        ("SIGTERM", ["Rank 0 failed: SIGTERM", "Rank 1 failed: SIGTERM"]),
    ],
)
def test_whoever_fails_is_named(kind: str, says: list[str], nursery: Nursery, tmp_path: Path) -> None:
    """In short rounds, where the others wait for it, and in one that would take a minute."""

    def run(rank: int, inner_steps: int) -> list[Ended]:
        folder = tmp_path / f"{rank}-{inner_steps}"
        folder.mkdir()
        options = {"kind": kind, "rank": rank, "step": 10, "inner_steps": inner_steps}
        return nursery.run(_SCRIPT, options, world_size=2, folder=folder, timeout=60.0)

    cases = [(0, 2), (1, 2), (1, 2000)]
    with ThreadPoolExecutor(len(cases)) as pool:
        runs = list(pool.map(lambda case: run(*case), cases))
    for (failed, _), ranks in zip(cases, runs, strict=True):
        start = ranks[failed].stamp("FAILED_AT")
        survivor = ranks[1 - failed]
        assert start is not None, ranks[failed].log
        assert survivor.code == 1, survivor.log
        assert survivor.ended - start < _BOUND_S, survivor.log
        assert says[failed] in survivor.log, survivor.log
        assert "THREADS []" in survivor.log, survivor.log


def test_a_sigterm_to_all_ends_all_as_lightning_does(nursery: Nursery, tmp_path: Path) -> None:
    """Also who waits for another one's part of the round: that has ended for the same reason, and not failed."""
    options = {"kind": "SIGTERM", "rank": 0, "step": 10, "inner_steps": 2, "everybody": str(tmp_path)}
    for rank in nursery.run(_SCRIPT, options, world_size=2, folder=tmp_path, timeout=60.0):
        assert rank.code == 143, rank.log
        # Torch's store says so of its connections, where rank 0 has gone first.
        log = re.sub(r".*failed on SocketImpl.*", "", rank.log)
        # Whoever ends first says so, and the other one hears of it before its own signal is handled, or does not.
        assert "failed" not in re.sub(r"Rank \d failed: SIGTERMException", "", log), rank.log
        assert "RankFailedError" not in rank.log
        assert "THREADS []" in rank.log, rank.log


def test_any_rank_of_a_worker_is_named(nursery: Nursery, tmp_path: Path) -> None:
    """The second worker's leader, and its other rank, which speaks with no other worker."""
    cases = [
        ("SIGKILL", 2, "bytescheduler", "it shows no sign of life"),
        ("SIGKILL", 3, "ddp", "it shows no sign of life"),
        ("SIGTERM", 3, "ddp", "SIGTERM"),
    ]

    def run(kind: str, rank: int, inner: str) -> list[Ended]:
        folder = tmp_path / f"{kind}-{rank}"
        folder.mkdir()
        groups = {"inner": {"strategy": inner, "size": 2}}
        options = {"kind": kind, "rank": rank, "step": 10, "inner_steps": 8, "groups": groups}
        return nursery.run(_SCRIPT, options, world_size=4, folder=folder, timeout=60.0)

    with ThreadPoolExecutor(len(cases)) as pool:
        runs = list(pool.map(lambda case: run(*case[:3]), cases))
    for (_, failed, _, says), ranks in zip(cases, runs, strict=True):
        start = ranks[failed].stamp("FAILED_AT")
        assert start is not None, ranks[failed].log
        for survivor in (ranks[rank] for rank in range(4) if rank != failed):
            assert survivor.code == 1, survivor.log
            assert survivor.ended - start < _BOUND_S, survivor.log
            assert f"Rank {failed} failed: {says}" in survivor.log, survivor.log
            assert "THREADS []" in survivor.log, survivor.log


@pytest.mark.parametrize("kind", ["raise", "SIGTERM"])
def test_a_fit_that_fails_leaves_its_last_whole_checkpoint(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    """In a round's middle, three steps behind the last checkpoint; none is written that is of no one moment."""
    saved = tmp_path / "saved"
    options = {"kind": kind, "rank": 0, "step": 8, "inner_steps": 20, "checkpoint": str(saved)}
    ranks = nursery.run(_SCRIPT, options, world_size=2, folder=tmp_path, timeout=60.0)
    assert "FAILED_AT" in ranks[0].log
    assert f"writes no checkpoint, as it would be of no one moment. The last whole one is {saved}/" in ranks[0].log
    assert sorted(file.name for file in saved.iterdir()) == ["last.ckpt", "step=5.ckpt"]
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    options = {**options, "rank": -1, "resume": str(saved / "last.ckpt"), "max_steps": 30, "checkpoint": str(resumed)}
    for rank in nursery.run(_SCRIPT, options, world_size=2, folder=resumed, timeout=60.0):
        assert rank.code == 0, rank.log
        assert "another strategy" not in rank.log
