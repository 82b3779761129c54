"""Batches of training data that all ranks share: equally with ``batch_size="global"``, by pace with ``"balanced"``.

All ranks' batches together equal those of one process. The order of an epoch is a permutation from a seed, batch b
begins at b times the batch size, and each rank takes its share of the batch, in rank order. So every sample is used
once per epoch whatever the shares are, and an epoch can go on from any batch under other shares or on another number of
ranks. Slices have their own plan (``slices/epoch_plan.py``) that only needs the shares.

*Why ranks draw from the same shares.* With batch t each rank posts the time of the previous batch
(``number_exchange.py``). All put the same numbers into the same arithmetic (:class:`Balance`), whose decisions count
from batch t + ahead on. A DataLoader with workers draws batches early, so ``ahead`` is farther than any rank's loader
draws; the ranks agree on it before the first batch. A rank that draws batch b waits until the numbers posted with batch
b - ahead + 1 have come.

*Why that wait ends.* A rank posts with batch t before it does anything else with it. To get that batch it waited for
numbers of batch t - ahead + 1 at most, so the waits form no circle. Ranks that step together are at most one step
apart, which may be several accumulated batches; ``ahead`` includes these, so the numbers have been sent.

*Where an epoch stands, in a checkpoint.* Given the same batch size, order and samples, the number of trained batches
says which samples were used, on any number of ranks. Lightning saves that number; the rest is saved beside it. A
checkpoint in the middle of an accumulated step lacks the gradients of its earlier batches, so training goes on with the
first batch of that step.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_bytescheduler.collectives.number_exchange import PostedNumbers
from lightning_bytescheduler.ddp.fit import Fit
from lightning_bytescheduler.ddp.sample_weights import BatchSizes, RobustMean, Weighting
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl

_LEAST_GAIN = 0.05  # fraction of a step that justifies a change
_CERTAIN = 3.0  # times the uncertainty of a pace


def shares_by_pace(total: int, paces: Sequence[float], limits: Sequence[int]) -> tuple[int, ...]:
    """Share samples out so that the slowest rank finishes as early as possible.

    Args:
        total: Samples of a batch over all ranks: at least one for each rank, at most the sum of ``limits``.
        paces: Seconds per sample, by rank, each above 0.
        limits: The most samples that each rank may take, 1 or more.

    Returns:
        Samples by rank, each 1 or more; their sum is ``total``.
    """
    rate = sum(1.0 / pace for pace in paces)
    shares = [min(max(int(total / pace / rate), 1), limit) for pace, limit in zip(paces, limits, strict=True)]
    ranks = range(len(shares))
    while sum(shares) > total:
        shares[max((rank for rank in ranks if shares[rank] > 1), key=lambda rank: shares[rank] * paces[rank])] -= 1
    while sum(shares) < total:
        free = (rank for rank in ranks if shares[rank] < limits[rank])
        shares[min(free, key=lambda rank: (shares[rank] + 1) * paces[rank])] += 1
    return tuple(shares)


def part_of(shares: Sequence[int], size: int) -> tuple[int, ...]:
    """Scale shares to a batch of ``size`` samples, with at least one for each rank if there are enough.

    A rank without a sample would compute on a copy of another rank's and save no time.
    """
    if size == sum(shares):
        return tuple(shares)
    if size < len(shares):
        return tuple(int(rank < size) for rank in range(len(shares)))
    return shares_by_pace(size, [1.0 / share for share in shares], shares)


class Balance:
    """The shares of each batch, so that all ranks finish together; for the training thread. Reads no clock.

    A rank's *pace* is the computing time of one sample, in seconds: the mean of the middle half of recent values, so
    that short disturbances do not move it. When several values in a row lie well above or below it, the pace has
    changed, and older values are dropped. A rank whose share changes is measured anew, as part of a step's time does
    not depend on the number of samples.

    *When shares change*: when the slowest rank's step would become shorter by more than a few percent and by more than
    the paces are uncertain. So noise changes nothing, and equal machines keep equal shares.

    *For which batch*: a decision based on the times of batch t counts from batch t + ahead on. All ranks put the same
    numbers in the same order into the same arithmetic, so they decide alike without further messages. With each batch a
    rank posts the time of the previous one (``number_exchange.py``). A rank that asks for the shares of batch b needs
    what was posted with all batches up to b - ahead + 1.

    Source: performance-aware scheduling. DiLoCo's rounds use the same paces (``diloco/round_roster.py``) to choose the
    number of steps, where this module chooses their size.

    Args:
        total: Samples of a batch over all ranks: at least one for each rank, at most the sum of ``limits``.
        ahead: A decision counts this many batches later, 2 or more: the time of a batch is posted with the next one,
            and no rank's loader draws farther ahead. With ``math.inf`` shares stay equal.
        failure: Called while waiting for other ranks' numbers; returns the reason if they will not come.
    """

    def __init__(
        self,
        total: int,
        ranks: int,
        *,
        ahead: float,
        limits: Sequence[int] | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._limits = tuple(limits) if limits is not None else (total,) * ranks
        self.changes = 0
        self.total = total
        self.ahead = ahead
        self._failure = failure
        self._paces = [RobustMean(64, faster=2.0) for _ in range(ranks)]  # seconds that one sample takes
        self._equal = shares_by_pace(total, [1.0] * ranks, self._limits)
        self._from: list[tuple[float, tuple[int, ...]]] = [(0, self._equal)]  # (first batch, shares), oldest first
        self._asked = 0
        self._posted: deque[PostedNumbers] = deque()
        self._taken = 0
        self._begun = 0
        self._first = 0  # number of this pass's first batch, counted over all passes

    @property
    def follows_pace(self) -> bool:
        """Whether shares may change."""
        return math.isfinite(self.ahead)

    def add(self, posted: PostedNumbers) -> None:
        """Record that a batch begins. Each row has samples, then the samples and nanoseconds of the previous one."""
        if self.follows_pace:
            self._posted.append(posted)
        self._begun += 1

    def of_pass(self, batch: int) -> tuple[int, ...]:
        """Return the shares of the n-th batch that is drawn in a pass over the data, from 0.

        Raises:
            BaseException: The reason why other ranks' numbers do not come.
        """
        if batch == 0:
            self._first = self._begun  # batches drawn in the last pass but not trained on do not count
        number = self._first + batch
        needed = number + 1 - self.ahead
        while self._taken <= needed:
            if not self._posted:
                raise RuntimeError(f"Batch {number} was drawn before batch {needed} had begun.")
            posted = self._posted.popleft()
            posted.wait(self._failure)
            seconds = [spent / samples * 1e-9 if samples and spent else None for _, samples, spent in posted.rows]
            self.observe(self._taken - 1, seconds)
            self._taken += 1
        self._asked = number
        return self.present

    def observe(self, batch: int, seconds: Sequence[float | None]) -> None:
        """Record the seconds per sample of each rank in batch ``batch``; ``None`` where unknown.

        Call this for every batch, in order.
        """
        last_from, current = self._from[-1]
        if batch < last_from:  # these times belong to shares that are already being replaced
            return
        for pace, value in zip(self._paces, seconds, strict=True):
            if value is not None and value > 0:
                pace.observe(value)
        if not all(pace.known for pace in self._paces):
            return
        paces = [pace.mean or 0.0 for pace in self._paces]
        wanted = shares_by_pace(self.total, paces, self._limits)
        gain = _longest(current, paces) / _longest(wanted, paces) - 1.0
        if gain <= max(_LEAST_GAIN, _CERTAIN * max(pace.uncertainty for pace in self._paces)):
            return
        self.changes += 1
        self._from.append((batch + self.ahead, wanted))
        for pace, before, now in zip(self._paces, current, wanted, strict=True):
            if abs(now - before) > 0.1 * before:
                pace.forget()

    @property
    def present(self) -> tuple[int, ...]:
        """Shares of the batch that was asked for last."""
        return next(shares for first, shares in reversed(self._from) if first <= self._asked)

    def metrics(self) -> dict[str, float]:
        """Return the values to log; empty if shares cannot change."""
        if not self.follows_pace:
            return {}
        return {f"bytescheduler/share_of_rank_{rank}": float(share) for rank, share in enumerate(self.present)}


def _longest(shares: Sequence[int], paces: Sequence[float]) -> float:
    return max(share * pace for share, pace in zip(shares, paces, strict=True))


POSITION = "lightning_bytescheduler.position"
"""Checkpoint key of the facts that an epoch's batches depend on."""

