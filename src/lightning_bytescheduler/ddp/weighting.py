"""What the user says of weighting and shared batches, and what is made of it when the training data are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_bytescheduler.checks import is_whole, require_one_of
from lightning_bytescheduler.ddp.balance import Balance
from lightning_bytescheduler.ddp.balanced_batches import (
    AgreedShares,
    BalancedBatchSampler,
    EpochOrder,
    EqualShares,
    balanced_loader,
    drawn_ahead,
    require_balanceable,
)
from lightning_bytescheduler.ddp.epoch_position import EpochData, require_same_epoch
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.sample_weights import SampleCounter, name_of
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info

__all__ = ["SharedBatches", "Weighting", "batch_facts", "share_out"]

_WEIGHTINGS = ("ranks", "samples")
_BATCH_SIZES = ("balanced", "global", "global-balanced")


class Weighting:
    """What a rank's gradient counts by, as the user said.

    Args:
        weighting: ``"ranks"`` or ``"samples"``.
        samples: Says how many samples a batch has; Lightning's ``extract_batch_size`` when left out.
        batch_size: ``"balanced"`` for batches that follow each rank's pace, ``"global"`` for a DataLoader whose batch
            size is that of all ranks, ``"global-balanced"`` for both.
        max_batch_size: The most samples that a rank may have in a batch then: one number, or one for each rank.

    Raises:
        OptionError: If an option is not allowed.
    """

    def __init__(
        self,
        weighting: str,
        samples: Callable[[Any], Any] | None,
        batch_size: object = None,
        max_batch_size: int | Sequence[int] | None = None,
    ) -> None:
        require_one_of("weighting", weighting, _WEIGHTINGS)
        self.by_samples = weighting == "samples"
        self.name = weighting
        self.samples = samples
        if samples is not None and not callable(samples):
            raise OptionError("samples", samples, "a function of the batch, or left out")
        if samples is not None and not self.by_samples:
            raise OptionError("samples", name_of(samples), "left out, unless weighting='samples'")
        if batch_size not in (None, *_BATCH_SIZES):
            hint = "A number is an option of the other strategy, DiLoCoStrategy(batch_size=...), or the DataLoader's."
            allowed = f"{', '.join(map(repr, _BATCH_SIZES))}, or left out"
            raise OptionError("batch_size", batch_size, allowed, hint)
        self.batch_size = batch_size
        self.together = batch_size in ("global", "global-balanced")
        self.by_pace = batch_size in ("balanced", "global-balanced")
        if batch_size is not None and not self.by_samples:
            hint = "Batches of unequal size need weighting='samples': else their samples would not count alike."
            raise OptionError("batch_size", batch_size, "left out, unless weighting='samples'", hint)
        most = max_batch_size if isinstance(max_batch_size, (list, tuple)) else [max_batch_size]
        if max_batch_size is not None and not (most and all(is_whole(limit, 1) for limit in most)):
            allowed = "a whole number of samples, 1 or more, or one for each rank"
            raise OptionError("max_batch_size", max_batch_size, allowed)
        if max_batch_size is not None and not self.by_pace:
            allowed = "left out, unless batch_size='balanced' or 'global-balanced'"
            raise OptionError("max_batch_size", max_batch_size, allowed)
        self._most = max_batch_size

    @property
    def facts(self) -> dict[str, object]:
        """What has to be the same on all ranks."""
        return {
            "weighting": self.name,
            "samples": None if self.samples is None else "a function",
            "batch_size": self.batch_size,
            "max_batch_size": self._most,
        }

    def counter(self, rank: int) -> SampleCounter:
        """Says how many samples a batch of a rank has."""
        return SampleCounter(self.samples, rank)

    def limits(self, ranks: int, total: int) -> list[int]:
        """The most samples that each rank may have in a balanced batch of ``total``.

        Raises:
            OptionError: If they were given for another number of ranks.
        """
        if self._most is None:
            return [total] * ranks
        if isinstance(self._most, int):
            return [self._most] * ranks
        if len(self._most) != ranks:
            raise OptionError("max_batch_size", self._most, f"one number, or one for each of {ranks} ranks")
        return list(self._most)


def batch_facts(loader: object, device: torch.device, how: str) -> dict[str, str]:
    """What of a loader of training data has to be the same on all ranks that share its batches out.

    Raises:
        UnsupportedError: If they cannot be shared out.
    """
    checked = require_balanceable(loader, device, how)
    order = EpochOrder.of(checked)
    return {
        "the DataLoader's batch_size": str(checked.batch_size),
        "the DataLoader's drop_last": str(checked.drop_last),
        "samples of the training data": str(len(order)),
        "the order of the training data": order.described,
    }


@dataclass(frozen=True, kw_only=True)
class SharedBatches:
    """Training data of which each rank draws its share.

    Attributes:
        loader: To train on.
        shares: Of each batch.
        sampler: Draws this rank's part.
        data: What the epoch is drawn from.
    """

    loader: DataLoader[Any]
    shares: AgreedShares | EqualShares
    sampler: BalancedBatchSampler
    data: EpochData

    def weigh(self, loss: torch.Tensor, trainer: pl.Trainer) -> None:
        """Have a loss count by its samples among the batches of its step, on a rank that has all of them."""
        share = self.sampler.share_of_step(trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches)
        if share != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * share)


def share_out(
    weighting: Weighting,
    loader: object,
    trainer: pl.Trainer,
    runtime: SchedulerRuntime | None,
    saved: Mapping[str, Any] | None,
) -> SharedBatches:
    """Have each rank draw its share of every batch; all ranks at once, once their :func:`batch_facts` are the same.

    Args:
        weighting: What the user said.
        loader: Of the training data.
        trainer: Whose batches are trained on.
        runtime: This rank's, where gradients count by samples; ``None`` on a single one.
        saved: What the checkpoint that the training goes on from has of its epoch, if there is one.

    Raises:
        OptionError: If a batch is too small, or too large for ``max_batch_size``, or not what the checkpoint's epoch
            was drawn in.
        UnsupportedError: If the loader's batches cannot be shared out, or there is another loader.
    """
    device, alone, how = trainer.strategy.root_device, runtime is None, str(weighting.batch_size)
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    weights = None if runtime is None else runtime.engine.weights
    checked = require_balanceable(loader, device, how, ranks)
    if not alone and (weights is None or weights.waits_to_share):
        raise UnsupportedError(
            f"batch_size={how!r} shares out the batches of one DataLoader, and there are several. Make one data set "
            "of them, or leave batch_size out."
        )
    size = checked.batch_size or 1
    total = size if weighting.together else size * ranks
    if total < ranks:
        hint = f"With batch_size={how!r} in the strategy it counts for all {ranks} ranks together."
        raise OptionError("DataLoader(batch_size)", total, f"{ranks} or more, one for each rank", hint)
    order = EpochOrder.of(checked)
    data = EpochData(batch_size=total, samples=len(order), order=order.described, ranks=ranks)
    require_same_epoch(saved, data, trainer)
    shares: AgreedShares | EqualShares
    if weighting.by_pace and runtime is not None:
        message = torch.tensor([drawn_ahead(checked, trainer.accumulate_grad_batches)], device=device)
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
        ahead = int(message)
        # What a batch took is told with the next one.
        balance = Balance(total, ranks, ahead=ahead + 1, limits=weighting.limits(ranks, total))
        shares = AgreedShares(balance, ahead, runtime.own_failure)
        said = f"by pace; a change counts {ahead + 1} batches later, as loaders draw ahead"
    else:
        shares = EqualShares(total, ranks)
        said = f"by rank {shares.present}"
    progress = trainer.fit_loop.epoch_loop.batch_progress
    made, sampler = balanced_loader(
        checked, rank, shares.of_pass, together=total, trained=lambda: progress.current.completed
    )
    if weights is not None:
        weights.share_out(shares, sampler, lambda: trainer.fit_loop.batch_idx)
    rank_zero_info(f"bytescheduler: batches of {total} samples are shared out {said}.")
    return SharedBatches(loader=made, shares=shares, sampler=sampler, data=data)
