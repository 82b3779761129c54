from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import tuning
from lightning_bytescheduler.cli import main

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(330)
def test_the_commands_in_its_docstring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning.__doc__ is not None
    lines = [line.strip() for line in tuning.__doc__.splitlines() if line.startswith("    ")]
    train, show = (shlex.split(line.replace("tuned", str(tmp_path / "tuned"))) for line in lines)
    assert train[0] == "python"
    done = subprocess.run(
        [sys.executable, *train[1:]],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "start, credit" in done.stdout
    assert "plain DDP" in done.stdout
    assert "Settled on" in done.stdout
    assert show[0] == "lightning-bytescheduler"
    assert main(show[1:]) == 0
    assert "start" in capsys.readouterr().out
    assert (tmp_path / "tuned" / "search.png").read_bytes().startswith(b"\x89PNG")
