"""A user's script in a job of SLURM, as far as its tasks can tell; what to train is said in JSON in ``sys.argv[1]``.

``scontrol`` is a script that writes down what it is asked to. In a job that has not been requeued, batches take longer
after the first twenty, so that its signals come while it trains.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from examples.elastic_torchrun import Learner, Points, Record
from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy

__all__: list[str] = []


class Waits(L.Callback):
    """Waits for the signals."""

    begun = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1
        if self.begun > 20:
            time.sleep(0.5)


def in_a_job(folder: Path) -> None:
    """Turn what any launcher has set into what ``srun`` would have."""
    rank, tasks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID="4711", SLURM_JOB_NAME="train", SLURM_NTASKS=tasks, SLURM_NTASKS_PER_NODE=tasks,
        SLURM_NNODES="1", SLURM_NODELIST="127.0.0.1", SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0",
        PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
    )  # fmt: skip


def main(folder: Path, strategy: str) -> None:
    """It knows nothing of signals or checkpoints."""
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    made = {
        "bytescheduler": lambda: ByteSchedulerStrategy(weighting="samples", batch_size="global"),
        "diloco": lambda: DiLoCoStrategy(inner_steps=5),
    }
    in_a_job(folder)
    requeued = (folder / "scontrol").exists()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        num_nodes=int(os.environ["SLURM_NNODES"]),
        strategy=made[strategy](),
        max_epochs={"bytescheduler": 2, "diloco": 4}[strategy],
        accumulate_grad_batches=2,
        default_root_dir=folder,
        limit_val_batches=0,
        callbacks=[Record(folder / "record"), *([] if requeued else [Waits()])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Learner(0.0), DataLoader(Points(1_900), batch_size=32, shuffle=True))
    trainer.save_checkpoint(folder / "final.ckpt")


if __name__ == "__main__":
    main(**{name: Path(value) if name == "folder" else value for name, value in json.loads(sys.argv[1]).items()})
