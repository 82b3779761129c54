"""The training data of a fit, of whose batches each rank takes its share: of a DataLoader, or in slices.

Of a DataLoader, the strategy draws the batches (``balanced_batches.py``). Slices have a plan of their own that only has
to be told the shares, as ranks read different ones (``slices/epoch_plan.py``). What all ranks agree on is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_bytescheduler.ddp.balance import Balance, part_of
from lightning_bytescheduler.ddp.balanced_batches import (
    AgreedShares,
    EpochOrder,
    balanced_loader,
    drawn_ahead,
    require_balanceable,
    require_timed,
)
from lightning_bytescheduler.ddp.epoch_position import (
    POSITION,
    EpochData,
    is_amid_epoch,
    note_position,
    require_same_epoch,
    rewind_to_step,
    unfinished_batches,
)
from lightning_bytescheduler.ddp.runtime import SchedulerRuntime
from lightning_bytescheduler.ddp.sample_weights import BatchSizes, Weighting
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info

if TYPE_CHECKING:
    from lightning_bytescheduler.slices.epoch_plan import EpochPlan

__all__ = ["BatchSharing", "SharedBatches"]


class _Sizes(BatchSizes, Protocol):
    def share_of_step(self, batch: int, accumulated: int) -> float:
        """How much a batch counts among those of its step."""


@dataclass(frozen=True, kw_only=True)
class SharedBatches:
    """Training data of which each rank takes its share.

    Attributes:
        loader: To train on.
        shares: Of each batch.
        sizes: Of this rank's batches.
        data: What the epoch is drawn from; ``None`` of slices, which know by themselves where they stand.
    """

    loader: object
    shares: AgreedShares
    sizes: _Sizes
    data: EpochData | None


class BatchSharing:
    """Shares out what one strategy trains on.

    Args:
        weighting: What the user said.

    Attributes:
        batches: Of the current fit, or of the last one, once they are shared out.
    """

    def __init__(self, weighting: Weighting) -> None:
        self._weighting = weighting
        self.batches: SharedBatches | None = None
        self._resumed: Mapping[str, Any] | None = None  # what the checkpoint has of its epoch
        self._loaders = 0  # that were shared out

    def begin(self) -> None:
        """A fit begins."""
        self.batches = self._resumed = None

    def share_out(
        self,
        loader: object,
        trainer: pl.Trainer,
        runtime: SchedulerRuntime | None,
        meet: Callable[[str, Mapping[str, str]], None] | None,
        several: bool,
    ) -> object:
        """Have each rank take its share of every batch, where that is asked for; all ranks at once.

        Args:
            loader: Of the training data, as Lightning has made it.
            trainer: Whose batches are trained on.
            runtime: This rank's, once the model is wrapped.
            meet: Makes sure that facts are the same on all ranks, by the name of the meeting; ``None`` on one rank.
            several: Whether another loader was loaded with this one.

        Returns:
            The loader to train on.

        Raises:
            OptionError: If a batch is too small, or too large for the limits of ``batch_size``, or not what the
                checkpoint's epoch was drawn in.
            UnsupportedError: If the loader's batches cannot be shared out, or there is another loader.
        """
        weighting = self._weighting
        how = weighting.batch_size
        if how is None or (meet is None and not weighting.together and not self._goes_on(trainer)):
            return loader
        if runtime is None and meet is not None:
            raise UnsupportedError(
                f"batch_size={how!r} shares training data out once the model is wrapped, and it was loaded before, "
                "as by trainer.estimated_stepping_batches in setup. Ask for that in configure_optimizers, or later."
            )
        plan = _plan_of(loader)
        if plan is not None and self.batches is not None and self.batches.sizes is plan:
            return loader  # of the next epoch
        if plan is None:
            require_balanceable(loader, trainer.strategy.root_device, str(how), 1 if meet is None else 2)
        self._loaders += 1
        if meet is not None:
            facts = plan.facts if plan is not None else _facts(loader)  # type: ignore[arg-type]  # balanceable
            meet(f"batches {self._loaders}", facts)
            if several:
                raise UnsupportedError(
                    f"batch_size={how!r} shares out the batches of one DataLoader, and there are several. Make one "
                    "data set of them, or leave batch_size out."
                )
        before = None if self.batches is None else self.batches.shares  # of a loader that Lightning has made anew
        batches = _Sharing(weighting, trainer, None if meet is None else runtime, before)
        self.batches = batches.of_slices(loader, plan) if plan is not None else batches.of_loader(loader, self._resumed)  # type: ignore[arg-type]
        return self.batches.loader

    def _goes_on(self, trainer: pl.Trainer) -> bool:
        """Whether one rank alone is to go on with an epoch that several have begun to share."""
        return self.batches is not None or is_amid_epoch(self._resumed, trainer)

    def weigh(self, loss: torch.Tensor, trainer: pl.Trainer) -> None:
        """Have a loss count by its samples among the batches of its step, on a rank that has all of them."""
        if self.batches is None or self._weighting.samples is not None:
            return
        share = self.batches.sizes.share_of_step(trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches)
        if share != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * share)

    def note(self, checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
        """Add to a checkpoint of a fit what has to be known for its epoch to go on."""
        if self.batches is not None and "loops" in checkpoint:
            note_position(checkpoint, self.batches.data, module.trainer)

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, at the beginning of a step."""
        if self._weighting.batch_size is not None:
            rewind_to_step(checkpoint)
            self._resumed = checkpoint.get(POSITION)


