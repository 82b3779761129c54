"""The loader of a rank's training data, which goes on where a checkpoint stood in the epoch.

An epoch's order follows from a seed, and ranks take their samples from it in turn, as Lightning's sampler deals them.
So with as many ranks the number of batches says what has been trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_bytescheduler.ddp.batches import LateLoader, arguments_of
from lightning_bytescheduler.lightning_api import pl


class EpochShare(BatchSampler):
    """This rank's batches of an epoch.

    Attributes:
        done: Batches that the next pass leaves out.
    """

    done = 0

    def __iter__(self) -> Iterator[list[int]]:
        """See BatchSampler."""
        done, self.done = self.done, 0
        return islice(super().__iter__(), done, None)


def shared_loader(loader: object) -> object:
    """Return a loader that can go on within an epoch; ``loader`` itself unless it is a plain one of numbered samples.

    Args:
        loader: The loader of training data, as Lightning has made it, with its own sampler.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return loader
    batches: Any = loader.batch_sampler
    dealt: Any = batches.sampler if type(batches) is BatchSampler else None
    if type(dealt) is not DistributedSampler:
        return loader
    share = EpochShare(dealt, batches.batch_size, batches.drop_last)
    return LateLoader(loader.dataset, batch_sampler=share, **arguments_of(loader))


def share_of(trainer: pl.Trainer) -> EpochShare | None:
    """Return the share that a fit trains on; ``None`` unless its loader is one of :func:`shared_loader`."""
    share = getattr(trainer.train_dataloader, "batch_sampler", None)
    return share if isinstance(share, EpochShare) else None
