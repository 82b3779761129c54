"""A job of SLURM whose time is up: it saves in all ranks at once, is requeued, and goes on with the next batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from benchmarks.elastic_kills import expected_batches, steps_taken
from examples.elastic_torchrun import samples_by_batch

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}


def run_job(folder: Path, tasks: int, strategy: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.faults.fake_slurm", str(folder), str(tasks), strategy]
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("LOCAL_", "MASTER_"))}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)


def until(condition: Callable[[], bool], job: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        if job.poll() is not None or time.monotonic() > deadline:
            job.kill()
            pytest.fail((folder / "log").read_text())
        time.sleep(0.02)


def requeued_job(folder: Path, tasks: tuple[int, int], strategy: str) -> str:
    """A job that is signalled, requeued, ended and started again; returns what it has said."""
    job = run_job(folder, tasks[0], strategy)
    until(lambda: steps_taken(folder) > 20, job, folder)
    job.send_signal(signal.SIGUSR1)
    until((folder / "scontrol").exists, job, folder)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30.0) == 143, (folder / "log").read_text()
    assert (folder / "scontrol").read_text() == "requeue 4711\n"
    assert [file.name for file in folder.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert run_job(folder, tasks[1], strategy).wait(90.0) == 0, (folder / "log").read_text()
    return (folder / "log").read_text()


@pytest.mark.timeout(180)
def test_a_requeued_job_goes_on(tmp_path: Path) -> None:
    """With another number of tasks; both strategies at the same time, as they mostly wait."""
    jobs = [(tmp_path / "exact", (2, 1), "bytescheduler"), (tmp_path / "diloco", (2, 3), "diloco")]
    for folder, _, _ in jobs:
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda job: requeued_job(*job), jobs))
    assert all("Restoring states from the checkpoint path at" in text for text in said)
    exact, diloco = (torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=False) for folder, _, _ in jobs)
    assert exact["lightning_bytescheduler.position"]["batches_of_unfinished_step"] == 0
    assert exact["global_step"] * 2 == exact["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    assert samples_by_batch(tmp_path / "exact" / "record") == expected_batches(1_900, 32, 2)
    assert "lightning_bytescheduler.diloco" in diloco
