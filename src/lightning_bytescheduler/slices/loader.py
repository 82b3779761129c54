"""The loader of batches, and the processes that read for it: any number of passes over a plan.

The plan runs in the training process, and its batches go to reading processes through the DataLoader's local queues. So
the order is the plan's with any number of workers, and no other process needs to know of ranks. A batch contains all
that a process has to know, so the processes, which start slowly, live from one pass to the next.

Sending a tensor to another process costs a file, its mapping and a connection, several times the cost of reading a
small batch. So a few rows of numbers go through the queue as bytes, and become a tensor in the training process.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data import default_collate as torch_collate

from lightning_bytescheduler.exceptions import BadSampleError, OptionError, SliceCorruptError, UnsupportedError
from lightning_bytescheduler.slices.catalogue import sample_order
from lightning_bytescheduler.slices.epoch_plan import ReadReport, SampleRun, SliceBatch, samples_in
from lightning_bytescheduler.slices.formats import LeaveOut, SliceSamples
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.training import Plan

_AHEAD = 2  # batches that a DataLoader has each process read ahead
_SMALL_BYTES = 1024 * 1024
_TRIED = 100  # samples of each slice that are tried, to find one to repeat
_WHOLE = "Give the Trainer the data module: trainer.fit(model, datamodule=data)."


@dataclass(slots=True)
class _Reading:
    """A slice that is open.

    Attributes:
        place: Epoch and slice; ``None`` after a read that was interrupted, so that the position is unknown.
        order: Numbers of its samples, in the order in which they are read.
        stop: Position after the last sample read; earlier samples may have been overwritten.
    """

    samples: SliceSamples
    place: tuple[int, int] | None
    order: npt.NDArray[np.int64]
    stop: int = 0


@dataclass(eq=False)
class BatchReader:
    """Reads batches of a store. Can be pickled before its first batch.

    Neighbouring batches continue one another's slice. A reader that gets every second batch skips the others' samples,
    so several readers share the work on a slice.

    Attributes:
        shuffle_samples: Shuffle the samples of each slice, which is held in memory.
        fill: Repeat another sample in place of each one of a corrupt slice, for ranks that step together.
        skip: Leave out samples that cannot be made, and repeat others of the batch in their place.
        rank: Rank of this process, for messages.
        source_of: Number of the source of each slice of a mixture: a slice of each stays open.
    """

    store: SliceStore
    transform: Callable[[Any], Any] | None = None
    shuffle_samples: bool = False
    seed: int = 0
    fill: bool = True
    skip: bool = False
    rank: int = 0
    source_of: npt.NDArray[np.int64] | None = None
    _open: dict[int, _Reading] = field(default_factory=dict, init=False)  # by source
    _bad: set[int] = field(default_factory=set, init=False)
    _ahead: tuple[int, ...] = field(default=(), init=False)
    _spare: Any = field(default=None, init=False)

    def read(self, batch: SliceBatch) -> tuple[Sequence[Any], ReadReport]:
        """Read the samples of a batch: a list, or an array of rows.

        Raises:
            BadSampleError: If a sample cannot be made, unless such are skipped.
            SliceCorruptError: If no slice can be read to fill a batch with lost samples.
            SourceUnavailableError: If a source is unavailable.
        """
        self._prefetch(batch.ahead)
        parts: list[Sequence[Any]] = []
        corrupt: list[tuple[str, str]] = []
        skipped: dict[tuple[str, int], str] = {}
        wanted = samples_in(batch.runs)
        for run in batch.runs:
            left = self._read_into(parts, batch.epoch, run, skipped, corrupt)
            while self.fill and left.start < left.stop:
                other = self._in_place_of(left)
                unread = self._read_into(parts, batch.epoch, other, skipped, corrupt)
                left = left._replace(start=left.start + unread.start - other.start)
        samples = _joined(parts)
        lost = wanted - len(samples)
        if missing := lost if self.fill else len(skipped):
            spare = list(samples) or [self._any_sample()]
            samples = [*samples, *itertools.islice(itertools.cycle(spare), missing)]
        if len(samples):
            self._spare = (samples[-1],)
        self.store.counters.add(samples=wanted, skipped=len(skipped))
        left_out = tuple((*place, words) for place, words in skipped.items())
        return samples, ReadReport(self.store.counters.take(), tuple(corrupt), not len(samples), left_out)

    def begin_pass(self) -> None:
        """Close what is open and forget corrupt slices, for a new pass."""
        for source in list(self._open):
            self._close(source)
        self._bad, self._spare = set(), None

    def _read_into(
        self,
        parts: list[Sequence[Any]],
        epoch: int,
        run: SampleRun,
        skipped: dict[tuple[str, int], str],
        corrupt: list[tuple[str, str]],
    ) -> SampleRun:
        """Add the samples of a run to parts; returns the rest of it, which cannot be read."""
        if run.slice_index in self._bad:
            return run
        read, before = 0, len(skipped)
        try:
            for part in self._read(epoch, run, skipped):
                parts.append(part)
                read += len(part)
        except SliceCorruptError as error:
            self._bad.add(run.slice_index)
            self._close(self._source(run.slice_index))
            corrupt.append((error.key, error.reason))
            return run._replace(start=run.start + read + len(skipped) - before)
        return run._replace(start=run.stop)

    def _in_place_of(self, lost: SampleRun) -> SampleRun:
        """Return samples of the same source to repeat in place of lost ones.

        They are as far from the beginning of the slices that follow as the lost ones are in their own slice. So each
        is repeated about once, whichever process reads.

        Raises:
            SliceCorruptError: If no other slice of the source can be read.
        """
        slices, own = self.store.source.slices, lost.slice_index
        others = [
            index
            for index in (*range(own + 1, len(slices)), *range(own))
            if index not in self._bad and self._source(index) == self._source(own)
        ]
        if not others:
            lost_slice = slices[own]
            raise SliceCorruptError(lost_slice.key, lost_slice.url, "and so is every other slice of its source.")
        start = lost.start % sum(slices[index].samples for index in others)
        for index in others:
            size = slices[index].samples
            if start < size:
                break
            start -= size
        return SampleRun(index, start, min(start + lost.stop - lost.start, size))

    def _prefetch(self, ahead: tuple[int, ...]) -> None:
        if ahead != self._ahead:
            self._ahead = ahead
            self.store.prefetch([self.store.source.slices[index] for index in ahead[: self.store.depth]])

    def _read(self, epoch: int, run: SampleRun, skipped: dict[tuple[str, int], str]) -> Iterator[Sequence[Any]]:
        slice_, source = self.store.source.slices[run.slice_index], self._source(run.slice_index)
        place = (epoch, run.slice_index)
        reading = self._open.get(source)
        if reading is None or reading.place != place or run.start < reading.stop:
            self._close(source)
            order = np.arange(slice_.samples)
            if self.shuffle_samples:
                order = sample_order(slice_.samples, seed=self.seed, epoch=epoch, slice_index=run.slice_index)
            reading = self._open[source] = _Reading(self.store.open(slice_, whole=self.shuffle_samples), place, order)
        reading.place = None  # set again below
        left_out = set[int]()

        def leave_out(number: int, error: Exception) -> None:
            worker = get_worker_info()
            place = f"rank {self.rank}" + ("" if worker is None else f", DataLoader worker {worker.id}")
            words = f"{type(error).__name__}: {error}"
            text = f"Sample {number} of slice {slice_.key!r} at {slice_.url} cannot be made ({place}): {words}"
            if not self.skip:
                raise BadSampleError(f"{text}. SliceDataModule(on_bad_sample='skip') leaves them out.") from error
            skipped[slice_.key, number] = text
            left_out.add(number)

        numbers, samples = reading.order[run.start : run.stop], reading.samples
        if self.shuffle_samples:
            parts = samples.pick(numbers, leave_out)
        else:
            parts = samples.take(run.start, run.stop, leave_out)
        if self.transform is None:
            yield from parts
        else:
            # A sample that cannot be decoded is in ``left_out`` before the samples after it come.
            each = (number for number in numbers.tolist() if number not in left_out)
            for part in parts:
                yield list(self._transformed(part, each, leave_out))
        reading.place, reading.stop = place, run.stop
        if run.stop == slice_.samples:
            self._close(source)

    def _transformed(self, part: Sequence[Any], numbers: Iterator[int], leave_out: LeaveOut) -> Iterator[Any]:
        transform: Callable[[Any], Any] = self.transform  # type: ignore[assignment]  # there is one where it is called
        for sample in part:
            number = next(numbers)
            try:
                made = transform(sample)
            except Exception as error:
                leave_out(number, error)
            else:
                yield made

    def _source(self, index: int) -> int:
        return 0 if self.source_of is None else int(self.source_of[index])

    def _close(self, source: int) -> None:
        if (reading := self._open.pop(source, None)) is not None:
            reading.samples.close()

    def _any_sample(self) -> Any:
        """Return a sample to repeat: the last one read, or the first that can be made."""
        if self._spare is not None:
            return self._spare[0]
        slices, skipped = self.store.source.slices, dict[tuple[str, int], str]()
        for index, slice_ in enumerate(slices):
            if index not in self._bad:
                with suppress(SliceCorruptError):
                    run = SampleRun(index, 0, min(_TRIED, slice_.samples))
                    for sample in itertools.chain.from_iterable(self._read(0, run, skipped)):
                        return sample
        if skipped:
            words = next(iter(skipped.values()))
            raise BadSampleError(f"No sample can be made of the first {_TRIED} of each slice. {words}")
        raise SliceCorruptError(slices[0].key, slices[0].url, "and so is every other slice.")


def _joined(parts: list[Sequence[Any]]) -> Sequence[Any]:
    first = parts[0] if parts else ()
    if isinstance(first, np.ndarray):
        alike = all(
            isinstance(part, np.ndarray) and (part.dtype, part.shape[1:]) == (first.dtype, first.shape[1:])
            for part in parts
        )
        if alike:
            return first if len(parts) == 1 else np.concatenate(parts)
    return list(itertools.chain.from_iterable(parts))


def collate_samples(samples: Sequence[Any]) -> Any:
    """Make a batch of samples: rows of arrays become one tensor, all else is collated as in PyTorch.

    Raises:
        OptionError: If they do not fit together.
    """
    if _are_numbers(samples):
        return _tensor_of(samples)
    samples = list(samples)
    try:
        if isinstance(samples[0], np.ndarray):
            return torch.from_numpy(np.stack(samples))  # a copy, as rows share the memory of a chunk
        return torch_collate(samples)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        allowed = (
            "a function that makes a batch of these samples, which do not fit together by themselves (of the types "
            f"{', '.join(sorted({type(sample).__name__ for sample in samples}))}: {error}); or let transform make "
            "tensors of one shape of them"
        )
        raise OptionError("collate", None, allowed) from error


def _are_numbers(samples: Sequence[Any]) -> TypeGuard[np.ndarray[Any, Any]]:
    return isinstance(samples, np.ndarray) and samples.dtype.kind in "biufc"


def _tensor_of(rows: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with memory of its own: rows share that of a chunk."""
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

    def __len__(self) -> int:
        if (length := self.plan.batches) is None:
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
        if not self._asked.is_done:  # of a pass that this one ends
            self.close()
        self._asked.plan, self._asked.number = self.plan, self._asked.number + 1
        own = self._asked.number
        try:
            iterator = self._begun()
            while (read := next(iterator, None)) is not None:
                self._asked.left -= 1
                batch, report = read[0], ReadReport(*read[1])
                if isinstance(batch, _Rows):
                    batch = _tensor_of(np.frombuffer(batch.content, batch.dtype).reshape(batch.shape))
                self._on_report(report, time.perf_counter() - started)
                if batch is not None:
                    yield batch
                elif not report.is_empty:  # skipped silently, it would count as trained on
                    raise OptionError("collate", None, "a function that returns a batch; the one given returned None")
                if self._asked.number != own:
                    raise UnsupportedError("Another pass over this loader of slices has begun, which ends this one.")
                started = time.perf_counter()
        finally:
            if self._asked.number == own and not self._asked.is_done:
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
            sends_rows = self._num_workers > 0 and not self._pin_memory and self._collate is collate_samples
            loader = self._loader = DataLoader(
                _Batches(self.reader, self._collate, sends_rows),
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
        return iter(loader)


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


class _Rows(NamedTuple):
    """A batch of numbers, sent as bytes: a queue's thread pickles these without the interpreter."""

    content: bytes
    dtype: str
    shape: tuple[int, ...]


class _Batches(Dataset[Any]):
    def __init__(self, reader: BatchReader, collate: Callable[[list[Any]], Any], sends_rows: bool) -> None:
        self._reader = reader
        self._collate = collate
        self._sends_rows = sends_rows
        self._number = 0

    def __getitem__(self, asked: tuple[int, SliceBatch]) -> tuple[Any, ReadReport]:
        number, wanted = asked
        if not self._number and get_worker_info() is not None:
            self._reader.store = copy.copy(self._reader.store)  # a fork has no part in its parent's threads and locks
        if number != self._number:
            self._reader.begin_pass()
            self._number = number
        samples, report = self._reader.read(wanted)
        if not len(samples):
            return None, report
        if self._sends_rows and _are_numbers(samples) and samples.nbytes <= _SMALL_BYTES:
            return _Rows(samples.tobytes(), samples.dtype.str, samples.shape), report
        # A user's function gets a list, as documented; the default one is faster with an array.
        return self._collate(samples if self._collate is collate_samples else list(samples)), report  # type: ignore[arg-type]


def _as_it_is(batch: Any) -> Any:
    return batch
