"""A training script with DiLoCo in which one rank fails. What happens is said in JSON in ``sys.argv[1]``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from lightning_bytescheduler import DiLoCoStrategy
from lightning_bytescheduler.diloco import runtime
from lightning_bytescheduler.failures import board
from tests.faults.bounds import set_bounds


def say(line: str) -> None:
    os.write(1, (line + "\n").encode())


class Fails(Callback):
    """Does what ``kind`` says at step ``step`` of rank ``rank``; every other rank is slow or waits for it.

    With ``validates``, it does so in the validation after that step.

    With ``everybody``, a folder, the other ranks get the same signal before: they wait for this one by then.
    """

    def __init__(self, kind: str, rank: int, step: int, everybody: str | None, validates: bool) -> None:
        self.kind, self.rank, self.step, self.everybody, self.validates = kind, rank, step, everybody, validates

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.everybody is not None:
            Path(self.everybody, f"pid-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)
        if not self.validates:
            self.fail(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.validates:
            self.fail(trainer)

    def fail(self, trainer: Trainer) -> None:
        if trainer.global_rank != self.rank or trainer.global_step < self.step:
            return
        say(f"FAILED_AT {time.time()}")
        if self.kind == "raise":
            raise ValueError("boom")
        if self.everybody is not None:
            time.sleep(1.0)
            for file in sorted(Path(self.everybody).glob("pid-*")):
                if int(file.read_text()) != os.getpid():
                    os.kill(int(file.read_text()), getattr(signal, self.kind))
        os.kill(os.getpid(), getattr(signal, self.kind))


class FailsInTheEnd(Callback):
    """Rank 0 writes a last checkpoint, with what all have: it fails in that, or rank 1 before it."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank, self.path = rank, path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.rank and trainer.global_rank == self.rank:
            say(f"FAILED_AT {time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank == self.rank:
            say(f"FAILED_AT {time.time()}")
            raise ValueError("no space is left")


class Noise(BoringModel):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(4096, 32))  # type: ignore[arg-type]


def saved_in(folder: str) -> list[Callback]:
    return [
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_last="link", save_on_exception=True),
        OnExceptionCheckpoint(folder),
    ]


def main(options: dict[str, Any]) -> None:
    rank_zero_only.rank = int(os.environ["RANK"])
    set_bounds()
    runtime._MOMENT_S = 30.0  # for a thread to end
    board.NATIVE_S = options.get("native", board.NATIVE_S)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DiLoCoStrategy(
            inner_steps=options["inner_steps"],
            timeout=timedelta(seconds=options.get("timeout", 16)),
            **options.get("groups", {}),
        ),
        callbacks=[
            Fails(
                options["kind"], options["rank"], options["step"], options.get("everybody"), "val_batches" in options
            ),
            *(saved_in(options["checkpoint"]) if "checkpoint" in options else ()),
            *([FailsInTheEnd(options["in_the_end"], options["last"])] if "last" in options else ()),
        ],
        max_steps=options.get("max_steps", 1_000_000),
        logger=False,
        enable_checkpointing="checkpoint" in options,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=options.get("val_batches", 0),
        val_check_interval=5,
        num_sanity_val_steps=0,
    )
    try:
        trainer.fit(Noise(), ckpt_path=options.get("resume"))
    finally:
        say(f"THREADS {[t.name for t in threading.enumerate() if t.name.startswith('bytescheduler')]}")


main(json.loads(sys.argv[1]))
