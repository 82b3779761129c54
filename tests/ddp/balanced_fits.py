"""Fits with balanced batches on ranks of unequal speed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_bytescheduler.ddp import sample_weights
from tests.ddp.fits import trainer_with
from tests.support.fit import SIZES
from tests.support.models import Tower

__all__ = ["Balanced", "Numbered", "Seen", "fit_balanced", "numbered"]

BALANCED = {**SIZES, "weighting": "samples", "batch_size": "balanced", "mode": "overlapped"}


class Numbered(Dataset[Any]):
    """Samples that say which they are."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(12, generator=generator), torch.randn(3, generator=generator), index


def numbered(row: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The sample that a row of a slice is the number of."""
    return Numbered(0)[int(row[0])]


@dataclass(kw_only=True)
class Seen:
    """What a rank saw.

    Attributes:
        batches: Numbers of the samples of each of its batches, by epoch.
        plan: The strategy's plan, in words.
        metrics: The metrics that were logged last.
        error: What the fit raised.
        changes: How often shares have changed.
        weights: Weights at the end.
    """

    batches: list[list[list[int]]] = field(default_factory=list)
    plan: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    changes: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class Balanced(Tower):
    """Notes its batches. On a clock of its own, a step takes as long as this rank's speed says."""

    def __init__(self, size: int, seen: Seen, clock: Any, seconds: float, **loader: Any) -> None:
        super().__init__(dropout=0.0)
        self.size, self.seen, self.clock, self.seconds, self.loader = size, seen, clock, seconds, loader
        self.change: tuple[int, float] | None = None

    def on_train_epoch_start(self) -> None:
        self.seen.batches.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.seen.batches:  # an epoch that goes on does not start
            self.seen.batches.append([])
        self.seen.batches[-1].append(batch[2].tolist())
        if self.change is not None and len(self.seen.batches[-1]) > self.change[0]:
            self.seconds = self.change[1]
        self.clock.now += self.seconds * len(batch[2])
        return super().training_step(batch[:2], batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbered(self.size), **{"batch_size": 8, "shuffle": True, **self.loader})


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class SaveOnce(Callback):
    """Saves a checkpoint in mid-epoch."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@contextmanager
def _may_fork() -> Iterator[None]:
    """Allow a process of the pool what one that a launcher starts does: to have children, forked at once."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
            yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def fit_balanced(
    rank: int,
    *,
    size: int,
    seconds: list[float],
    epochs: int = 1,
    loader: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    save: tuple[str, int] | None = None,
    resume: str | None = None,
    trainer: dict[str, Any] | None = None,
    slices: dict[str, Any] | None = None,
    change: tuple[int, list[float]] | None = None,
) -> Seen:
    """Fits on this rank, where a sample takes ``seconds[rank]`` by a clock that shows nothing else.

    With ``slices``, on these rather than on a DataLoader; after the batch of ``change`` its seconds count.
    """
    from lightning_bytescheduler import ByteSchedulerStrategy, SliceDataModule

    seen, clock = Seen(), _Clock()
    torch.manual_seed(7)
    strategy = ByteSchedulerStrategy(**{**BALANCED, **(options or {})})
    callbacks = [*(trainer or {}).pop("callbacks_extra", []), *([] if save is None else [SaveOnce(*save)])]
    made = trainer_with(
        rank,
        strategy,
        max_epochs=epochs,
        max_steps=-1,
        callbacks=callbacks,
        log_every_n_steps=1,
        **(trainer or {}),
    )
    before = sample_weights.SampleWeights.__init__

    def on_own_clock(self: Any, *arguments: Any, **given: Any) -> None:
        before(self, *arguments, **{**given, "clock": clock.perf_counter, "exposed": lambda: 0.0})

    sample_weights.SampleWeights.__init__ = on_own_clock  # type: ignore[method-assign]
    model = Balanced(size, seen, clock, seconds[rank], **(loader or {}))
    if change is not None:
        model.change = (change[0], change[1][rank])
    try:
        data = None if slices is None else SliceDataModule(**{"transform": numbered, **slices})
        with _may_fork():  # loaders may have processes
            made.fit(model, datamodule=data, ckpt_path=resume, weights_only=False)
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
    finally:
        sample_weights.SampleWeights.__init__ = before  # type: ignore[method-assign]
    seen.plan = repr(strategy.plan)
    seen.metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    seen.weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    shares = strategy._sharing.balance
    seen.changes = 0 if shares is None else shares.changes
    return seen
