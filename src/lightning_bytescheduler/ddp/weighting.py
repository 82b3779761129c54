"""What the user says of weighting and balanced batches, and what is made of it when the training data are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import is_whole, require_one_of
from lightning_bytescheduler.ddp.balance import Balance
from lightning_bytescheduler.ddp.balanced_batches import (
    AgreedShares,
    EpochOrder,
    balanced_loader,
    drawn_ahead,
    require_balanceable,
)
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.sample_weights import SampleCounter, name_of
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info

__all__ = ["Weighting", "batch_facts", "share_out"]

_WEIGHTINGS = ("ranks", "samples")


class Weighting:
    """What a rank's gradient counts by, as the user said.

    Args:
        weighting: ``"ranks"`` or ``"samples"``.
        samples: Says how many samples a batch has; Lightning's ``extract_batch_size`` when left out.
        batch_size: ``"balanced"`` for batches that follow each rank's pace.
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
        if batch_size not in (None, "balanced"):
            hint = "A number is an option of the other strategy, DiLoCoStrategy(batch_size=...), or the DataLoader's."
            raise OptionError("batch_size", batch_size, "'balanced', or left out", hint)
        self.balanced = batch_size == "balanced"
        if self.balanced and not self.by_samples:
            hint = "Batches of unequal size need weighting='samples': else their samples would not count alike."
            raise OptionError("batch_size", batch_size, "left out, unless weighting='samples'", hint)
        most = max_batch_size if isinstance(max_batch_size, (list, tuple)) else [max_batch_size]
        if max_batch_size is not None and not (most and all(is_whole(limit, 1) for limit in most)):
            allowed = "a whole number of samples, 1 or more, or one for each rank"
            raise OptionError("max_batch_size", max_batch_size, allowed)
        if max_batch_size is not None and not self.balanced:
            raise OptionError("max_batch_size", max_batch_size, "left out, unless batch_size='balanced'")
        self._most = max_batch_size

    @property
    def facts(self) -> dict[str, object]:
        """What has to be the same on all ranks."""
        return {
            "weighting": self.name,
            "samples": None if self.samples is None else "a function",
            "batch_size": "balanced" if self.balanced else None,
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


def batch_facts(loader: object, device: torch.device) -> dict[str, str]:
    """What of a loader of training data has to be the same on all ranks that share its batches out.

    Raises:
        UnsupportedError: If they cannot be shared out.
    """
    checked = require_balanceable(loader, device)
    order = EpochOrder.of(checked)
    return {
        "the DataLoader's batch_size": str(checked.batch_size),
        "the DataLoader's drop_last": str(checked.drop_last),
        "samples of the training data": str(len(order)),
        "the order of the training data": order.described,
    }


def share_out(
    weighting: Weighting,
    loader: object,
    trainer: pl.Trainer,
    runtime: SchedulerRuntime,
) -> tuple[object, AgreedShares]:
    """Have each rank draw its share of every batch; all ranks at once, once their :func:`batch_facts` are the same.

    Args:
        weighting: What the user said.
        loader: Of the training data.
        trainer: Whose batches are trained on.
        runtime: This rank's, where gradients count by samples.

    Returns:
        The loader to train on, and its shares.

    Raises:
        OptionError: If a batch is too small, or too large for ``max_batch_size``.
        UnsupportedError: If the loader's batches cannot be shared out, or there is another loader.
    """
    weights, device = runtime.engine.weights, trainer.strategy.root_device
    checked = require_balanceable(loader, device)
    if weights is None or weights.waits_to_share:
        raise UnsupportedError(
            "batch_size='balanced' shares out the batches of one DataLoader, and there are several. Make one data set "
            "of them, or leave batch_size out."
        )
    if checked.num_workers and trainer.ckpt_path is not None:
        raise UnsupportedError(
            "batch_size='balanced' cannot go on from a checkpoint with DataLoader(num_workers=...): workers draw "
            "batches before it is known where the epoch stands. Resume with num_workers=0, or leave batch_size out."
        )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    message = torch.tensor([drawn_ahead(checked, trainer.accumulate_grad_batches)], device=device)
    dist.all_reduce(message, op=dist.ReduceOp.MAX)
    ahead, total = int(message), (checked.batch_size or 1) * ranks
    # What a batch took is told with the next one.
    balance = Balance(total, ranks, ahead=ahead + 1, limits=weighting.limits(ranks, total))
    shares = AgreedShares(balance, ahead, runtime.own_failure)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    made, sampler = balanced_loader(checked, rank, ranks, shares.of_pass, trained=lambda: progress.current.completed)
    weights.share_out(shares, sampler, lambda: trainer.fit_loop.batch_idx)
    rank_zero_info(
        f"bytescheduler: batches of {total} samples are shared out by pace; a change counts {ahead + 1} batches later, "
        "as loaders draw ahead."
    )
    return made, shares
