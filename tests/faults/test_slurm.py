"""A job of SLURM whose time is up: it saves in all ranks at once, is requeued, and goes on with the next batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
    assert job.wait(30.0) == 0, (folder / "log").read_text()
    assert (folder / "scontrol").read_text() == "requeue 4711\n"
    assert [file.name for file in folder.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert run_job(folder, tasks[1], strategy).wait(90.0) == 0, (folder / "log").read_text()
    return (folder / "log").read_text()


@pytest.mark.timeout(180)
def test_a_requeued_job_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    """From the checkpoint of the step in which all ranks have saved; with another number of tasks, too."""
    said = requeued_job(tmp_path, (2, 1), "bytescheduler")
    assert "Restoring states from the checkpoint path at" in said
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert saved["lightning_bytescheduler.position"]["batches_of_unfinished_step"] == 0
    assert saved["global_step"] * 2 == saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    assert samples_by_batch(tmp_path / "record") == expected_batches(1_900, 32, 2)


@pytest.mark.timeout(180)
def test_a_requeued_job_of_diloco_keeps_its_outer_state(tmp_path: Path) -> None:
    said = requeued_job(tmp_path, (2, 3), "diloco")
    assert "Restoring states from the checkpoint path at" in said
    assert "lightning_bytescheduler.diloco" in torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
