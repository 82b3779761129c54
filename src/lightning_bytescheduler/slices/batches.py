"""Batches: their contents, how they are cut from runs of samples, and the reader that makes them.

Any process can read a batch. A batch also names the slices that come next, so that they are fetched in time.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from lightning_bytescheduler.exceptions import BadSampleError, SliceCorruptError
from lightning_bytescheduler.slices.catalogue import sample_order
from lightning_bytescheduler.slices.formats import LeaveOut, SliceSamples
from lightning_bytescheduler.slices.store import SliceStore

SLICES_AHEAD = 8
"""Number of following slices that a batch names; no more are prefetched."""


class SampleRun(NamedTuple):
    """Neighbouring samples of one slice."""

    slice_index: int
    start: int
    stop: int


class SliceBatch(NamedTuple):
    """The contents of a batch; small, as it is sent to the process that reads it."""

    epoch: int
    runs: tuple[SampleRun, ...]
    ahead: tuple[int, ...] = ()


class ReadReport(NamedTuple):
    """What a reader reports with each batch; only primitives, as it is sent between processes.

    Attributes:
        cost: Cost of reading since the last report, by the names of ``SliceStatistics``; zeros are left out.
        is_empty: Whether no sample could be read, so that there is no batch.
        skipped: Samples that were left out: the key of the slice, and what is wrong in words.
    """

    cost: dict[str, float]
    corrupt: tuple[tuple[str, str], ...] = ()
    lost: int = 0
    is_empty: bool = False
    skipped: tuple[tuple[str, str], ...] = ()


def samples_in(runs: Iterable[SampleRun]) -> int:
    """Return the number of samples in runs."""
    return sum(run.stop - run.start for run in runs)


def cut_runs(runs: deque[SampleRun], samples: int) -> tuple[SampleRun, ...]:
    """Take ``samples`` samples from the beginning of runs, which must have as many."""
    found = []
    while samples:
        run = runs.popleft()
        middle = min(run.stop, run.start + samples)
        if middle < run.stop:
            runs.appendleft(run._replace(start=middle))
        found.append(run._replace(stop=middle))
        samples -= middle - run.start
    return tuple(found)


@dataclass(slots=True)
class _Reading:
    """A slice that is open.

    Attributes:
        place: Epoch and slice; ``None`` after a read that was interrupted, so that the position is unknown.
        order: Of its samples, if they are shuffled.
        stop: One after the last sample read; earlier ones may have been overwritten.
    """

    samples: SliceSamples
    place: tuple[int, int] | None
    order: npt.NDArray[np.int64]
    stop: int = 0


_TRIED = 100  # samples of a slice, for one to repeat


class BatchReader:
    """Reads batches of a store. Can be pickled before its first batch.

    Neighbouring batches continue one another's slice. A reader that gets every second batch skips the others' samples,
    so several readers share the work on a slice.

    Args:
        shuffle_samples: Shuffle the samples of each slice, which maps or holds a whole slice.
        fill: Replace each sample of a corrupt slice by a repeated one, for ranks that step together.
        skip: Leave out samples that cannot be made, and repeat others of the batch in their place.
        rank: Of this process, for messages.
        source_of: Number of the source of each slice of a mixture: a slice of each stays open.
    """

    def __init__(
        self,
        store: SliceStore,
        *,
        transform: Callable[[Any], Any] | None = None,
        shuffle_samples: bool = False,
        seed: int = 0,
        fill: bool = True,
        skip: bool = False,
        rank: int = 0,
        source_of: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.store = store
        self._transform = transform
        self._shuffle_samples = shuffle_samples
        self._seed = seed
        self._fill = fill
        self._skip = skip
        self._rank = rank
        self._source_of = source_of
        self._open: dict[int, _Reading] = {}  # by source
        self._bad: set[int] = set()
        self._ahead: tuple[int, ...] = ()
        self._spare: Any = None
        self._told, self._process = store.counters.sums(), os.getpid()

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
            if run.slice_index in self._bad:
                continue
            try:
                parts.extend(self._read(batch.epoch, run, skipped))
            except SliceCorruptError as error:
                self._bad.add(run.slice_index)
                self._close(self._source(run))
                corrupt.append((error.key, error.reason))
        samples = _joined(parts)
        lost = wanted - len(samples)
        if missing := lost if self._fill else len(skipped):
            spare = list(samples) or [self._any_sample()]
            samples = [*samples, *itertools.islice(itertools.cycle(spare), missing)]
        if len(samples):
            self._spare = (samples[-1],)
        self.store.counters.add(samples=wanted, skipped=len(skipped))
        left_out = tuple((key, words) for (key, _), words in skipped.items())
        return samples, ReadReport(self._cost(), tuple(corrupt), lost, not len(samples), left_out)

    def begin_pass(self) -> None:
        """Close what is open and forget corrupt slices, for a new pass."""
        for source in list(self._open):
            self._close(source)
        self._bad, self._spare = set(), None

    def _prefetch(self, ahead: tuple[int, ...]) -> None:
        if ahead != self._ahead:
            self._ahead = ahead
            self.store.prefetch([self.store.source.slices[index] for index in ahead[: self.store.depth]])

    def _read(self, epoch: int, run: SampleRun, skipped: dict[tuple[str, int], str]) -> Iterator[Sequence[Any]]:
        slice_, source = self.store.source.slices[run.slice_index], self._source(run)
        place = (epoch, run.slice_index)
        reading = self._open.get(source)
        if reading is None or reading.place != place or run.start < reading.stop:
            self._close(source)
            order = np.arange(slice_.samples)
            if self._shuffle_samples:
                order = sample_order(slice_.samples, seed=self._seed, epoch=epoch, slice_index=run.slice_index)
            reading = _Reading(self.store.open(slice_, whole=self._shuffle_samples), place, order)
            self._open[source] = reading
        reading.place = None  # set again below

        def leave_out(number: int, error: Exception) -> None:
            worker = get_worker_info()
            place = f"rank {self._rank}" + ("" if worker is None else f", DataLoader worker {worker.id}")
            words = f"{type(error).__name__}: {error}"
            text = f"Sample {number} of slice {slice_.key!r} at {slice_.url} cannot be made ({place}): {words}"
            if not self._skip:
                raise BadSampleError(f"{text}. SliceDataModule(on_bad_sample='skip') leaves such out.") from error
            skipped[slice_.key, number] = text

        numbers, samples = reading.order[run.start : run.stop], reading.samples
        if self._shuffle_samples:
            parts = samples.pick(numbers, leave_out)
        else:
            parts = samples.take(run.start, run.stop, leave_out)
        if self._transform is None:
            yield from parts
        else:
            # What cannot be decoded is left out before the samples after it come.
            each = (number for number in numbers.tolist() if (slice_.key, number) not in skipped)
            for part in parts:
                yield list(self._transformed(part, each, leave_out))
        reading.place, reading.stop = place, run.stop
        if run.stop == slice_.samples:
            self._close(source)

    def _transformed(self, part: Sequence[Any], numbers: Iterator[int], leave_out: LeaveOut) -> Iterator[Any]:
        transform: Callable[[Any], Any] = self._transform  # type: ignore[assignment]  # there is one where it is called
        for sample in part:
            number = next(numbers)
            try:
                made = transform(sample)
            except Exception as error:
                leave_out(number, error)
            else:
                yield made

    def _source(self, run: SampleRun) -> int:
        return 0 if self._source_of is None else int(self._source_of[run.slice_index])

    def _close(self, source: int) -> None:
        reading = self._open.pop(source, None)
        if reading is not None:
            reading.samples.close()

    def _any_sample(self) -> Any:
        """Return a sample to repeat: the last one read, or the first readable one."""
        if self._spare is not None:
            return self._spare[0]
        slices = self.store.source.slices
        bad: list[Exception] = []
        leave_out: LeaveOut | None = (lambda number, error: bad.append(error)) if self._skip else None
        for index, slice_ in enumerate(slices):
            if index not in self._bad:
                with suppress(SliceCorruptError):
                    for sample in self.store.samples(slice_, stop=_TRIED, leave_out=leave_out):
                        try:
                            return sample if self._transform is None else self._transform(sample)
                        except Exception as error:  # another one may be better
                            bad.append(error)
        if bad:
            first = f"No sample can be made of the first {_TRIED} of each slice, as of {slices[0].url}."
            raise BadSampleError(first) from bad[-1]
        raise SliceCorruptError(slices[0].key, slices[0].url, "and so is every other slice.")

    def _cost(self) -> dict[str, float]:
        if self._process != os.getpid():  # the store counts anew in each process
            self._told, self._process = {}, os.getpid()
        now, before = self.store.counters.sums(), self._told
        self._told = now
        return {name: amount - before.get(name, 0) for name, amount in now.items() if amount != before.get(name, 0)}


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
