"""The example of elastic training, whose ranks and machines are killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(180)
def test_each_sample_counts_once_whoever_dies() -> None:
    """A rank, a machine, which leaves one rank; batches are drawn ahead, steps accumulate, validations are between."""
    options = [
        "--kills",
        "3",
        "--nodes",
        "2",
        "--machines",
        "0.5",
        "--epochs",
        "2",
        "--samples",
        "1900",
        "--every",
        "3",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.elastic_kills", *options, "--accumulate", "2", "--loader-workers", "1"],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Each sample once an epoch, in one process's batches: yes." in done.stdout
    happened = json.loads(done.stdout[: done.stdout.index("}") + 1])
    assert happened["rank"] + happened["machine"] == 3
    assert happened["world sizes"][0] == 2
    assert happened["world sizes"][-1] == 1, "a machine has been lost"
    middles = [place for place in happened["first epoch, batch"] if not place.endswith(", 0")]
    assert len(middles) > 1, "epochs went on where they stood"
    apart = re.search(r"weights differ by (\S+) of a tensor's norm", done.stdout)
    assert apart is not None
    assert float(apart[1]) < 1e-5
