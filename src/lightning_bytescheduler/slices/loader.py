"""The loader of batches, and the processes that read for it: a pass over a plan, any number of times.

The plan is asked in the process that trains, and its batches go to the processes that read over the DataLoader's own
local queues; so nobody else needs to know of ranks, and the order is the plan's with any number of workers. All that a
process has to know is in the batch that it is asked for, so that the processes, whose start takes long, are kept from
one pass to the next. After a plan's last batch each is asked to rest.

A tensor that is sent to another process costs a file, its mapping and a connection, which for a small batch is several
times what reading it costs. Here its bytes are copied into a slot that both processes have mapped since the fork.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data import default_collate as torch_collate

from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.slices.batches import BatchReader, ReadReport, SliceBatch

_SLOT_BYTES = 4 * 1024 * 1024  # of address space; memory is taken as far as batches reach
_ALIGNMENT = 64
_END: Any = object()
_WHOLE = "Give the Trainer the data module: trainer.fit(model, datamodule=data)."


def collate_samples(samples: Sequence[Any]) -> Any:
    """Make a batch of samples: rows of arrays become one tensor, all else as PyTorch does it.

    Args:
        samples: A list, or an array whose rows they are.

    Raises:
        OptionError: If they do not fit together.
    """
    if isinstance(samples, np.ndarray):
        if samples.dtype.kind in "biufc":
            return _tensor_of(samples)
        samples = list(samples)
    try:
        if isinstance(samples[0], np.ndarray):
            return torch.from_numpy(np.stack(samples))  # a copy: rows may be of a file that is mapped read-only
        return torch_collate(list(samples))
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        allowed = (
            "a function that makes a batch of these samples, which do not fit together by themselves (of the types "
            f"{', '.join(sorted({type(sample).__name__ for sample in samples}))}: {error}); or let transform make "
            "tensors of one shape of them"
        )
        raise OptionError("collate", None, allowed) from error


def _tensor_of(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor that may be written to: rows may be of a file that is mapped."""
    rows = rows.astype(rows.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(rows.copy() if rows.base is not None else rows)


class SliceLoader:
    """Batches of a plan, any number of times.

    It is not a ``DataLoader``, so that Lightning does not look for a sampler to replace.

    Args:
        plan: Which batches.
        workers: Read them; may be those of a loader before this one.
        length: Of the loader; None if nobody knows how many batches there will be.
        on_report: Called with what the reader has to tell, when a batch is handed out.
        is_alone: Whether its data module has no Trainer, so that nobody tells which rank this is, and what was trained
            on.

    Attributes:
        plan: As given.
        waited: Seconds that whoever iterates has waited for batches, with all that it took to make them.
    """

    def __init__(
        self,
        plan: Iterable[SliceBatch],
        workers: BatchWorkers,
        *,
        length: int | None,
        on_report: Callable[[ReadReport], None] | None = None,
        is_alone: bool = False,
    ) -> None:
        self.plan = plan
        self._is_alone = is_alone
        self.worker_init_fn: Callable[[int], None] | None = None  # Lightning sets it, for seeds
        self._workers = workers
        self._on_report = on_report
        self.waited = 0.0
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("How many batches there will be is not known: they are handed out as they are needed.")
        return self._length

    @property
    def draws_ahead(self) -> int:
        """Batches that may be asked for of the plan before the first of them is trained on, 1 at least."""
        return self._workers.draws_ahead

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the plan's. That there is a state tells Lightning that a loader can be resumed."""
        if self._is_alone:
            warnings.warn(
                "The Trainer was given a loader of slices without its data module, so this checkpoint has no position "
                f"in them, and each epoch takes them in the same order. {_WHOLE}",
                stacklevel=2,
            )
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do, see ``state_dict``."""

    def __iter__(self) -> Iterator[Any]:
        if self._is_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UnsupportedError(
                f"Each rank would train on all slices, as the loader does not know its rank. {_WHOLE}"
            )
        # A generator, so that nothing starts before the first batch is wanted: Lightning makes more iterators than
        # it uses.
        batches = self._workers.batches(self.plan, self.worker_init_fn)
        while True:
            started = time.perf_counter()
            read = next(batches, None)
            self.waited += time.perf_counter() - started
            if read is None:
                return
            batch, report = read
            if self._on_report is not None:
                self._on_report(report)
            if batch is not None:
                yield batch
            elif not report.is_empty:  # left out in silence, it would count as trained on
                raise OptionError("collate", None, "a function that returns a batch; the one given returned None")


class BatchWorkers:
    """Reads the batches of one plan after the other.

    Processes are kept if all batches of a plan were taken. Those of a pass that is given up are ended, as they may be
    in the middle of a long fetch. A pass that begins while another one is under way gets processes of its own. As with
    ``persistent_workers`` of a ``DataLoader``, random numbers in a process go on from pass to pass.

    Args:
        reader: Reads the batches.
        collate: Makes a batch of samples.
        num_workers: Processes that read; 0 reads in the process that trains.
        prefetch_factor: Batches that each worker reads ahead.
        pin_memory: Copy batches to pinned memory.

    Attributes:
        reader: As given.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        collate: Callable[[list[Any]], Any] = collate_samples,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.reader = reader
        self._collate = collate
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory
        self._kept: _Loading | None = None
        self._closings = 0

    @property
    def draws_ahead(self) -> int:
        """Batches that are asked for before the first is there."""
        return max(self._num_workers * self._prefetch_factor, 1)

    def batches(
        self, plan: Iterable[SliceBatch], worker_init_fn: Callable[[int], None] | None = None
    ) -> Iterator[tuple[Any, ReadReport]]:
        """Read the batches of a plan, in its order.

        Args:
            plan: Which batches.
            worker_init_fn: Called in each process that is started, with its number; processes that were started with
                another one are not used.

        Yields:
            Each batch, None if it has no samples, and what the reader has to tell.

        Raises:
            RuntimeError: If a process dies.
            Exception: What a process raises that reads, as a ``DataLoader`` does.
        """
        loading, closings = self._take(worker_init_fn), self._closings
        try:
            yield from loading.batches(plan)
        finally:
            if loading.is_idle and self._kept is None and self._closings == closings:
                self._kept = loading
            else:
                loading.stop()

    def close(self) -> None:
        """End the processes that are kept, waiting about 5 s for each; those of a pass under way end with it."""
        self._closings += 1
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}

    def _take(self, worker_init_fn: Callable[[int], None] | None) -> _Loading:
        kept, self._kept = self._kept, None
        if kept is not None:
            if kept.is_idle and _is_same(kept.worker_init_fn, worker_init_fn):
                return kept
            kept.stop()
        return _Loading(
            self.reader, self._collate, self._num_workers, self._prefetch_factor, self._pin_memory, worker_init_fn
        )


