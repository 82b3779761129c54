"""Batches that all ranks share: equally with ``batch_size="global"``, by pace with ``batch_size="balanced"``.

The batches of all ranks together are those of one process: an epoch's order is a permutation from a seed, batch b of it
is what lies from b times the batch size on, and each rank takes its share of that, one behind the other. So every
sample is used once an epoch whatever the shares are, and an epoch goes on from any batch under other shares, or on
another number of ranks.

*Why ranks draw from the same shares.* With batch t each rank posts what the batch before took it
(``number_exchange.py``). All put the same numbers into the same arithmetic (``balance.py``), whose decisions count from
batch t + ahead on. A DataLoader with workers draws batches before they are trained on, so ``ahead`` is farther than
any rank's loader draws: the most that any rank needs, agreed on before the first batch. A rank that draws batch b
waits for what was posted with batch b - ahead, if that has not come yet.

*Why that wait ends.* A rank posts with batch t before it does anything else with it, and to get that batch it has
waited for what was posted with batch t - ahead at most. So there is no circle. Ranks that step together are no more
than a step apart, or as many batches as a step accumulates, which ``ahead`` has in it: what is waited for has come.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_bytescheduler.collectives.number_exchange import PostedNumbers
from lightning_bytescheduler.ddp.balance import Balance, part_of
from lightning_bytescheduler.exceptions import UnsupportedError

_CANNOT = "batch_size={how!r} cannot share out the batches of"
_WAY_OUT = "Give each rank's loader its batch size where you make it, by trainer.global_rank, and leave batch_size out."


class EpochOrder(Sampler[int]):
    """All samples of an epoch, in an order that is the same on all ranks.

    Args:
        size: Of the data set.
        shuffle: Whether the order is another one in each epoch.
        seed: Of the orders.
    """

    def __init__(self, size: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self._size = size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> EpochOrder:
        """The order of the samples of a loader into which Lightning has put its sampler."""
        size, sampler = len(cast(Any, loader.dataset)), loader.sampler
        if isinstance(sampler, DistributedSampler):
            return cls(size, shuffle=sampler.shuffle, seed=sampler.seed)
        # One rank may be left without: the order is the one that several ranks would have.
        return cls(size, shuffle=isinstance(sampler, RandomSampler), seed=int(os.environ.get("PL_GLOBAL_SEED", "0")))

    @property
    def described(self) -> str:
        """In words."""
        return f"shuffled from seed {self._seed}" if self._shuffle else "as it is"

    def set_epoch(self, epoch: int) -> None:
        """Which epoch begins next; Lightning says so."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        if not self._shuffle:
            return iter(range(self._size))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)  # as torch's DistributedSampler
        return iter(cast("list[int]", torch.randperm(self._size, generator=generator).tolist()))


