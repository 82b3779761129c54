"""A loop of Fabric ends: by itself, with a step that nobody has waited for, or because a rank has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(how: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.fabric_script", how],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_last_step_lands_before_the_process_ends() -> None:
    """Weights that are read at exit are those of five steps, on both ranks; the last four were deferred."""
    done = run("ends")
    assert done.returncode == 0, done.stderr
    ends = re.findall(r"rank (\d) ends with (\S+), deferred (\d)", done.stdout)
    assert {rank for rank, _, _ in ends} == {"0", "1"}
    assert len({weights for _, weights, _ in ends}) == 1
    assert {deferred for _, _, deferred in ends} == {"4"}


@pytest.mark.parametrize("step", [1, 3])
def test_an_exception_on_one_rank_ends_the_other_with_its_name(step: int) -> None:
    """In the midst of the loop, or when the script of the other has come to its end, and waits for its last step."""
    done = run(f"fails in step {step}")
    assert done.returncode != 0
    assert "RankFailedError: Rank 1 failed: ValueError: sample 17 is broken" in done.stderr