class _Sharing:
    """One loader, and what ranks agree on."""

    def __init__(
        self,
        weighting: Weighting,
        trainer: pl.Trainer,
        runtime: SchedulerRuntime | None,
        before: AgreedShares | None,
    ) -> None:
        self.before = before
        self.weighting = weighting
        self.trainer = trainer
        self.runtime = runtime
        self.rank, self.ranks = (0, 1) if runtime is None else (dist.get_rank(), dist.get_world_size())

    def of_loader(self, loader: DataLoader[Any], saved: Mapping[str, Any] | None) -> SharedBatches:
        """Batches that the strategy draws.

        Args:
            loader: That can be shared out.
            saved: What the checkpoint that the training goes on from has of its epoch, if there is one.
        """
        size = loader.batch_size or 1
        total = self.weighting.batch_of_all(size, self.ranks) or size
        self._require_one_for_each("DataLoader(batch_size)", total)
        order = EpochOrder.of(loader)
        data = EpochData(batch_size=total, samples=len(order), order=order.described, ranks=self.ranks)
        require_same_epoch(saved, data, self.trainer)
        shares = self._shares(total, loader.num_workers * (loader.prefetch_factor or 1))
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        made, sampler = balanced_loader(
            loader, self.rank, shares.of_pass, together=total, trained=lambda: progress.current.completed
        )
        return self._shared(SharedBatches(loader=made, shares=shares, sizes=sampler, data=data))

    def of_slices(self, loader: Any, plan: EpochPlan) -> SharedBatches:
        """Batches that the slices' plan makes, for all epochs of the fit.

        Args:
            loader: Of the first epoch.
            plan: Whose batches it has.
        """
        total = plan.batch_size
        require_timed(self.trainer.strategy.root_device, str(self.weighting.batch_size))
        self._require_one_for_each("SliceDataModule(batch_size)", total)
        shares = self._shares(total, loader.draws_ahead)

        def of_batch(number: int, size: int) -> Sequence[int]:
            found = shares.of_pass(number)
            return found if size == total else part_of(found, size)

        plan.share_out(of_batch, unfinished=lambda: unfinished_batches(self.trainer))
        return self._shared(SharedBatches(loader=loader, shares=shares, sizes=plan, data=None))

    def _require_one_for_each(self, option: str, total: int) -> None:
        if total < self.ranks:
            how = self.weighting.batch_size
            hint = f"With batch_size={how!r} in the strategy it counts for all {self.ranks} ranks together."
            raise OptionError(option, total, f"{self.ranks} or more, one for each rank", hint)

    def _shares(self, total: int, drawn: int) -> AgreedShares:
        if not self.weighting.by_pace or self.runtime is None:
            return AgreedShares(Balance(total, self.ranks, ahead=1), math.inf, lambda: None)
        message = torch.tensor(
            [drawn_ahead(drawn, self.trainer.accumulate_grad_batches)], device=self.trainer.strategy.root_device
        )
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
        ahead, before = int(message), self.before
        if before is not None and before.balance.total == total and before.ahead >= ahead:
            return before  # paces are known
        # What a batch took is told with the next one.
        balance = Balance(total, self.ranks, ahead=ahead + 1, limits=self.weighting.limits(self.ranks, total))
        return AgreedShares(balance, ahead, self.runtime.own_failure)

    def _shared(self, batches: SharedBatches) -> SharedBatches:
        shares, loop = batches.shares, self.trainer.fit_loop
        weights = None if self.runtime is None else self.runtime.weights
        if weights is not None:
            weights.share_out(shares, batches.sizes, lambda: loop.batch_idx)
        said = (
            f"by pace; a change counts {shares.ahead + 1} batches later, as loaders draw ahead"
            if shares.follow_pace
            else f"by rank {shares.present}"
        )
        rank_zero_info(f"bytescheduler: batches of {sum(shares.present)} samples are shared out {said}.")
        return batches


def _plan_of(loader: object) -> EpochPlan | None:
    """The plan of a loader of slices, whose batches ranks share; what takes time to import is there if one is."""
    if not hasattr(loader, "plan"):
        return None
    from lightning_bytescheduler.slices.epoch_plan import EpochPlan

    plan = loader.plan
    return plan if isinstance(plan, EpochPlan) and plan.is_shared else None


def _facts(loader: DataLoader[Any]) -> dict[str, str]:
    order = EpochOrder.of(loader)
    return {
        "the DataLoader's batch_size": str(loader.batch_size),
        "the DataLoader's drop_last": str(loader.drop_last),
        "samples of the training data": str(len(order)),
        "the order of the training data": order.described,
    }
