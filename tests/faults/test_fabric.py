"""A loop of Fabric ends: by itself, with a step that nobody has waited for, or because a rank has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("other", ["moved", "absent", "same"])
def test_ranks_load_the_same_checkpoint(other: str, tmp_path: Path) -> None:
    """Or none of them trains: each file, and each rank, is named."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    state = {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1).state_dict()}
    torch.save(state, tmp_path / "0.ckpt")
    if other == "moved":
        state["model"]["0.bias"][0] += 1e-3
    if other != "absent":
        torch.save(state, tmp_path / "1.ckpt")
    done = run(f"loads{tmp_path}")
    if other == "same":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    digest = r"one with digest \w{8} on rank"
    differs = {
        "moved": rf"checkpoint is {digest} 0 \(.*/0.ckpt\), but {digest} 1 \(.*/1.ckpt\)",
        "absent": "what comes next is the checkpoint on rank 0 .*/0.ckpt.*, but the first backward pass on rank 1",
    }
    found = re.findall(rf"\[rank(\d)\]: .*RanksDifferError: .*{differs[other]}", done.stderr)
    assert set(found) == {"0", "1"}, done.stderr
