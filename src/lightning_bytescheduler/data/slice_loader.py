"""A loader of batches of slices: a ``torch.utils.data.DataLoader`` for each pass over a plan.

The plan is asked in the process that trains, and its batches go to the processes that read over the DataLoader's own
local queues; so nobody else needs to know of ranks, and the order is the plan's with any number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data import default_collate as torch_collate

from lightning_bytescheduler.data.batch_plan import BatchPlan
from lightning_bytescheduler.data.batch_reader import BatchReader, ReadNote, SliceBatch

__all__ = ["SliceLoader", "collate_samples"]


def collate_samples(samples: Sequence[Any]) -> Any:
    """Make a batch of samples: rows of arrays become one tensor, all else as PyTorch does it.

    Args:
        samples: A list, or an array whose rows they are.
    """
    if isinstance(samples, np.ndarray):
        if samples.dtype.kind in "biufc":
            return _tensor_of(samples)
        samples = list(samples)
    if isinstance(samples[0], np.ndarray):
        return torch.from_numpy(np.stack(samples))  # a copy: rows may be of a file that is mapped read-only
    return torch_collate(list(samples))


def _tensor_of(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor of its own, as rows may be of a file that is mapped; in a worker in shared memory, copied only once."""
    rows = rows.astype(rows.dtype.newbyteorder("="), copy=False)
    if get_worker_info() is None or rows.dtype.name in ("uint16", "uint32", "uint64") or not rows.flags.writeable:
        return torch.from_numpy(rows.copy() if rows.base is not None else rows)
    together: torch.Tensor = torch_collate([torch.from_numpy(rows)])  # which knows how to allocate there
    return together[0]


class SliceLoader:
    """Batches of a plan, any number of times.

    It is not a ``DataLoader``, so that Lightning does not look for a sampler to replace.

    Args:
        plan: Which batches.
        reader: Reads them.
        length: Of the loader; None if nobody knows how many batches there will be.
        collate: Makes a batch of samples.
        num_workers: Processes that read; 0 reads in the process that trains.
        prefetch_factor: Batches that each worker reads ahead.
        pin_memory: Copy batches to pinned memory.
        on_note: Called with what the reader has to tell, when a batch is handed out.

    Attributes:
        plan: As given.
        waited: Seconds that whoever iterates has waited for batches, with all that it took to make them.
    """

    def __init__(
        self,
        plan: BatchPlan,
        reader: BatchReader,
        *,
        length: int | None,
        collate: Callable[[list[Any]], Any] = collate_samples,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        on_note: Callable[[ReadNote], None] | None = None,
    ) -> None:
        self.plan = plan
        self.worker_init_fn: Callable[[int], None] | None = None  # Lightning sets it, for seeds
        self._dataset = _Batches(reader)
        self._collate = _Collate(collate)
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory
        self._on_note = on_note
        self.waited = 0.0
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("How many batches there will be is not known: they are handed out as they are needed.")
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the plan's. That there is a state tells Lightning that a loader can be resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do, see ``state_dict``."""

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that nothing starts before the first batch is wanted: Lightning makes more iterators than
        # it uses.
        workers: dict[str, Any] = {"prefetch_factor": self._prefetch_factor} if self._num_workers else {}
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self.plan,
            collate_fn=self._collate,  # type: ignore[arg-type]  # of what the dataset returns, which is no list
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            worker_init_fn=self.worker_init_fn,
            **workers,
        )
        batches = iter(loader)
        while True:
            started = time.perf_counter()
            read = next(batches, None)
            self.waited += time.perf_counter() - started
            if read is None:
                return
            batch, note = read
            if self._on_note is not None:
                self._on_note(ReadNote(*note))
            if batch is not None:
                yield batch


class _Batches(Dataset[Any]):
    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __getitem__(self, batch: SliceBatch) -> tuple[Sequence[Any], ReadNote]:
        return self._reader.read(batch)


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, read: tuple[Sequence[Any], ReadNote]) -> tuple[Any, ReadNote]:
        samples, note = read
        if not len(samples):
            return None, note
        if self._collate is collate_samples:
            return collate_samples(samples), note
        return self._collate(list(samples)), note  # a user's function gets a list, as documented
