"""The example's three terminals: a coordinator and two workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    rounds = ["--samples-per-round=64", "--outer-steps=4", "--wire-dtype=bf16", "--start-workers=2"]
    coordinator = start("lightning_bytescheduler", "coordinator", "--bind=127.0.0.1:0", *rounds)
    workers: list[subprocess.Popen[str]] = []
    try:
        assert coordinator.stdout is not None
        url = next(word for line in coordinator.stdout for word in line.split() if word.startswith("http://")).rstrip(
            ".,"
        )
        for number, slowness in enumerate(("1", "3")):
            output = f"--output={tmp_path / str(number)}"
            workers.append(start("examples.coordinator", "--tiny", f"--url={url}", f"--slowness={slowness}", output))
        said = [worker.communicate(timeout=120)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)
        assert all("in 4 rounds" in one for one in said), said
        assert sum("which leads" in one for one in said) == 1
        coordinator.send_signal(signal.SIGINT)
        coordinator.communicate(timeout=20)
    finally:
        for process in (coordinator, *workers):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
