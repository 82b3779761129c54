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
        self.accounts: list[dict[str, float]] = []
        self.gradient_bytes: list[tuple[float, float]] = []  # all, and those of them that travelled compressed

    def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > WARM_UP_STEPS:
            self.sent.append(_sent_bytes())
            self.accounts.append(_account(trainer, model))
            statistics = getattr(trainer.strategy, "statistics", None)
            if statistics is not None:
                self.gradient_bytes.append((statistics.bytes_uncompressed, statistics.bytes_compressed))

    def seconds(self) -> list[float]:
        ends = self.ends[WARM_UP_STEPS:]
        return [after - before for before, after in itertools.pairwise(ends)]

    def account(self) -> dict[str, float]:
        """Seconds of a step, on average, by what the training thread did besides computing."""
        first, last = self.accounts[0], self.accounts[-1]
        return {name: (last[name] - first[name]) / max(len(self.accounts) - 1, 1) for name in first}

    def compressed_share(self) -> float | None:
        if len(self.gradient_bytes) < 2:
            return None
        sent, compressed = (b - a for a, b in zip(self.gradient_bytes[0], self.gradient_bytes[-1], strict=True))
        return compressed / sent if sent else None

    def bytes_per_step(self) -> float:
        return (self.sent[-1] - self.sent[0]) / (len(self.sent) - 1) if len(self.sent) > 1 else 0.0


def _sent_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def _account(trainer: L.Trainer, model: L.LightningModule) -> dict[str, float]:
    found = {"processor": time.process_time()}
    if isinstance(model, EmulatedModel):
        accelerator = model.accelerator
        found["woken late"] = accelerator.late_s
        for where, seconds in accelerator.between_s.items():
            found[f"{where}, between layers"] = seconds
            found[f"{where}, of that on a processor"] = accelerator.worked_s[where]
    statistics = getattr(trainer.strategy, "statistics", None)
    if statistics is not None:
        found["deferred steps"] = statistics.deferred_step_s
        found["gates"] = statistics.gate_wait_s
        found["exposed"] = statistics.exposed_s
        found["communication"] = statistics.communication_s
    return found


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
    return {
        "contender": contender_name,
        "seconds": timer.seconds(),
        "bytes_per_step": timer.bytes_per_step(),
        "account": timer.account(),
        "compressed_share": timer.compressed_share(),
    }


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
            configuration = Configuration(**asked["emulated"])
            model = EmulatedModel(
                configuration.profile,
                runs_ahead=configuration.runs_ahead,
                raw_kernels=configuration.raw_kernels,
                statistics=configuration.statistics,
            )
        else:
            model = REAL_MODELS[asked["model"]]()
        result = run(contender, model, asked["steps"])
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
