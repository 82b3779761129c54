"""Fits that the strategy's tests run on every rank of a pool."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.ddp import decided_fit
from lightning_bytescheduler.tuning import credit_tuner
from lightning_bytescheduler.tuning.search import CreditTuning
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


@contextmanager
def said() -> Iterator[list[str]]:
    """What this package logs inside the block, line by line."""
    lines: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("bytescheduler: "):
                lines.append(record.getMessage())

    handler = Keeps()
    # Of the package that was imported last: other tests import both.
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in ("lightning.pytorch", "pytorch_lightning")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class Paced(CreditTuning):
    """Reports given step times, whatever steps took.

    Args:
        ddp_ms: Milliseconds of a step as DDP's.
        overlapped_ms: The same of an overlapped one.
        hideable_ms: Milliseconds that could be hidden in a step as DDP's.
    """

    def __init__(self, *args: Any, ddp_ms: float, overlapped_ms: float, hideable_ms: float, **given: Any) -> None:
        super().__init__(*args, **given)
        self._ms = {True: ddp_ms, False: overlapped_ms}
        self._hideable_ms = hideable_ms
        self._here = self.current

    def step_took(self, step: int, seconds: float, *, hideable: float | None = None) -> None:
        if step >= self.in_force_from:
            self._here = self.current
        super().step_took(step, self._ms[self._here.is_plain_ddp] / 1e3, hideable=self._hideable_ms / 1e3)


def say_what_is_found(rank: int, steps: int, **pace: float) -> tuple[list[str], str]:
    """The log of a fit with the step times of :class:`Paced`, and the plan in words at its end."""
    strategy = ByteSchedulerStrategy(**SIZES, tuning=False)
    trainer = trainer_with(rank, strategy, max_steps=steps, max_epochs=-1)
    with (
        patch.object(credit_tuner, "CreditTuning", partial(Paced, **pace)),
        patch.object(decided_fit, "is_slow", lambda *_, **__: False),
        said() as lines,
    ):
        trainer.fit(Tower(samples=2000))
    assert strategy.plan is not None
    return lines, strategy.plan.pace


def train_alone(rank: int) -> tuple[list[str], str]:
    """What a fit on one process says, and its plan."""
    strategy = ByteSchedulerStrategy()
    trainer = trainer_with(rank, strategy)
    with said() as lines:
        trainer.fit(Tower())
    return lines, repr(strategy.plan)


class _Fails(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


def fit_as_ddp_with_timeline(rank: int, path: str, **options: Any) -> tuple[float, int]:
    """Returns how many bytes were sent, and in how many steps, by the counters."""
    strategy = ByteSchedulerStrategy(**{"mode": "ddp", "timeline": path, **options})
    trainer_with(rank, strategy, accumulate_grad_batches=2).fit(Tower())
    assert strategy.statistics is not None
    return strategy.statistics.bytes_sent, strategy.statistics.steps


def fit_with_timeline(rank: int, path: str, fail: bool) -> str | None:
    """Returns what the fit raised, if anything."""
    trainer = trainer_with(rank, ByteSchedulerStrategy(**SIZES, mode="overlapped", timeline=path))
    try:
        trainer.fit(_Fails() if fail else Tower())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


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
        if isinstance(strategy, ByteSchedulerStrategy) and strategy.fit is not None:
            core = strategy.fit.wire.core
            self.seen = {"partition_size": core.partition_size, "credit": core.credit}


def watch(rank: int, path: str, mode: Any) -> dict[str, Any]:
    """Fits with a timeline and metrics of all steps; returns what metrics and lines say."""
    trainer = trainer_with(rank, ByteSchedulerStrategy(**SIZES, mode=mode, timeline=path), log_every_n_steps=_STEPS)
    with said() as lines:
        trainer.fit(Tower())
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "lines": lines,
    }


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
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "callbacks_after": [type(c).__name__ for c in trainer.callbacks],  # type: ignore[attr-defined]
        "reasons": strategy.plan.reasons,
        "deferred_share": 0.0 if strategy.statistics is None else strategy.statistics.deferred_share,
        **look.seen,
    }
