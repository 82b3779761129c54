"""One rank of a measurement: trains each contender in turn, in one process. Started by ``measure.py``, not by hand.

Prints a line of JSON per contender on rank 0: step times in seconds, and what the interface sent.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from benchmarks.configuration import Configuration
from benchmarks.contenders import ALONE, CONTENDERS
from benchmarks.emulation import EmulatedModel
from benchmarks.models import REAL_MODELS

__all__: list[str] = []

WARM_UP_STEPS = 5


class Steps(L.Callback):
    """Times steps from end to end, and counts bytes between the first and the last of them."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.sent: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > WARM_UP_STEPS:
            self.sent.append(_sent_bytes())

    def seconds(self) -> list[float]:
        ends = self.ends[WARM_UP_STEPS:]
        return [after - before for before, after in itertools.pairwise(ends)]

    def bytes_per_step(self) -> float:
        return (self.sent[-1] - self.sent[0]) / (len(self.sent) - 1) if len(self.sent) > 1 else 0.0


def _sent_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def run(contender_name: str, model: L.LightningModule, steps: int) -> dict[str, Any]:
    """Train ``model`` for ``steps`` measured steps."""
    contender = CONTENDERS[contender_name]
    timer = Steps()
    alone = contender_name == ALONE
    before = dict(os.environ)
    if alone:
        for name in ("WORLD_SIZE", "RANK", "NODE_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    try:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1 if alone else int(os.environ.get("RANKS_PER_NODE", "1")),
            num_nodes=1 if alone else int(os.environ.get("NODES", "1")),
            strategy=contender.strategy(),
            max_steps=WARM_UP_STEPS + steps + 1,
            callbacks=[timer],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **contender.trainer,
        )
        trainer.fit(model)
    finally:
        os.environ.update(before)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    gc.collect()
    return {"contender": contender_name, "seconds": timer.seconds(), "bytes_per_step": timer.bytes_per_step()}


def _end_with_parent() -> None:
    """End this process when whoever holds the other end of standard input is gone."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(specification: str) -> None:
    """Run what ``specification``, JSON, asks for."""
    _end_with_parent()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked = json.loads(specification)
    first_port = int(os.environ["MASTER_PORT"])
    for number, contender in enumerate(asked["contenders"]):
        # Each rendezvous has a store of its own: in the last one's, addresses of groups that are gone would be found.
        os.environ["MASTER_PORT"] = str(first_port + number)
        torch.manual_seed(0)
        model: L.LightningModule
        if "emulated" in asked:
            model = EmulatedModel(Configuration(**asked["emulated"]).profile)
        else:
            model = REAL_MODELS[asked["model"]]()
        result = run(contender, model, asked["steps"])
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
