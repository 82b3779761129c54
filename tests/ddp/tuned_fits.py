"""Tuned fits on every rank of a pool, with short trials, so that the fits can be short."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_bytescheduler import ByteSchedulerStrategy, CreditTuner
from lightning_bytescheduler.ddp import decided_fit as tuned_fit_module
from lightning_bytescheduler.ddp.decided_fit import PointInForce
from tests.ddp.fits import said, trainer_with
from tests.support.models import Tower


@dataclass
class Seen:
    """What a rank saw.

    Attributes:
        is_decided: In each step, whether rank 0 decides from step to step how it is taken.
        tunes_sizes: In each step, whether sizes are searched; on rank 0.
        points: The sizes in force in each step; (0, 0) for plain DDP.
        tuners: Number of tuners among the callbacks in mid-fit.
        left: This package's callbacks and threads that are left after the fit.
        entries: The tuner's entries.
        is_settled: At each step, on rank 0.
        metrics: Metrics of the progress bar, at the end.
        said: This package's lines in the log.
        plan: The plan in words, at the end.
    """

    is_decided: list[bool] = field(default_factory=list)
    tunes_sizes: list[bool] = field(default_factory=list)
    points: list[tuple[int, int]] = field(default_factory=list)
    tuners: int = 0
    left: list[str] = field(default_factory=list)
    entries: tuple[Any, ...] = ()
    is_settled: list[bool] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    plan: str | None = None


class _Looks(Callback):
    def __init__(self, seen: Seen, save: dict[int, str]) -> None:
        self._seen, self._save = seen, save

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ByteSchedulerStrategy)
        assert strategy.fit is not None
        fit, core = strategy.fit, strategy.fit.wire.core
        self._seen.is_decided.append(isinstance(fit.mode, PointInForce))
        self._seen.tunes_sizes.append(strategy._tuning.tunes_now)
        self._seen.points.append((0, 0) if fit.mode.ddp_mode else (core.credit, core.partition_size))
        tuners = [callback for callback in trainer.callbacks if isinstance(callback, CreditTuner)]  # type: ignore[attr-defined]
        self._seen.tuners = len(tuners)
        if tuners:
            self._seen.entries = tuners[0].entries
            self._seen.is_settled.append(tuners[0].is_settled)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in self._save:
            trainer.save_checkpoint(self._save[trainer.global_step])


def tuned_fit(
    rank: int,
    *,
    steps: int,
    environment: dict[str, str] | None = None,
    options: dict[str, Any] | None = None,
    tuner: dict[str, Any] | None = None,
    logs: str | None = None,
    save: dict[int, str] | None = None,
    resume: str | None = None,
    slow: bool = False,
) -> Seen:
    """Fit once.

    Args:
        rank: This rank.
        steps: Optimizer steps.
        environment: Variables of this package, named without the prefix.
        options: Options of the strategy, whose buckets are small.
        tuner: The user's, if given.
        logs: Where a logger writes.
        save: Checkpoints to write, by step.
        resume: A checkpoint.
        slow: Whether the link counts as slow, so that steps overlap and are tuned from the start.
    """
    seen = Seen()
    callbacks: list[Callback] = [_Looks(seen, save or {})]
    if tuner is not None:
        callbacks.append(CreditTuner(**tuner))
    given = {f"BYTESCHEDULER_{name}": value for name, value in (environment or {}).items()}
    with (
        patch.dict("os.environ", {"BYTESCHEDULER_CREDIT_TUNING": "", **given}),
        patch.object(tuned_fit_module, "is_slow", lambda *_, **__: slow and rank == 0),
        patch.object(tuned_fit_module, "SHORTEST_FIT", 20),
        patch.dict(inspect.unwrap(CreditTuner.__init__).__kwdefaults__, steps_per_trial=10),
        said() as seen.said,
    ):
        strategy = ByteSchedulerStrategy(**{"bucket_cap_mb": 0.002, **(options or {})})
        trainer = trainer_with(
            rank,
            strategy,
            max_steps=steps,
            max_epochs=-1,
            callbacks=callbacks,
            logger=False if logs is None else CSVLogger(logs, name="", version="", flush_logs_every_n_steps=1),
        )
        trainer.fit(Tower(samples=2000), ckpt_path=resume)
    seen.metrics = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    seen.plan = repr(strategy.plan)
    kept = [c for c in trainer.callbacks if isinstance(c, CreditTuner) and c not in callbacks]  # type: ignore[attr-defined]
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    seen.left = [*map(repr, kept), *names]
    return seen


def record_of(folder: Path) -> Path:
    """Where rank 0 keeps the record of a fit with ``logs``."""
    return folder / "tuning.jsonl"
