"""The loader of a rank's training data: its share of an epoch's samples.

A share continues where a checkpoint stood, with any number of ranks. An epoch's order follows from a seed, and ranks
take their samples from it in turn, as Lightning's sampler deals them. So these numbers say what has been trained on:
how many ranks there were, and how many samples of its share each had taken. With the same number of ranks, each
continues in its share. With another number, the rest of the order is dealt anew, as if it were all of the data. This
may repeat with each restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_bytescheduler.ddp.batches import EpochOrder, arguments_of
from lightning_bytescheduler.lightning_api import pl


def deal(order: Sequence[int], ranks: int, rank: int) -> Sequence[int]:
    """Return a rank's share. Like torch's DistributedSampler, this repeats the first samples to make shares equal."""
    if not order:
        return order
    length = -(-len(order) // ranks) * ranks
    return [order[index % len(order)] for index in range(rank, length, ranks)]


def what_is_left(order: Sequence[int], taken: Sequence[Sequence[int]]) -> Sequence[int]:
    """An order without the samples that were trained on.

    Args:
        order: The epoch's order.
        taken: For each stretch of training, how many samples each of its ranks took.
    """
    for counts in taken:
        used = {sample for rank, count in enumerate(counts) for sample in deal(order, len(counts), rank)[:count]}
        order = [sample for sample in order if sample not in used]
    return order


class EpochShare(Sampler[list[int]]):
    """This rank's batches of an epoch.

    Args:
        order: The order of an epoch's samples, the same on all ranks.
        batch_size: This rank's batch size.
        rank: This rank.
        ranks: Number of ranks.
        drop_last: Leave out a last batch that is not full.
        trained: Batches of the epoch that this rank has been through, as Lightning counts them.

    Attributes:
        sampler: The order; Lightning tells it the epoch.
        batch_size: As given.
    """

    def __init__(
        self,
        order: EpochOrder,
        batch_size: int,
        rank: int,
        ranks: int,
        *,
        drop_last: bool = False,
        trained: Callable[[], int] = lambda: 0,
    ) -> None:
        self.sampler = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._rank = rank
        self._ranks = ranks
        self._trained = trained
        self._before: list[list[int]] = []  # see what_is_left; for the current pass, or the first
        self._first = 0  # samples of the share that were taken before that pass
        self._batches_before = 0
        self._size = 0  # samples of the share
        self._to_resume = False

    def resume(self, saved: Sequence[Mapping[str, Any]], rank_of_each: int) -> bool:
        """Make the next pass over the data continue where an epoch stood.

        Args:
            saved: What :attr:`position` returned on the first rank of each worker.
            rank_of_each: How many ranks a worker had; all of them take the same number of batches.

        Returns:
            Whether that is possible: not with other data, or another order.
        """
        if any((one["samples"], one["order"]) != (len(self.sampler), self.sampler.described) for one in saved):
            return False
        taken = [one["taken"] for one in saved for _ in range(rank_of_each)]
        before = [list(counts) for counts in saved[0]["before"]]
        if len(taken) == self._ranks:
            self._before, self._first = before, taken[self._rank]
        elif what_is_left(range(len(self.sampler)), [*before, taken]):
            self._before, self._first = [*before, taken], 0
        self._to_resume = True
        return True

    def left(self) -> int:
        """Batches of the next pass."""
        return self._batches(len(self._share()) - self._first)

    @property
    def position(self) -> dict[str, Any]:
        """This rank's place in the epoch: primitives only."""
        taken = self._first
        if not self._to_resume:
            taken = min(self._size, taken + (self._trained() - self._batches_before) * self.batch_size)
        return {
            "samples": len(self.sampler),
            "order": self.sampler.described,
            "before": [list(counts) for counts in self._before],
            "taken": max(taken, 0),
        }

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._batches(-(-len(self.sampler) // self._ranks))

    def __iter__(self) -> Iterator[list[int]]:
        if not self._to_resume:
            self._before, self._first = [], 0
        self._to_resume = False
        share = self._share()
        self._size, self._batches_before = len(share), self._trained()
        left = share[self._first :]
        for batch in range(self._batches(len(left))):
            yield list(left[batch * self.batch_size : (batch + 1) * self.batch_size])

    def _share(self) -> Sequence[int]:
        return deal(what_is_left(list(self.sampler), self._before), self._ranks, self._rank)

    def _batches(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


class ShareLoader(DataLoader[Any]):
    """Draws its batches from an :class:`EpochShare`, and nothing before the first one is requested.

    Lightning makes iterators before it is known where the epoch of a checkpoint stands.
    """

    def __iter__(self) -> Any:
        """See DataLoader."""
        yield from super().__iter__()


def shared_loader(loader: object, rank: int, ranks: int, trained: Callable[[], int]) -> object:
    """Return a loader that can go on within an epoch; ``loader`` itself unless it is a plain one of numbered samples.

    Args:
        loader: The loader of training data, as Lightning has made it, with its own sampler.
        rank: This rank.
        ranks: Number of ranks.
        trained: See :class:`EpochShare`.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return loader
    batches = loader.batch_sampler
    dealt: Any = batches.sampler if type(batches) is BatchSampler else None
    if type(batches) is not BatchSampler or type(dealt) is not DistributedSampler:
        return loader
    if dealt.drop_last or dealt.dataset is not loader.dataset or (dealt.rank, dealt.num_replicas) != (rank, ranks):
        return loader
    order = EpochOrder(len(cast(Any, loader.dataset)), shuffle=dealt.shuffle, seed=dealt.seed)
    share = EpochShare(order, batches.batch_size, rank, ranks, drop_last=batches.drop_last, trained=trained)
    return ShareLoader(loader.dataset, batch_sampler=share, **arguments_of(loader))


def share_of(trainer: pl.Trainer) -> EpochShare | None:
    """Return the share that a fit trains on; ``None`` unless its loader is a :class:`ShareLoader`."""
    share = trainer.train_dataloader.batch_sampler if isinstance(trainer.train_dataloader, ShareLoader) else None
    return share if isinstance(share, EpochShare) else None
