"""Slices as an iterable data set of PyTorch, for loops without Lightning."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import collate

from lightning_bytescheduler.checks import is_whole, options_by_name, require_bool, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.batches import BatchReader
from lightning_bytescheduler.slices.catalogue import SliceCatalogue, require_seed
from lightning_bytescheduler.slices.epoch_plan import EpochPlan
from lightning_bytescheduler.slices.formats import SliceReader
from lightning_bytescheduler.slices.make import SLICE_BYTES
from lightning_bytescheduler.slices.options import (
    Shortage,
    StoreOptions,
    batch_sizes_of,
    require_batch_size,
    require_function,
    require_packages,
    require_shortage,
)
from lightning_bytescheduler.slices.source import SliceSource, open_source
from lightning_bytescheduler.slices.store import SliceStore


class _Batch(list[Any]):
    """The samples of a batch, which a DataLoader must not put into batches of its own."""


def _refuse(batches: list[_Batch], **_: Any) -> None:
    allowed = "None: a SliceDataset makes the batches itself, DataLoader(dataset, batch_size=None)"
    raise OptionError("batch_size", len(batches), allowed)


# Where PyTorch wants it to be said how a type is collated.
getattr(collate, "default_collate_fn_map", {})[_Batch] = _refuse


@options_by_name
class SliceDataset(IterableDataset[list[Any]]):
    """Batches of one epoch, each a list of samples, for ``DataLoader(dataset, batch_size=None)``.

    Every rank gets the same number of batches, and all samples are in one batch of one rank (but for ``shortage``).
    The workers of a DataLoader share the batches out, and the order is the same with any number of them. It has no
    position: :class:`SliceDataModule` is what resumes.

    Args:
        source: URLs, as for :class:`SliceDataModule`, or slices that were opened.
        batch_size: Samples of a batch; a list has one number for each rank.
        num_replicas: Ranks that share the samples; None is as many as ``batch_size`` has numbers.
        rank: This one, from 0.
        seed: Of the order of slices, and of samples in them.
        shuffle: Take the slices in another order in each epoch.
        shuffle_samples: Take the samples of a slice in an order of their own too; holds a whole slice in memory.
        shortage: ``"pad"`` repeats or ``"drop"`` leaves out samples where a step has fewer than there are ranks.
        transform: Applied to each sample.
        reader: Makes samples of bytes, for files whose suffix is not known.
        slice_bytes: Target size of the slices into which files without an index are divided.
        storage_options: For fsspec's file systems.
        options: How slices are stored and fetched.

    Raises:
        OptionError: If an option is not allowed.
        ImportError: If a package is missing, such as those of the extra ``data``.
        SourceUnavailableError: If a source stays away.
    """

    def __init__(
        self,
        source: str | Sequence[str] | SliceSource,
        *,
        batch_size: int | Sequence[int] = 1,
        num_replicas: int | None = None,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        shuffle_samples: bool = False,
        shortage: Shortage = "pad",
        transform: Callable[[Any], Any] | None = None,
        reader: SliceReader | None = None,
        slice_bytes: int = SLICE_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        size = require_batch_size("batch_size", batch_size)
        ranks = (1 if isinstance(size, int) else len(size)) if num_replicas is None else num_replicas
        sizes = batch_sizes_of("batch_size", size, require_whole("num_replicas", ranks, 1))
        if not is_whole(rank) or rank >= ranks:
            allowed = f"from 0 to {ranks - 1}; num_replicas, or a list as batch_size, says how many ranks there are"
            raise OptionError("rank", rank, allowed)
        require_seed("seed", seed)
        require_shortage(shortage)
        for option, flag in (("shuffle", shuffle), ("shuffle_samples", shuffle_samples)):
            require_bool(option, flag)
        require_function("transform", transform, "sample")
        require_function("reader", reader, "stream", "first")
        if options is not None and not isinstance(options, StoreOptions):
            raise OptionError("options", options, "a StoreOptions of lightning_bytescheduler.slices, or None")
        storing = options or StoreOptions()
        require_packages("SliceDataset")
        found = source
        if not isinstance(found, SliceSource):
            found = open_source(
                found,
                option="source",
                reader=reader,
                slice_bytes=slice_bytes,
                storage_options=storage_options,
                options=storing,
            )
        self._plan = EpochPlan(
            SliceCatalogue(found.slices),
            batch_sizes=sizes,
            rank=rank,
            seed=seed,
            shuffle=shuffle,
            shortage=shortage,
        )
        self._ranks = ranks
        self._epoch = torch.zeros((), dtype=torch.int64)
        with contextlib.suppress(RuntimeError, OSError):  # workers that persist see which epoch is wanted
            self._epoch.share_memory_()
        self._reader = BatchReader(
            SliceStore(found, storing), transform=transform, shuffle_samples=shuffle_samples, seed=seed
        )

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[list[Any]]:
        worker = get_worker_info()
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if ranks > 1 and self._ranks == 1 and (worker is None or not worker.id):
            warnings.warn(
                f"Each of {ranks} ranks reads all samples of this SliceDataset. To share them, give it num_replicas="
                f"{ranks} and rank, or use SliceDataModule.",
                stacklevel=2,
            )
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self._plan.epoch != (epoch := int(self._epoch)):
            self._plan.start_epoch(epoch)
        for batch in itertools.islice(self._plan, first, None, step):
            samples, report = self._reader.read(batch)
            for key, reason in report.corrupt:
                warnings.warn(f"Slice {key!r} is corrupt, others are repeated in its place: {reason}", stacklevel=2)
            yield _Batch(samples)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is iterated next.

        Raises:
            OptionError: If it is no number of an epoch.
        """
        self._plan.start_epoch(epoch)
        self._epoch.fill_(epoch)
