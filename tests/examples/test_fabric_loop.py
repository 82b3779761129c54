from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_it_says_that_weights_are_ddps() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.fabric_loop", "--epochs", "2"],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the weights are DDP's, bit for bit" in done.stdout
    assert "97% of the updates crossed the step boundary" in done.stdout
