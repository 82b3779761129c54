"""One rank of `never_slower.py`: fits under ddp and bytescheduler in turns, in one process. Not started by hand.

Prints a line of JSON per fit on rank 0: when each step ended, from the call of ``fit`` on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy

from benchmarks.models import REAL_MODELS
from benchmarks.rank import _end_with_parent
from lightning_bytescheduler import ByteSchedulerStrategy

__all__: list[str] = []

_MODES: dict[str, Literal["auto", "overlapped", "ddp"]] = {
    "bytescheduler": "auto",
    "as ddp": "ddp",
    "overlapped": "overlapped",
}


class Moments(L.Callback):
    """Takes down when training began and when each step ended."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        self.seen.append(time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(time.perf_counter())


def run(contender: str, model: L.LightningModule, steps: int) -> dict[str, Any]:
    """Do one fit; returns what was seen of it on this rank."""
    moments = Moments()
    strategy: Strategy
    if contender == "ddp":
        strategy = DDPStrategy()
    else:
        strategy = ByteSchedulerStrategy(mode=_MODES[contender])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("RANKS_PER_NODE", "1")),
        num_nodes=int(os.environ.get("NODES", "1")),
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[moments],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    start = time.perf_counter()
    trainer.fit(model)
    ended = time.perf_counter() - start
    plan = strategy.plan if isinstance(strategy, ByteSchedulerStrategy) else None
    overlapped = strategy.statistics if isinstance(strategy, ByteSchedulerStrategy) else None
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    gc.collect()
    return {
        "contender": contender,
        "moments": [moment - start for moment in moments.seen],
        "ended": ended,
        "overlapped_steps": 0 if overlapped is None else overlapped.overlapped_steps,
        "plan": "" if plan is None else plan.summary(),
    }


def main(specification: str) -> None:
    """Run what ``specification``, JSON, asks for."""
    _end_with_parent()
    rank, processors = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    if "RANKS_PER_NODE" in os.environ and len(processors) >= int(os.environ["WORLD_SIZE"]):
        os.sched_setaffinity(0, {processors[rank]})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked = json.loads(specification)
    first_port = int(os.environ["MASTER_PORT"])
    for number, (contender, steps) in enumerate(asked["fits"]):
        os.environ["MASTER_PORT"] = str(first_port + number)  # a store of its own, see rank.py
        torch.manual_seed(0)
        result = run(contender, REAL_MODELS[asked["model"]](), steps)
        if rank == 0:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
