"""A job of SLURM whose time is up: it saves in all ranks at once, is requeued, and goes on with the next batch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from examples.elastic_torchrun import samples_by_batch
from tests.faults.elastic_kills import expected_batches, steps_taken
from tests.faults.ranks import Nursery

SCRIPT = Path(__file__).with_name("train_slurm.py")
SCONTROL = '#!/bin/sh\necho "$@" >> "{folder}/scontrol"\n'


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def requeued_job(nursery: Nursery, folder: Path, tasks: tuple[int, int], strategy: str) -> str:
    """A job that is signalled, requeued, ended and started again; returns what it has said then."""

    def signalled(processes: list[int]) -> None:
        until(lambda: steps_taken(folder) > 20)
        for process in processes:
            os.kill(process, signal.SIGUSR1)
        until((folder / "scontrol").exists)
        for process in processes:
            os.kill(process, signal.SIGTERM)

    script = folder / "bin" / "scontrol"
    script.parent.mkdir(parents=True)
    script.write_text(SCONTROL.format(folder=folder))
    script.chmod(0o755)
    options = {"folder": str(folder), "strategy": strategy}
    ended = nursery.run(SCRIPT, options, world_size=tasks[0], folder=folder, timeout=120.0, meanwhile=signalled)
    assert [rank.code for rank in ended] == [143] * tasks[0], ended[0].log
    assert (folder / "scontrol").read_text() == "requeue 4711\n"
    assert [file.name for file in folder.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    ended = nursery.run(SCRIPT, options, world_size=tasks[1], folder=folder, timeout=120.0)
    assert [rank.code for rank in ended] == [0] * tasks[1], ended[0].log
    return ended[0].log


@pytest.mark.slow
def test_a_requeued_job_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    """With another number of tasks; both strategies at the same time, as they mostly wait."""
    jobs = [(tmp_path / "exact", (2, 1), "bytescheduler"), (tmp_path / "diloco", (2, 3), "diloco")]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda job: requeued_job(nursery, *job), jobs))
    assert all("Restoring states from the checkpoint path at" in text for text in said)
    exact, diloco = (torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=False) for folder, _, _ in jobs)
    assert exact["lightning_bytescheduler.position"]["batches_of_unfinished_step"] == 0
    assert exact["global_step"] * 2 == exact["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    assert samples_by_batch(tmp_path / "exact" / "record") == expected_batches(1_900, 32, 2)
    assert "lightning_bytescheduler.diloco" in diloco
