"""Fits that the strategy's tests run on every rank of a pool."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_bytescheduler import ByteSchedulerStrategy
from tests.support.fit import SIZES
from tests.support.models import Tower

_STEPS = 12


def trainer_with(rank: int, strategy: ByteSchedulerStrategy, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    rank_zero_only.rank = rank
    return Trainer(
        strategy=strategy,
        **{
            "accelerator": "cpu",
            "devices": int(os.environ["LOCAL_WORLD_SIZE"]),
            "max_steps": _STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            **options,
        },
    )


def fit_with_metrics(rank: int, log_metrics: bool) -> dict[str, float]:
    """Returns what was logged last."""
    strategy = ByteSchedulerStrategy(**SIZES, mode="overlapped", log_metrics=log_metrics)
    trainer = trainer_with(rank, strategy, log_every_n_steps=4)
    trainer.fit(Tower())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class _Fails(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def fit_with_timeline(rank: int, path: str, fail: bool) -> str | None:
    """Returns what the fit raised, if anything."""
    trainer = trainer_with(rank, ByteSchedulerStrategy(**SIZES, mode="overlapped", timeline=path))
    try:
        trainer.fit(_Fails() if fail else Tower())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def profiled_spans(rank: int) -> list[str]:
    """Names the profiler saw, of the scheduler's spans."""
    trainer = trainer_with(rank, ByteSchedulerStrategy(**SIZES, mode="overlapped"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.fit(Tower())
    return [event.key for event in profile.key_averages() if event.key.startswith("bytescheduler::")]


class _Looks(Callback):
    """Reads the scheduler's state in the middle of a fit."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.switch_interval = 0.0
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.switch_interval = sys.getswitchinterval()
        if not self.threads:  # later, rank 0 may be through already, and has told the others so
            self.threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("bytescheduler"))
        strategy = trainer.strategy
        if isinstance(strategy, ByteSchedulerStrategy) and strategy.runtime is not None:
            core = strategy.runtime.core
            self.seen = {"partition_size": core.partition_size, "credit": core.credit}


def observe(rank: int, options: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Fits with ``options`` under ``environment``; returns what could be seen during and after it."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        strategy = ByteSchedulerStrategy(**options)
    finally:
        for name in environment:
            os.environ.pop(name)
        os.environ.update({k: v for k, v in before.items() if k in environment})
    look = _Looks()
    trainer = trainer_with(rank, strategy, callbacks=[look])
    trainer.fit(Tower())
    return {
        "threads_during": look.threads,
        "threads_after": [t.name for t in threading.enumerate() if t.name.startswith("bytescheduler")],
        "switch_intervals": (look.switch_interval, sys.getswitchinterval()),  # during the fit and after it, in seconds
        "callbacks_after": [type(c).__name__ for c in trainer.callbacks],  # type: ignore[attr-defined]
        "reasons": strategy.plan.reasons,
        "deferred_share": 0.0 if strategy.statistics is None else strategy.statistics.deferred_share,
        **look.seen,
    }
