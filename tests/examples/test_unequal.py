from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import unequal

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(180)
def test_the_command_in_its_docstring() -> None:
    assert unequal.__doc__ is not None
    (command,) = (shlex.split(line) for line in unequal.__doc__.splitlines() if line.startswith("    "))
    done = subprocess.run(
        [sys.executable, *command[1:], "--steps", "25"],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: samples by rank (32, 32)" in done.stdout
    assert "batches of 64 samples, by rank (" in done.stdout
    last = done.stdout.rpartition("samples by rank (")[2].partition(")")[0]
    slow, fast = map(int, last.split(", "))
    assert slow + fast == 64
    assert slow < fast, "the slow one was given less"
