from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import parameter_servers

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(180)
def test_the_command_in_its_docstring() -> None:
    assert parameter_servers.__doc__ is not None
    (command,) = (shlex.split(line) for line in parameter_servers.__doc__.splitlines() if line.startswith("    "))
    done = subprocess.run(
        [sys.executable, *command[1:], "--steps", "4"],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The weights are those of DDP, bit for bit." in done.stdout
    assert "serving 2 workers, with 1 servers in all" in done.stdout
    assert "gradients: push and pull" in done.stdout
    for server in ("spare server 0", "server of worker 0", "server of worker 1"):
        assert server in done.stdout