def _is_same(one: Callable[[int], None] | None, other: Callable[[int], None] | None) -> bool:
    """Whether two functions are one, or differ only in being made twice, as Lightning's is for each loader."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    return one is other


class _Loading:
    """A ``DataLoader``, for one pass at a time.

    Attributes:
        worker_init_fn: As given.
    """

    def __init__(
        self,
        reader: BatchReader,
        collate: Callable[[list[Any]], Any],
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        worker_init_fn: Callable[[int], None] | None,
    ) -> None:
        self.worker_init_fn = worker_init_fn
        self._process = os.getpid()
        self._asked = _Asked(num_workers)
        self._taken = 0
        self._may_be_kept = num_workers > 0
        self._slots: BatchSlots | None = None
        workers: dict[str, Any] = {}
        if num_workers:
            workers = {"prefetch_factor": prefetch_factor, "persistent_workers": True}
            if not pin_memory:  # which is done by a thread of the DataLoader, to tensors
                self._slots = BatchSlots(num_workers, prefetch_factor)
        self._loader: DataLoader[Any] = DataLoader(
            _Batches(reader),
            batch_size=None,
            sampler=self._asked,
            collate_fn=_Collate(collate, self._slots),  # type: ignore[arg-type]  # of what is no list
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            **workers,
        )
        self._iterator: Any = None

    @property
    def is_idle(self) -> bool:
        """Whether there are processes, none of them has a batch to read, and none has failed."""
        return self._may_be_kept and self._asked.is_over and self._taken == self._asked.batches

    def batches(self, plan: Iterable[SliceBatch]) -> Iterator[tuple[Any, ReadReport]]:
        """See ``BatchWorkers.batches``."""
        if self._iterator is not None:
            torch.empty((), dtype=torch.int64).random_()  # as a DataLoader's first iteration draws a seed
        self._asked.plan, self._taken = plan, 0
        keeps, self._may_be_kept = self._may_be_kept, False  # unless nothing is raised
        self._iterator = iterator = self._begun()
        while (read := next(iterator, _END)) is not _END:
            if read is not None:  # or a process rests
                self._taken += 1
                self._may_be_kept = keeps
                yield (read[0] if self._slots is None else self._slots.unpack(read[0])), ReadReport(*read[1])
                self._may_be_kept = False
        self._may_be_kept = keeps

    def _begun(self) -> Iterator[Any]:
        try:
            return iter(self._loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if "pickle" not in str(error):
                raise
            allowed = (
                "0, or transform, collate and reader functions of a module: processes are started anew on this system, "
                f"and a lambda or a function within another one cannot be sent to them ({error})"
            )
            raise OptionError("num_workers", self._loader.num_workers, allowed) from error

    def stop(self) -> None:
        """End the processes."""
        self._may_be_kept = False
        iterator, self._iterator = self._iterator, None
        end = getattr(iterator, "_shutdown_workers", None)
        if end is not None and self._process == os.getpid():
            end()  # not left to when nobody refers to the iterator any more: a traceback may


class _Rest(NamedTuple):
    """Asks a process to let go of what it holds, as a plan is over."""

    ahead: tuple[int, ...]


class _Asked:
    """What the processes are asked for, in turns: the batches of a plan, and then each of them to rest.

    Attributes:
        plan: The plan.
        batches: How many of it were asked for.
        is_over: Whether these are all.
    """

    def __init__(self, workers: int) -> None:
        self.plan: Iterable[SliceBatch] = ()
        self.batches = 0
        self.is_over = False
        self._workers = workers

    def __iter__(self) -> Iterator[SliceBatch | _Rest]:
        self.batches, self.is_over = 0, False
        ahead: tuple[int, ...] = ()
        for batch in self.plan:
            self.batches += 1
            ahead = batch.ahead
            yield batch
        self.is_over = True
        yield from itertools.repeat(_Rest(ahead), self._workers)


class _Batches(Dataset[Any]):
    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __getitem__(self, asked: SliceBatch | _Rest) -> tuple[Sequence[Any], ReadReport] | None:
        if isinstance(asked, _Rest):
            self._reader.rest(asked.ahead)
            return None
        return self._reader.read(asked)


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any], slots: BatchSlots | None) -> None:
        self._collate = collate
        self._slots = slots

    def __call__(self, read: tuple[Sequence[Any], ReadReport] | None) -> tuple[Any, ReadReport] | None:
        if read is None:
            return None
        samples, report = read
        if not len(samples):
            return None, report
        # A user's function gets a list, as documented; the default one can do more with an array.
        batch = self._collate(samples if self._collate is collate_samples else list(samples))  # type: ignore[arg-type]
        return batch if self._slots is None else self._slots.pack(batch), report


class _Placed(NamedTuple):
    """A tensor in a slot."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class BatchSlots:
    """Memory for the batches that are under way. It is inherited by processes that are forked, and by no others.

    A DataLoader asks a worker for its batch number ``n + prefetch_factor`` when it has handed out number ``n``, which
    is unpacked before the next one is asked for: with two more slots none is written to that is still to be read.

    Args:
        workers: Processes that read.
        prefetch_factor: Batches that each of them reads ahead.
    """

    def __init__(self, workers: int, prefetch_factor: int) -> None:
        self._each = prefetch_factor + 2
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(OSError):  # without it tensors are sent as PyTorch sends them
            self._memory = mmap.mmap(-1, workers * self._each * _SLOT_BYTES)
        self._next = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_each": self._each, "_memory": None, "_next": 0}

    def pack(self, batch: Any) -> Any:
        """In a process that reads: put the tensors of a batch into the next slot, as far as it has room."""
        worker = get_worker_info()
        if self._memory is None or worker is None:
            return batch
        begin = (worker.id * self._each + self._next) * _SLOT_BYTES
        self._next = (self._next + 1) % self._each
        return _Packing(self._memory, begin, begin + _SLOT_BYTES).packed(batch)

    def unpack(self, packed: Any) -> Any:
        """In the process that trains: the batch, in memory of its own."""
        if type(packed) is _Placed:
            return self._tensor(packed).clone()
        if type(packed) in (list, tuple):
            return type(packed)(self.unpack(part) for part in packed) if _holds_tensors(packed) else packed
        if type(packed) is dict:
            return {key: self.unpack(part) for key, part in packed.items()}
        return packed

    def _tensor(self, placed: _Placed) -> torch.Tensor:
        count = 1
        for length in placed.shape:
            count *= length
        if not count or self._memory is None:
            return torch.empty(placed.shape, dtype=placed.dtype)
        whole = torch.frombuffer(self._memory, dtype=placed.dtype, count=count, offset=placed.start)
        return whole.reshape(placed.shape)


class _Packing:
    def __init__(self, memory: mmap.mmap, start: int, stop: int) -> None:
        self._memory, self._start, self._stop = memory, start, stop

    def packed(self, batch: Any) -> Any:
        if type(batch) is torch.Tensor:
            return self._placed(batch)
        if type(batch) in (list, tuple):
            return type(batch)(self.packed(part) for part in batch) if _holds_tensors(batch) else batch
        if type(batch) is dict:
            return {key: self.packed(part) for key, part in batch.items()}
        return batch

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor | _Placed:
        size = tensor.numel() * tensor.element_size()
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
        if (
            not is_plain
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or self._start + size > self._stop
        ):
            return tensor
        if size:
            slot = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._start)
            slot.view(tensor.shape).copy_(tensor)
        placed = _Placed(self._start, tensor.dtype, tuple(tensor.shape))
        self._start += -(-size // _ALIGNMENT) * _ALIGNMENT
        return placed


def _holds_tensors(parts: Any) -> bool:
    """Whether a list may hold tensors: one of texts or numbers is not looked through."""
    return not parts or not isinstance(parts[0], (str, bytes, int, float))