_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"  # Lightning's warning
_WAY_OUT = "Choose each loader's batch size where you make it, by trainer.global_rank, and leave batch_size out."


class EpochOrder(DistributedSampler[Any]):
    """The order of all samples of an epoch, the same on all ranks."""

    def __init__(self, size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(range(size), num_replicas=1, rank=0, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> EpochOrder:
        """Return the order of a loader that Lightning has given its sampler."""
        size, sampler = len(cast(Any, loader.dataset)), loader.sampler
        if isinstance(sampler, DistributedSampler):
            return cls(size, shuffle=sampler.shuffle, seed=sampler.seed)
        # On one rank Lightning puts in no sampler. Use the order that several ranks would have.
        return cls(size, shuffle=isinstance(sampler, RandomSampler), seed=int(os.environ.get("PL_GLOBAL_SEED", "0")))

    @property
    def described(self) -> str:
        """The order in words, for messages."""
        return f"shuffled from seed {self.seed}" if self.shuffle else "as it is"


class BalancedBatchSampler(BatchSampler):
    """Draws this rank's part of each batch; see the module.

    The last batch of an epoch may have fewer samples than there are ranks. A rank without a sample then gets a copy of
    another rank's to compute on. :meth:`size_of` returns 0 for it, and with ``weighting="samples"`` it has no weight.

    Args:
        order: Order of an epoch's samples, the same on all ranks.
        shares: Returns the shares by rank of the n-th batch drawn in a pass, n = 0, 1, 2, ...
        trained: Returns how many batches of the epoch are already trained on when a pass begins, as after a resume.
    """

    def __init__(
        self,
        order: EpochOrder,
        batch_size: int,
        rank: int,
        shares: Callable[[int], Sequence[int]],
        *,
        drop_last: bool = False,
        trained: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(order, batch_size, drop_last)
        self._order = order
        self._trained = trained
        self._rank = rank
        self._shares = shares
        self._sizes: dict[int, int] = {}  # this rank's samples by number of the batch in the epoch

    def size_of(self, batch: int) -> int | None:
        """Return this rank's samples in a batch of the epoch; ``None`` if it was not drawn."""
        return self._sizes.get(batch)

    def share_of_step(self, batch: int, accumulated: int) -> float:
        """Return a batch's weight within its step, by samples of all ranks; 1 if batches are equally large."""
        step = range(batch - batch % accumulated, len(self))[:accumulated]
        sizes = [min(self.batch_size, len(self._order) - n * self.batch_size) for n in step]
        return sizes[batch % accumulated] * len(sizes) / sum(sizes)

    def __iter__(self) -> Iterator[list[int]]:
        first = self._trained()
        first = first if first < len(self) else 0  # the previous epoch was complete
        self._sizes.clear()
        for batch, together in enumerate(islice(super().__iter__(), first, None)):
            shares = part_of(self._shares(batch), len(together))
            start, size = sum(shares[: self._rank]), shares[self._rank]
            self._sizes[first + batch] = size
            yield together[start : start + size] or together[:1]


def require_balanceable(loader: Any, how: str, device: torch.device, ranks: int) -> None:
    """Check that a loader's batches can be shared out: a plan of slices, or numbered samples in Lightning's order.

    Args:
        loader: Loader of training data, as Lightning made it.
        how: Value of the option ``batch_size``.
        device: The device that is trained on.
        ranks: Number of ranks; with several, Lightning puts in its own sampler.

    Raises:
        UnsupportedError: If they cannot be shared out; says why, and what to do instead.
    """
    if how != "global" and device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"batch_size={how!r}: the time of a step is measured on CPUs and CUDA GPUs, and this trains on "
            f"{device.type}. {_WAY_OUT}"
        )
    if _plan_of(loader) is not None:
        return
    found = [type(getattr(loader, name, None)) for name in ("batch_sampler", "sampler")]
    in_order = (DistributedSampler,) if ranks > 1 else (DistributedSampler, SequentialSampler, RandomSampler)
    drawn_again = found[1] is RandomSampler and loader.sampler.replacement
    if type(loader) is not DataLoader or found[0] is not BatchSampler or found[1] not in in_order or drawn_again:
        raise UnsupportedError(
            f"batch_size={how!r} shares out the batches of a plain DataLoader with a batch_size and the sampler that "
            "Lightning puts in, or of a SliceDataModule that the Trainer is given; samples need numbers. This is a "
            f"{type(loader).__name__}, with batch sampler {found[0].__name__} and sampler {found[1].__name__}. "
            f"{_WAY_OUT}"
        )


def _plan_of(loader: object) -> Any:
    plan = getattr(loader, "plan", None)
    return plan if getattr(plan, "is_shared", False) else None


class LateLoader(DataLoader[Any]):
    """A DataLoader that draws nothing until its first batch is asked for.

    Lightning makes iterators before it restores an epoch's position from a checkpoint, and the workers of a DataLoader
    begin to draw at once.
    """

    def __iter__(self) -> Any:
        """See DataLoader."""
        yield from super().__iter__()


_OF_BATCHES = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return a loader's arguments, except for its batches; for a loader of other batches of the same samples."""
    names = inspect.signature(DataLoader.__init__).parameters.keys() - {"self", *_OF_BATCHES}
    return {name: getattr(loader, name) for name in names}


@contextmanager
def loader_resumes() -> Iterator[None]:
    """Suppress Lightning's warning that a DataLoader begins anew in mid-epoch: here it goes on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
        yield


def _in_words(data: Mapping[str, Any]) -> str:
    ranks = "1 rank" if data["ranks"] == 1 else f"{data['ranks']} ranks"
    return f"batches of {data['batch_size']} samples (on {ranks}), of {data['samples']:,} {data['order']}"


class BatchSharing:
    """Gives each rank its share of the training batches of one fit.

    Attributes:
        balance: The shares; ``None`` until batches are shared out.
    """

    def __init__(self, weighting: Weighting) -> None:
        self._weighting = weighting
        self.balance: Balance | None = None
        self._sizes: BatchSizes | None = None
        self._data: dict[str, Any] = {}  # empty for slices, which save their own position
        self._resumed: Mapping[str, Any] = {}  # the checkpoint's facts about its epoch

    def share_out(
        self,
        loader: Any,
        trainer: pl.Trainer,
        fit: Fit | None,
        meet: Callable[[str, Mapping[str, str]], None],
    ) -> object:
        """Give each rank its share of every batch, if the user asked for that. All ranks call this together.

        Args:
            loader: Loader of training data, as Lightning made it.
            trainer: The trainer of the fit.
            fit: This rank's fit; ``None`` on one rank.
            meet: Checks that facts are the same on all ranks, under a name.

        Returns:
            The loader to train on.

        Raises:
            OptionError: If a batch is too small, or too large for the limits of ``batch_size``.
            UnsupportedError: If the batches cannot be shared out, or differ from those of the checkpoint's epoch.
        """
        how, device = str(self._weighting.batch_size), trainer.strategy.root_device
        if fit is None and trainer.world_size > 1:
            raise UnsupportedError(
                "batch_size=...: training data was loaded before the model is wrapped, as by "
                "trainer.estimated_stepping_batches in setup. Ask for that in configure_optimizers, or later."
            )
        if fit is None and how != "global" and self.balance is None and not self._is_amid(trainer):
            return loader
        plan = _plan_of(loader)
        if plan is not None and self._sizes is plan:
            return loader  # already shared out in an earlier epoch
        rank, ranks = (0, 1) if fit is None else (dist.get_rank(), dist.get_world_size())
        require_balanceable(loader, how, device, ranks)
        if plan is None:
            order, size = EpochOrder.of(loader), self._weighting.batch_of_all(loader.batch_size, ranks)
            data: dict[str, Any] = {"batch_size": size or loader.batch_size, "samples": len(order)}
            data |= {"order": order.described, "ranks": ranks}
            facts = {"the training data": _in_words(data), "the DataLoader's drop_last": str(loader.drop_last)}
            option, total, drawn = "DataLoader", data["batch_size"], loader.num_workers * (loader.prefetch_factor or 1)
        else:
            option, total, drawn = "SliceDataModule", plan.batch_size, loader.draws_ahead
            data, facts = {}, plan.facts
        if fit is not None:
            meet("shared batches", facts)
        if total < ranks:
            hint = f"With batch_size={how!r} in the strategy it counts for all {ranks} ranks together."
            raise OptionError(f"{option}(batch_size)", total, f"{ranks} or more, one for each rank", hint)
        self._require_same_epoch(data, trainer)
        self._data, self.balance = data, self._balance_of(total, ranks, drawn, trainer, fit)
        shares, progress = self.balance.of_pass, trainer.fit_loop.epoch_loop.batch_progress
        if plan is None:
            self._sizes = BalancedBatchSampler(
                order,
                total,
                rank,
                shares,
                drop_last=loader.drop_last,
                trained=lambda: progress.current.completed,
            )
            loader = LateLoader(loader.dataset, batch_sampler=self._sizes, **arguments_of(loader))
        else:
            plan.share_out(lambda n, size: part_of(shares(n), size), unfinished=lambda: unfinished_batches(trainer))
            self._sizes = plan
        if fit is not None:
            fit.weights.share_out(self.balance.add, self._sizes, lambda: trainer.fit_loop.batch_idx)
        return loader

    def _balance_of(self, total: int, ranks: int, drawn: int, trainer: pl.Trainer, fit: Fit | None) -> Balance:
        """Make the shares of batches of ``total`` samples; this rank's loader draws ``drawn`` batches ahead."""
        if fit is None or self._weighting.batch_size != "balanced":
            return Balance(total, ranks, ahead=math.inf)
        # Ranks may be apart by the batches of one accumulated step, and times are posted one batch later.
        later = max(drawn, 1) + trainer.accumulate_grad_batches + 2
        message = torch.tensor([later], device=trainer.strategy.root_device)
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
        ahead, before = int(message), self.balance
        if before is not None and before.total == total and before.ahead >= ahead:
            return before  # Lightning made the loader anew; the paces are still valid
        limits = self._weighting.limits(ranks, total)
        return Balance(total, ranks, ahead=ahead, limits=limits, failure=fit.own_failure)

    def require_one_loader(self, trainer: pl.Trainer) -> None:
        """Refuse several loaders of training data, once they are made.

        Raises:
            UnsupportedError: If batches are shared out, and there are several.
        """
        if self._weighting.batch_size is not None and len(cast(Any, trainer.fit_loop)._combined_loader.flattened) > 1:
            raise UnsupportedError(
                f"batch_size={self._weighting.batch_size!r} shares out the batches of one DataLoader, and there are "
                "several. Make one data set of them, or leave batch_size out."
            )

    def weigh(self, loss: torch.Tensor, trainer: pl.Trainer) -> None:
        """Weight a loss by its batch's samples within the step, on a rank that takes whole batches."""
        if self._sizes is None or self._weighting.samples is not None:
            return
        share = self._sizes.share_of_step(trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches)
        if share != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * share)

    def note(self, checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
        """Save in a checkpoint what is needed to go on within its epoch."""
        if self.balance is not None and "loops" in checkpoint:
            checkpoint[POSITION] = {**self._data, "batches_of_unfinished_step": unfinished_batches(module.trainer)}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore from a checkpoint. An unfinished step begins again, as its gradients are not saved."""
        if self._weighting.batch_size is None:
            return
        self._resumed = checkpoint.get(POSITION, {})
        left = self._resumed.get("batches_of_unfinished_step", 0)
        if left:
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            for counts in (progress["total"], progress["current"]):
                done = counts["processed"] - left
                counts.update(ready=done, started=done, processed=done, completed=done)

    def _is_amid(self, trainer: pl.Trainer) -> bool:
        """Whether training resumes in the middle of an epoch whose batches came from a shared DataLoader."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress  # already restored
        return "samples" in self._resumed and progress.current.processed > 0 and not progress.is_last_batch

    def _require_same_epoch(self, data: Mapping[str, Any], trainer: pl.Trainer) -> None:
        """Check that data and batch size are those of the checkpoint's unfinished epoch."""
        differs = any(data[name] != self._resumed.get(name) for name in data.keys() - {"ranks"})
        if differs and self._is_amid(trainer):
            raise UnsupportedError(
                f"The checkpoint is of the middle of an epoch of {_in_words(self._resumed)}. This training has "
                f"{_in_words(data)}: which samples are left cannot be told. Give the DataLoader the same data, the "
                "same seed, and batches of the same size: with batch_size='global' its batch_size counts for all "
                "ranks, however many there are. Or go on from the end of an epoch."
            )


def unfinished_batches(trainer: pl.Trainer) -> int:
    """Return how many batches of an unfinished accumulated step have been trained on."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return 0 if progress.is_last_batch else int(progress.current.processed % trainer.accumulate_grad_batches)
