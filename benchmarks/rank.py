"""One rank of a measurement: does its jobs in turn, in one process. Started by ``ranks.py``, not by hand.

Prints a line for each job: what the job's function has returned, as JSON.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

__all__ = ["MARK", "Moments", "fit"]

MARK = "ANSWER "
"""Before the JSON of an answer."""


class Moments(L.Callback):
    """Notes when training began and when each step ended."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        self.seen.append(time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(time.perf_counter())

    def steps(self, warm_up: int = 0) -> list[float]:
        """Seconds of each step after the first ones."""
        return [after - before for before, after in itertools.pairwise(self.seen[warm_up:])]


def fit(
    model: L.LightningModule, strategy: Strategy, *data: Any, callbacks: Sequence[L.Callback] = (), **options: Any
) -> L.Trainer:
    """Train with all other ranks, without anything that only takes time; data may be loaders or a data module."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "num_nodes": int(os.environ.get("NODES", "1")),
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    trainer = L.Trainer(strategy=strategy, callbacks=list(callbacks), **{**chosen, **options})
    trainer.fit(model, *data)
    return trainer


def _end_with_parent() -> None:
    """End this process when the other end of standard input is gone."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main(work: str, jobs: str) -> None:
    """Do ``jobs``, JSON, with the function that ``work`` names."""
    _end_with_parent()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    warnings.simplefilter("ignore")
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)
    module, _, function = work.partition(":")
    do: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    first_port = int(os.environ["MASTER_PORT"])
    for number, job in enumerate(json.loads(jobs)):
        # Each rendezvous has its own store, as the last one's still has addresses of groups that are gone.
        os.environ["MASTER_PORT"] = str(first_port + number)
        torch.manual_seed(0)
        answer = do(job)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        gc.collect()
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
