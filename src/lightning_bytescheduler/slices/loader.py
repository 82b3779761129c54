"""The loader of batches, and the processes that read for it: any number of passes over a plan.

The plan runs in the training process, and its batches go to reading processes through the DataLoader's local queues. So
the order is the plan's with any number of workers, and no other process needs to know of ranks. A batch contains all
that a process has to know, so the processes, which start slowly, live from one pass to the next.

Sending a tensor to another process costs a file, its mapping and a connection, several times the cost of reading a
small batch. So small tensors go through the queue with the rest of their batch.
"""

from __future__ import annotations

import io
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as torch_collate

from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.slices.batches import BatchReader, ReadReport, SliceBatch
from lightning_bytescheduler.slices.training import Plan

_SMALL_BYTES = 1024 * 1024
_AHEAD = 2  # batches that a DataLoader has each process read ahead
_WHOLE = "Give the Trainer the data module: trainer.fit(model, datamodule=data)."


def collate_samples(samples: Sequence[Any]) -> Any:
    """Make a batch of samples: rows of arrays become one tensor, all else is collated as in PyTorch.

    Raises:
        OptionError: If they do not fit together.
    """
    if isinstance(samples, np.ndarray):
        if samples.dtype.kind in "biufc":
            return _tensor_of(samples)
        samples = list(samples)
    try:
        if isinstance(samples[0], np.ndarray):
            return torch.from_numpy(np.stack(samples))  # a copy, as rows may be in a file that is mapped read-only
        return torch_collate(list(samples))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        allowed = (
            "a function that makes a batch of these samples, which do not fit together by themselves (of the types "
            f"{', '.join(sorted({type(sample).__name__ for sample in samples}))}: {error}); or let transform make "
            "tensors of one shape of them"
        )
        raise OptionError("collate", None, allowed) from error


