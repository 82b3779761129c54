"""Tracks where a rank is in a fit, and describes the rank to the others before a training.

Hooks count; any thread may read. Other ranks learn the epoch, batch and hook. Before the training they learn versions,
strategy, and the options that all ranks must share.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.failures.rendezvous import Introduction
from lightning_bytescheduler.failures.standstill import Standing
from lightning_bytescheduler.lightning_api import PACKAGE, TrainerFn, pl

__all__ = ["FitPosition", "introduce", "optimizer_facts", "parameter_facts", "place_of"]


class FitPosition:
    """One rank's place in one run of the Trainer."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._last: Standing | None = None
        self._batches = 0
        self._epoch = 0
        self._epoch_batches = 0
        self._launched_at_batch = 0
        self._last_epoch = 0

    def begin_epoch(self) -> None:
        """Record that an epoch begins; the Trainer increments its number before the previous epoch's last hooks."""
        self._epoch = self._trainer.current_epoch
        self._last_epoch, self._epoch_batches = self._epoch_batches, 0

    def begin_batch(self) -> None:
        """Record that a batch begins."""
        self._batches += 1
        self._epoch_batches += 1
        # Otherwise nothing is known of the last collective: a rank inside it may get through. On a CPU another group
        # counts (``sigterm.py``).
        if self._trainer.strategy.root_device.type != "cpu":
            self._launched_at_batch = _launched()

    def end(self) -> None:
        """Record that the run is over; this rank takes no further step."""
        self._last = self.standing(ended=True)

    @property
    def reached(self) -> dict[str, str]:
        """The facts that have to be the same on all ranks when a fit begins."""
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return {}
        batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return {"progress": f"epoch {trainer.current_epoch}, batch {batch}, step {trainer.global_step}"}

    def standing(self, *, ended: bool = False) -> Standing:
        """Return this rank's standing for the other ranks."""
        if self._last is not None:
            return self._last
        trainer, strategy = self._trainer, cast(Any, self._trainer.strategy)
        fit: Fit | None = strategy.fit
        progress = trainer.fit_loop.epoch_loop.batch_progress
        ready, expected = progress.current.ready, trainer.fit_loop.max_batches
        is_last = progress.is_last_batch or ready == expected
        return Standing(
            place=place_of(trainer),
            steps=0 if fit is None else fit.progress.offered,
            awaited_step=0 if fit is None else fit.awaited_step,
            launched=_launched(),
            ended=ended,
            batches=self._batches,
            launched_at_batch=self._launched_at_batch,
            epoch=self._epoch,
            epoch_batches=self._epoch_batches,
            is_last=bool(ready and is_last),
            through=bool(ready and is_last and progress.current.completed == ready),
            last_epoch=self._last_epoch,
            expected=int(expected) if expected != float("inf") else 0,
        )


def place_of(trainer: pl.Trainer) -> str:
    """Return the stage, the batch and the hook that a Trainer is in, in words."""
    module = trainer.lightning_module
    hook = getattr(module, "_current_fx_name", None)
    where = f" ({hook})" if hook else ""
    if trainer.sanity_checking:
        return f"in the sanity check{where}"
    step = trainer.fit_loop.epoch_loop.global_step
    if trainer.validating and trainer.state.fn == "fit":
        batch = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready
        return f"in batch {batch} of the validation after step {step}{where}"
    if trainer.training:
        return (
            f"in epoch {trainer.current_epoch}, batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready}{where}"
        )
    return f"in {trainer.state.fn}{where}"


def _launched() -> int:
    """Return the number of collectives begun on the default group; 0 if the backend does not count."""
    group = dist.group.WORLD
    count = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return 0 if count is None else int(count())
    except RuntimeError:  # this backend does not count
        return 0


_GROUPS_COMPARED = 16
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object, which differs between processes
# Set for one rank by design, compared under another name, or ignored.
_LOCAL = tuple(f"BYTESCHEDULER_{name}" for name in ("BATCH_SIZE", "LIGHTNING", "ROOT_IP", "ROOT_PORT"))


def introduce(
    rank: int, strategy: str, options: Mapping[str, object], trainer: pl.Trainer | None = None
) -> Introduction:
    """Make this rank's introduction.

    Args:
        rank: This rank.
        strategy: Name of the strategy.
        options: Options that must be the same on all ranks, by name.
        trainer: The Trainer, whose own options must be the same too; may be ``None``.
    """
    facts: dict[str, object] = {"strategy": strategy, "version of lightning-bytescheduler": __version__}
    facts.update(options)
    if trainer is not None:
        facts["what the Trainer does"] = getattr(trainer.state.fn, "value", trainer.state.fn)
        facts["precision"] = trainer.precision
        accumulated = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
        for option in ("max_steps", "max_epochs", *accumulated):
            facts[option] = getattr(trainer, option, None)
    variables = {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith("BYTESCHEDULER_") and name not in _LOCAL
    }
    return Introduction(
        rank=rank,
        facts={name: _text(value) for name, value in facts.items()},
        noted={
            "torch": torch.__version__,
            PACKAGE: pl.__version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **variables,
        },
    )


def parameter_facts(parameters: Iterable[nn.Parameter]) -> dict[str, str]:
    """Return the number, shapes and types of trained parameters, as facts to compare."""
    shapes = [(tuple(p.shape), str(p.dtype)) for p in parameters if p.requires_grad]
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    values = sum(torch.Size(shape).numel() for shape, _ in shapes)
    return {"trained model": f"{len(shapes)} tensors of {values:,} values (digest of shapes and types {digest})"}


def optimizer_facts(optimizers: Sequence[Optimizer]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the facts on optimizers that ranks compare.

    Returns:
        First the classes and numbers of groups, which have to be the same. Then the numbers in the groups; where they
        differ, ranks end up with different weights.
    """
    kinds = [f"{type(one).__name__} with {len(one.param_groups)} groups" for one in optimizers]
    numbers = {}
    for index, optimizer in enumerate(optimizers):
        which = f" of optimizer {index}" if len(optimizers) > 1 else ""
        for place, group in enumerate(optimizer.param_groups[:_GROUPS_COMPARED]):
            where = f" in group {place}" if len(optimizer.param_groups) > 1 else ""
            for name, value in group.items():
                if isinstance(value, (bool, int, float, str)) or (name == "betas" and isinstance(value, tuple)):
                    numbers[f"{name}{where}{which}"] = str(value)
    return {"optimizers": ", ".join(kinds) or "none"}, numbers


def _text(value: object) -> str:
    return repr(value) if isinstance(value, str) else _ADDRESS.sub("", str(value))
