"""A job of SLURM, as far as its tasks can tell: ``python -m tests.faults.fake_slurm FOLDER TASKS``.

``srun``'s part: each task is a process with SLURM's variables, and gets the signals that this one gets. ``scontrol`` is
a script in FOLDER/bin that writes down what it is asked to. Tasks are forked, as everything is imported once.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from examples.elastic_torchrun import Learner, Points, Record
from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy
from tests.support.rank_pool import free_port

__all__: list[str] = []

_SCONTROL = '#!/bin/sh\necho "$@" >> "{folder}/scontrol"\n'


def train(folder: Path, strategy: str) -> None:
    """A user's script, which knows nothing of signals or checkpoints."""
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    made = {
        "bytescheduler": lambda: ByteSchedulerStrategy(weighting="samples", batch_size="global"),
        "diloco": lambda: DiLoCoStrategy(inner_steps=5),
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        num_nodes=int(os.environ["SLURM_NNODES"]),
        strategy=made[strategy](),
        max_epochs=2,
        accumulate_grad_batches=2,
        default_root_dir=folder,
        limit_val_batches=0,
        callbacks=[Record(folder / "record")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Learner(0.01), DataLoader(Points(1_900), batch_size=32, shuffle=True))
    trainer.save_checkpoint(folder / "final.ckpt")


def start(task: int, tasks: int, folder: Path, strategy: str, port: int) -> int:
    """Start a task; returns its number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.environ.update(
            SLURM_JOB_ID="4711", SLURM_JOB_NAME="train", SLURM_NTASKS=str(tasks), SLURM_NTASKS_PER_NODE=str(tasks),
            SLURM_NNODES="1", SLURM_NODELIST="127.0.0.1", SLURM_PROCID=str(task), SLURM_LOCALID=str(task),
            SLURM_NODEID="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
        )  # fmt: skip
        train(folder, strategy)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        os.write(2, f"task {task}: {type(error).__name__}: {error}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path, tasks: int, strategy: str) -> int:
    """Run a job; returns the largest of its tasks' codes."""
    script = folder / "bin" / "scontrol"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SCONTROL.format(folder=folder))
    script.chmod(0o755)
    port = free_port()
    started = [start(task, tasks, folder, strategy, port) for task in range(tasks)]

    def pass_on(signum: int, _: object) -> None:
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, signum)

    for signum in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(signum, pass_on)
    return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 0xFF for process in started)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
