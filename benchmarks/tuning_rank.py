"""One rank of a measurement of tuning: fits one after the other, in one process. Started by ``tuning.py``, not by hand.

Prints a line of JSON per fit on rank 0, and one when the link is to be given another rate.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.configuration import Configuration
from benchmarks.emulation import EmulatedModel
from benchmarks.models import REAL_MODELS
from benchmarks.rank import _end_with_parent
from benchmarks.visits import Visits, grid
from lightning_bytescheduler import ByteSchedulerStrategy, CreditTuner
from lightning_bytescheduler.ddp import wire
from lightning_bytescheduler.tuning.sizes import PLAIN_DDP, LinkEstimate, TuningPoint

__all__: list[str] = []


class Watch(L.Callback):
    """Times steps from end to end, and says when the link is to change."""

    def __init__(self, reshape_at: int | None) -> None:
        self._reshape_at = reshape_at
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        if trainer.global_step == self._reshape_at and trainer.is_global_zero:
            print(json.dumps({"reshape": True}), flush=True)


class Timed(CreditTuner):
    """The tuner, keeping each step with the point it was taken at."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[tuple[TuningPoint | None, float]] = []
        self.start: TuningPoint | None = None

    def begin(self, **given: Any) -> TuningPoint:
        self.start = given["start"]
        self._at = super().begin(**given)
        return self._at

    def step_took(self, step: int, seconds: float, *, as_decided: bool, hideable: float | None = None) -> None:
        if as_decided:
            self._at = self.current
        self.steps.append((self._at, seconds))
        super().step_took(step, seconds, as_decided=as_decided, hideable=hideable)


def run(fit: dict[str, Any], model: L.LightningModule, tuner: Timed, known: dict[str, Any]) -> dict[str, Any]:
    """Do one fit; returns what was seen of it on rank 0."""
    watch = Watch(fit.get("reshape_at"))
    callbacks: list[L.Callback] = [watch]
    strategy: Any
    visits = None
    first_step = len(tuner.steps)
    if fit["kind"] == "ddp":
        strategy = DDPStrategy()
    elif fit["kind"] == "tuned":
        strategy = ByteSchedulerStrategy(**fit["options"])
        callbacks.append(tuner)
    elif fit["kind"] == "off":
        strategy = ByteSchedulerStrategy(mode="overlapped", tuning=False)
    else:
        points = known.get("again")
        visits = Visits(
            (lambda space, start: [*grid(space), start, PLAIN_DDP])
            if fit["kind"] == "grid"
            else (lambda space, start: points or [start]),
            turn=fit["turn"],
        )
        strategy = ByteSchedulerStrategy(tuning="both")
        callbacks.append(visits)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("RANKS_PER_NODE", "1")),
        num_nodes=int(os.environ.get("NODES", "1")),
        strategy=strategy,
        max_steps=fit["steps"],
        max_epochs=-1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    gc.collect()
    seconds = [after - before for before, after in itertools.pairwise(watch.ends)]
    result: dict[str, Any] = {"fit": fit, "seconds": seconds}
    if fit["kind"] == "tuned":
        result["steps"] = [[_plain(point), seconds] for point, seconds in tuner.steps[first_step:]]
        result["entries"] = [asdict(entry) for entry in tuner.entries]
        result["start"] = _plain(tuner.start)
        result["settled"] = tuner.is_settled
        if tuner.start is not None:
            result["current"] = _plain(tuner.current)
            known["tuned"], known["start"] = tuner.current, tuner.start
    elif visits is not None:
        result["points"] = [[_plain(point), seconds] for point, seconds in visits.seconds.items()]
        if fit["kind"] == "grid" and visits.seconds:
            medians = visits.medians()
            sized = {point: seconds for point, seconds in medians.items() if not point.is_plain_ddp}
            best = sorted(sized, key=sized.__getitem__)[:2]
            known["again"] = list(dict.fromkeys([known["tuned"], *best, known["start"], PLAIN_DDP]))
    return result


def _probe_finds(mbit: float, round_trip_ms: float) -> None:
    """Have every fit from here on take the link for another one."""
    workers = int(os.environ["WORLD_SIZE"])
    link = LinkEstimate(alpha=(workers - 1) * round_trip_ms / 1e3, beta=2 * (workers - 1) / workers / (mbit * 1e6 / 8))
    patch.object(wire, "probe_link", lambda *_: link).start()


def _plain(point: TuningPoint | None) -> list[int] | None:
    return None if point is None else [point.credit or 0, point.partition_size or 0]


def main(specification: str) -> None:
    """Run what ``specification``, JSON, asks for."""
    _end_with_parent()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked = json.loads(specification)
    first_port = int(os.environ["MASTER_PORT"])
    if asked.get("probed"):
        _probe_finds(*asked["probed"])
    tuner = Timed()
    known: dict[str, Any] = {}
    for number, fit in enumerate(asked["fits"]):
        os.environ["MASTER_PORT"] = str(first_port + number)  # a store of its own, see rank.py
        torch.manual_seed(0)
        model: L.LightningModule
        if "emulated" in asked:
            model = EmulatedModel(Configuration(**asked["emulated"]).profile)
        else:
            model = REAL_MODELS[asked["model"]]()
        result = run(fit, model, tuner, known)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
