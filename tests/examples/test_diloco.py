"""The example trains, and shows what each worker did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_bytescheduler.cli import main

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    arguments = ["--tiny", "--steps=24", "--windows=64", "--fragments=2", "--overlap=1", f"--output={tmp_path}"]
    ran = subprocess.run(
        [sys.executable, "-m", "examples.diloco", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "validation loss " in ran.stdout
    # Four rounds of six steps of the fastest; on a busy machine the end of a round may be decided a step sooner.
    found = re.search(r"worker0: (2\d) steps, (\d+) windows", ran.stdout)
    assert found is not None, ran.stdout
    assert 20 <= int(found[1]) <= 25
    assert int(found[2]) == 8 * int(found[1])
    assert "worker1: " in ran.stdout
    assert "Traceback" not in ran.stderr
    assert main(["rounds", str(tmp_path / "rounds.jsonl"), "--png", str(tmp_path / "rounds.png")]) == 0
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")
