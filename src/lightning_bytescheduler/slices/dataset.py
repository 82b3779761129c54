"""Slices as an iterable data set of PyTorch, for loops without Lightning."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_bytescheduler.slices.batches import BatchReader
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.lock_step import LockStepPlan
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.store import SliceStore

__all__ = ["SliceDataset"]


class SliceDataset(IterableDataset[list[Any]]):
    """Batches of one epoch, each a list of samples, for ``DataLoader(dataset, batch_size=None)``.

    Every rank gets the same number of batches, and all samples are in one batch of one rank (but for ``shortage``).
    The workers of a DataLoader share the batches out, and the order is the same with any number of them. It has no
    position: :class:`SliceDataModule` is what resumes.

    Args:
        source: URLs, as for :class:`SliceDataModule`, or slices that were opened.
        batch_sizes: Samples of a batch, of each rank.
        rank: This one.
        seed: Of the order of slices, and of samples in them.
        shuffle: Take the slices in another order in each epoch.
        shuffle_samples: Take the samples of a slice in an order of their own too; holds a whole slice in memory.
        shortage: ``"pad"`` repeats or ``"drop"`` leaves out samples where a step has fewer than there are ranks.
        transform: Applied to each sample.
        options: How slices are stored and fetched.

    Raises:
        OptionError: If an option is not allowed.
        SourceUnavailableError: If a source stays away.
    """

    def __init__(
        self,
        source: str | Sequence[str] | SliceSource,
        *,
        batch_sizes: Sequence[int] = (1,),
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_samples: bool = False,
        shortage: str = "pad",
        transform: Callable[[Any], Any] | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        found = source if isinstance(source, SliceSource) else open_source(source)
        self._plan = LockStepPlan(
            SliceCatalogue(found.slices),
            batch_sizes=batch_sizes,
            rank=rank,
            seed=seed,
            shuffle=shuffle,
            shortage=shortage,
        )
        self._epoch = torch.zeros((), dtype=torch.int64)
        with contextlib.suppress(RuntimeError, OSError):  # workers that persist see which epoch is wanted
            self._epoch.share_memory_()
        self._reader = BatchReader(
            SliceStore(found, options), transform=transform, shuffle_samples=shuffle_samples, seed=seed
        )

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self._plan.epoch != (epoch := int(self._epoch)):
            self._plan.start_epoch(epoch)
        for batch in itertools.islice(self._plan, first, None, step):
            samples, report = self._reader.read(batch)
            for key, reason in report.corrupt:
                warnings.warn(f"Slice {key!r} is corrupt, others are repeated in its place: {reason}", stacklevel=2)
            yield samples if isinstance(samples, list) else list(samples)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated next.

        Raises:
            OptionError: If it is no number of an epoch.
        """
        self._plan.start_epoch(epoch)
        self._epoch.fill_(epoch)