def _tensor_of(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a writable tensor: rows may be in a mapped file."""
    rows = rows.astype(rows.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(rows.copy() if rows.base is not None else rows)


class SliceLoader:
    """Batches of a plan, any number of passes; a new pass ends the one before.

    It is not a ``DataLoader``, so that Lightning does not look for a sampler to replace. Processes are kept if a pass
    took all of its batches, and ended if it was given up, as they may be in the middle of a long fetch. As with
    ``persistent_workers`` of a ``DataLoader``, random numbers in a process go on from pass to pass.

    Args:
        num_workers: Processes that read; 0 reads in the training process.
        on_report: Called with the reader's report and the seconds waited for a batch, when it is handed out.
        is_alone: Whether its data module has no Trainer, which would know the rank and what was trained on.

    Attributes:
        plan: As given; a new value counts from the next pass on.
        worker_init_fn: Called in each started process with its number. Lightning sets it, for seeds.
    """

    def __init__(
        self,
        plan: Plan,
        reader: BatchReader,
        *,
        collate: Callable[[list[Any]], Any] = collate_samples,
        num_workers: int = 0,
        pin_memory: bool = False,
        on_report: Callable[[ReadReport, float], None],
        is_alone: bool = False,
    ) -> None:
        self.plan = plan
        self.reader = reader
        self.worker_init_fn: Callable[[int], None] | None = None
        self._collate = collate
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._on_report = on_report
        self._is_alone = is_alone
        self._asked = _Asked()
        self._loader: DataLoader[Any] | None = None
        self._is_reading = False

    def __len__(self) -> int:
        length = self.plan.batches
        if length is None:
            raise TypeError("How many batches there will be is not known: they are handed out as they are needed.")
        return length

    @property
    def draws_ahead(self) -> int:
        """Batches of the plan that may be drawn before the first of them is trained on, at least 1."""
        return max(self._num_workers * _AHEAD, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the plan has the position. Lightning treats loaders with a state as resumable."""
        if self._is_alone:
            warnings.warn(
                "The Trainer was given a loader of slices without its data module, so this checkpoint has no position "
                f"in them, and each epoch takes them in the same order. {_WHOLE}",
                stacklevel=2,
            )
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, see ``state_dict``."""

    def __iter__(self) -> Iterator[Any]:
        if self._is_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UnsupportedError(
                f"Each rank would train on all slices, as the loader does not know its rank. {_WHOLE}"
            )
        # A generator, so that nothing starts before the first batch is requested: Lightning makes more iterators than
        # it uses.
        started = time.perf_counter()
        if self._is_reading and not self._asked.is_done:
            self.close()
        self._asked.plan, self._asked.number = self.plan, self._asked.number + 1
        own, self._is_reading = self._asked.number, True
        try:
            iterator = self._begun()
            while (read := next(iterator, None)) is not None:
                self._asked.left -= 1
                batch, report = pickle.loads(read[0]) if isinstance(read[0], _Packed) else read[0], ReadReport(*read[1])
                self._on_report(report, time.perf_counter() - started)
                if batch is not None:
                    yield batch
                elif not report.is_empty:  # skipped silently, it would count as trained on
                    raise OptionError("collate", None, "a function that returns a batch; the one given returned None")
                if self._asked.number != own:
                    raise UnsupportedError("Another pass over this loader of slices has begun, which ends this one.")
                started = time.perf_counter()
        finally:
            if self._asked.number == own:
                self._is_reading = False
                if not self._asked.is_done:
                    self.close()

    def close(self) -> None:
        """End the processes, waiting about 5 s for each."""
        loader, self._loader = self._loader, None
        end = getattr(getattr(loader, "_iterator", None), "_shutdown_workers", None)
        if end is not None and self._process == os.getpid():
            end()  # not left to garbage collection, as a traceback may hold the iterator

    def _begun(self) -> Iterator[Any]:
        loader = self._loader
        if loader is None:
            self._process = os.getpid()
            # A thread of the DataLoader pins batches, and has to see their tensors.
            packs = self._num_workers > 0 and not self._pin_memory
            loader = self._loader = DataLoader(
                _Batches(self.reader, self._collate, packs),
                batch_size=None,
                sampler=self._asked,
                collate_fn=_as_it_is,
                num_workers=self._num_workers,
                pin_memory=self._pin_memory,
                worker_init_fn=self.worker_init_fn,
                persistent_workers=self._num_workers > 0,
            )
        elif self._num_workers:
            torch.empty((), dtype=torch.int64).random_()  # as a DataLoader's first iteration draws a seed
        try:
            return iter(loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if "pickle" not in str(error):
                raise
            allowed = (
                "0, or transform, collate and reader functions of a module: processes are started anew on this system, "
                f"and a lambda or a function within another one cannot be sent to them ({error})"
            )
            raise OptionError("num_workers", self._num_workers, allowed) from error


class _Asked:
    """The requests for reading processes: the batches of a plan, each with the number of the pass."""

    plan: Plan
    number = left = 0
    _is_over = False

    @property
    def is_done(self) -> bool:  # a Trainer stops at a loader's length, without seeing its end
        return self._is_over and not self.left

    def __iter__(self) -> Iterator[tuple[int, SliceBatch]]:
        self.left, self._is_over = 0, False
        for batch in self.plan:
            self.left += 1
            yield self.number, batch
        self._is_over = True


class _Batches(Dataset[Any]):
    def __init__(self, reader: BatchReader, collate: Callable[[list[Any]], Any], packs: bool) -> None:
        self._reader = reader
        self._collate = collate
        self._packs = packs
        self._number = 0

    def __getitem__(self, asked: tuple[int, SliceBatch]) -> tuple[Any, ReadReport]:
        number, wanted = asked
        if number != self._number:
            self._reader.begin_pass()
            self._number = number
        samples, report = self._reader.read(wanted)
        if not len(samples):
            return None, report
        # A user's function gets a list, as documented; the default one is faster with an array.
        batch = self._collate(samples if self._collate is collate_samples else list(samples))  # type: ignore[arg-type]
        if not self._packs or batch is None:
            return batch, report
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(batch)
        return _Packed(file.getbuffer()), report


def _as_it_is(batch: Any) -> Any:
    return batch


class _Packed(bytes):
    """A batch, pickled."""


class _Pickler(ForkingPickler):
    """Pickles small tensors by value, and others as PyTorch does, in a mapped file."""

    def reducer_override(self, value: Any) -> Any:
        try:
            if type(value) is torch.Tensor and value.nbytes <= _SMALL_BYTES:
                return torch.from_numpy, (value.numpy(),)
        except (RuntimeError, TypeError):  # no NumPy type, sparse, or part of a graph
            pass
        return NotImplemented