class BalancedBatchSampler(Sampler[list[int]]):
    """This rank's part of each batch; see the module.

    Where the last batch of an epoch has fewer samples than there are ranks, a rank without one gets a sample that
    another one has, so that it has something to compute on; :meth:`size_of` says 0, and with ``weighting="samples"`` it
    counts nothing.

    Args:
        order: Of an epoch's samples, the same on all ranks.
        batch_size: Of all ranks together.
        rank: This one.
        shares: Of the n-th batch that is drawn in a pass over the data, by rank, for n = 0, 1, 2 ...
        drop_last: Leave out a last batch that is not full.
        trained: Batches of the epoch that have been trained on when a pass begins, as after a resume: it goes on there.

    Attributes:
        sampler: The order; Lightning tells it the epoch.
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
        self.sampler = order
        self._trained = trained
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._rank = rank
        self._shares = shares
        self._sizes: dict[int, int] = {}  # of this rank's batches of the epoch, by number

    def size_of(self, batch: int) -> int | None:
        """Samples of this rank in a batch of the epoch that was drawn; ``None`` if it was not."""
        return self._sizes.get(batch)

    def share_of_step(self, batch: int, accumulated: int) -> float:
        """How much a batch counts among those of its step, by samples of all ranks: 1 if they are equally large.

        Args:
            batch: Its number in the epoch.
            accumulated: Batches of a step; the last one of an epoch may have fewer.
        """
        first = batch - batch % accumulated
        sizes = [min(self.batch_size, len(self.sampler) - n * self.batch_size) for n in range(first, len(self))]
        return sizes[batch - first] * len(sizes[:accumulated]) / sum(sizes[:accumulated])

    def __len__(self) -> int:
        samples = len(self.sampler)
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        first = self._trained()
        first = first if first < len(self) else 0  # the epoch before this one is through
        self._sizes.clear()
        order = list(self.sampler)
        for batch in range(first, len(self)):
            together = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            shares = self._shares(batch - first)
            if len(together) < self.batch_size:
                shares = part_of(shares, len(together))
            start, size = sum(shares[: self._rank]), shares[self._rank]
            self._sizes[batch] = size
            yield together[start : start + size] or together[:1]


class AgreedShares:
    """Every batch's shares, from what all ranks have posted; for the training thread.

    Args:
        balance: What decides.
        ahead: Decisions count from so many batches later on, as the loaders of all ranks draw no farther ahead; with
            ``math.inf`` none ever does, and shares stay equal.
        failure: Asked while other ranks' numbers are waited for: why they will not come, if they will not.

    Attributes:
        balance: As given.
        ahead: As given.
    """

    def __init__(self, balance: Balance, ahead: float, failure: Callable[[], BaseException | None]) -> None:
        self.balance = balance
        self.ahead = ahead
        self._failure = failure
        self._posted: deque[PostedNumbers] = deque()
        self._taken = 0
        self._count = 0
        self._first = 0  # of this pass, among all batches

    @property
    def follow_pace(self) -> bool:
        """Whether they may change."""
        return math.isfinite(self.ahead)

    def add(self, posted: PostedNumbers) -> None:
        """A batch begins: all ranks post, after their number of samples, samples and nanoseconds of the one before."""
        if self.follow_pace:
            self._posted.append(posted)
        self._count += 1

    def of_pass(self, batch: int) -> tuple[int, ...]:
        """Shares of the n-th batch that is drawn in a pass over the data, from 0.

        Raises:
            BaseException: Why other ranks' numbers do not come.
        """
        if batch == 0:
            self._first = self._count  # what was drawn in the last pass, and not trained on, does not count
        number = self._first + batch
        while self._taken <= number - self.ahead:
            if not self._posted:
                raise RuntimeError(f"Batch {number} was drawn before batch {number - self.ahead} had begun.")
            posted = self._posted.popleft()
            posted.wait(self._failure)
            seconds = [spent / samples * 1e-9 if samples and spent else None for _, samples, spent in posted.rows]
            self.balance.observe(self._taken - 1, seconds)
            self._taken += 1
        return self.balance.shares(number)

    @property
    def present(self) -> tuple[int, ...]:
        """Of the batch that was drawn last."""
        return self.balance.present

    @property
    def saved_ms(self) -> float | None:
        """How much longer a step would take with equal shares, by present paces; ``None`` while they are unknown."""
        saved = self.balance.saved()
        return None if saved is None else 1e3 * saved

    @property
    def facts(self) -> dict[str, Any]:
        """What the plan says of them."""
        return {"batch_shares": self.present, "waiting_saved_ms": self.saved_ms}

    def metrics(self) -> dict[str, float]:
        """What is logged, where they may change."""
        if not self.follow_pace:
            return {}
        found = {f"bytescheduler/share_of_rank_{rank}": float(share) for rank, share in enumerate(self.present)}
        if self.saved_ms is not None:
            found["bytescheduler/waiting_saved_ms"] = self.saved_ms
        return found


def drawn_ahead(drawn: int, accumulated: int) -> int:
    """How many batches later what a batch tells can count on this rank.

    Args:
        drawn: Batches that its loader's processes are asked for before the first of them is there.
        accumulated: Batches of a step: ranks may be as many apart.
    """
    return max(drawn, 1) + max(accumulated, 1) + 1


def require_timed(device: torch.device, how: str) -> None:
    """Require a device on which it is known what a step takes, where shares go by that.

    Raises:
        UnsupportedError: If it is not known.
    """
    if device.type not in ("cpu", "cuda") and how != "global":
        why = f"the time that a step takes is measured on CPUs and CUDA GPUs, and this trains on {device.type}"
        raise UnsupportedError(f"{_CANNOT.format(how=how)} this training: {why}. {_WAY_OUT}")


def require_balanceable(loader: object, device: torch.device, how: str = "balanced", ranks: int = 2) -> DataLoader[Any]:
    """The loader, if its batches can be shared out.

    Args:
        loader: Of training data, as Lightning has made it.
        device: That is trained on.
        how: What the user asked for.
        ranks: How many there are; Lightning puts in a sampler of its own for several.

    Raises:
        UnsupportedError: If not; says why, and what to do instead.
    """
    cannot = _CANNOT.format(how=how)
    require_timed(device, how)
    if hasattr(loader, "plan") and hasattr(loader, "draws_ahead"):
        raise UnsupportedError(
            f"{cannot} a loader of slices without its data module. Give the Trainer that: "
            "trainer.fit(model, datamodule=data)."
        )
    if type(loader) is not DataLoader:
        raise UnsupportedError(f"{cannot} a {type(loader).__name__}: a plain DataLoader is needed. {_WAY_OUT}")
    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"{cannot} an IterableDataset: samples need numbers, to be shared out. Or cut the data into slices, for a "
            f"SliceDataModule. {_WAY_OUT}"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        what = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "batches of its own"
        raise UnsupportedError(f"{cannot} a DataLoader with {what}: it has to have a batch_size. {_WAY_OUT}")
    sampler = loader.sampler
    if type(sampler) is not DistributedSampler and (ranks > 1 or not _takes_each_once(sampler, loader)):
        raise UnsupportedError(
            f"{cannot} a DataLoader with a {type(sampler).__name__}: Lightning has to put in its own sampler. "
            "Leave out Trainer(use_distributed_sampler=False), and the loader's sampler."
        )
    return loader


def _takes_each_once(sampler: object, loader: DataLoader[Any]) -> bool:
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(cast(Any, loader.dataset))
    return type(sampler) is SequentialSampler


class LateLoader(DataLoader[Any]):
    """Draws nothing before its first batch is asked for.

    Lightning makes iterators before it knows where the epoch of a checkpoint stands, and the workers of a DataLoader
    begin to draw at once.
    """

    def __iter__(self) -> Any:
        """See DataLoader."""
        return LateIterator(super().__iter__)


class LateIterator:
    """Begins at the first batch.

    Args:
        begin: Makes what it goes through.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._begun: Iterator[Any] | None = None

    def __iter__(self) -> LateIterator:
        return self

    def __next__(self) -> Any:
        if self._begun is None:
            self._begun = self._begin()
        return next(self._begun)


_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def arguments_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader of other batches of the same samples takes over from one."""
    return {name: getattr(loader, name) for name in _ARGUMENTS}


def balanced_loader(
    loader: DataLoader[Any],
    rank: int,
    shares: Callable[[int], Sequence[int]],
    *,
    together: int,
    trained: Callable[[], int],
) -> tuple[DataLoader[Any], BalancedBatchSampler]:
    """The same loader, of which each rank draws its share of every batch.

    Args:
        loader: That :func:`require_balanceable` let pass.
        rank: This one.
        shares: See :class:`BalancedBatchSampler`.
        together: Samples of a batch, over all ranks.
        trained: See :class:`BalancedBatchSampler`.

    Returns:
        The loader, and what draws its batches.
    """
    order = EpochOrder.of(loader)
    drawn = BalancedBatchSampler(order, together, rank, shares, drop_last=loader.drop_last, trained=trained)
    return LateLoader(loader.dataset, batch_sampler=drawn, **arguments_of(loader)), drawn
