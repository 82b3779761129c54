"""Batches: what one consists of, how they are cut from runs of samples, and the reader that makes them.

A batch is read in any process, one after the other; it names the slices that come after it, to be fetched meanwhile.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.exceptions import SliceCorruptError
from lightning_bytescheduler.slices.catalogue import sample_order
from lightning_bytescheduler.slices.store import OpenSlice, SliceStore

SLICES_AHEAD = 8
"""How many slices a batch names that come after it: no more are prefetched."""


class SampleRun(NamedTuple):
    """Neighbouring samples of one slice.

    Attributes:
        slice_index: The slice's, in the catalogue.
        start: First sample.
        stop: One after the last.
    """

    slice_index: int
    start: int
    stop: int


class SliceBatch(NamedTuple):
    """What a batch consists of; small, as it is sent to the process that reads it.

    Attributes:
        epoch: Which epoch it belongs to.
        runs: Its samples.
        ahead: Indices of the slices that come after it, to be fetched in the meantime.
    """

    epoch: int
    runs: tuple[SampleRun, ...]
    ahead: tuple[int, ...] = ()


class ReadReport(NamedTuple):
    """What a reader has to tell besides the samples; of primitives only, as it travels with each batch.

    Attributes:
        cost: What reading has cost since the last report, by the names of ``SliceStatistics``; without what is nothing.
        corrupt: Key and reason of each slice that was found to be corrupt.
        lost: Samples of this batch that could not be read.
        is_empty: Whether there are none at all, so that there is no batch.
    """

    cost: dict[str, float]
    corrupt: tuple[tuple[str, str], ...] = ()
    lost: int = 0
    is_empty: bool = False


def samples_in(runs: Iterable[SampleRun]) -> int:
    """How many samples there are in runs."""
    return sum(run.stop - run.start for run in runs)


def cut_runs(runs: deque[SampleRun], samples: int) -> tuple[SampleRun, ...]:
    """Take so many samples from the beginning of runs, which have as many at least."""
    found = []
    while samples:
        run = runs.popleft()
        middle = min(run.stop, run.start + samples)
        if middle < run.stop:
            runs.appendleft(run._replace(start=middle))
        found.append(run._replace(stop=middle))
        samples -= middle - run.start
    return tuple(found)


class BatchReader:
    """Reads batches of a store. Can be pickled before its first batch.

    Neighbouring batches continue one another's slice. A reader that gets every second batch passes over the others'
    samples and makes its own only: several of them share the work on a slice.

    Args:
        store: Where samples are read.
        transform: Applied to each sample.
        shuffle_samples: Take the samples of a slice in an order of their own, which maps or holds a whole slice.
        seed: Of that order.
        fill: Put a repeated sample in the place of each one that cannot be read, for ranks that step together.
    """

    def __init__(
        self,
        store: SliceStore,
        *,
        transform: Callable[[Any], Any] | None = None,
        shuffle_samples: bool = False,
        seed: int = 0,
        fill: bool = True,
    ) -> None:
        self.store = store
        self._transform = transform
        self._shuffle_samples = shuffle_samples
        self._seed = seed
        self._fill = fill
        self._open: OpenSlice | None = None
        self._opened: tuple[int, int] | None = None  # epoch and slice of what is open
        self._stop = 0  # one after the last sample that was read there: what is before may have been written to
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # of its samples, if they are shuffled
        self._bad: set[int] = set()
        self._ahead: tuple[int, ...] = ()
        self._spare: Any = None
        self._told, self._process = store.counters.sums(), os.getpid()

    def read(self, batch: SliceBatch) -> tuple[Sequence[Any], ReadReport]:
        """The samples of a batch: a list, or an array whose rows they are.

        Raises:
            SliceCorruptError: If no slice at all can be read, to fill a batch whose samples are lost.
            SourceUnavailableError: If a source stays away.
        """
        self._prefetch(batch.ahead)
        parts: list[Sequence[Any]] = []
        corrupt: list[tuple[str, str]] = []
        wanted = samples_in(batch.runs)
        for run in batch.runs:
            if run.slice_index in self._bad:
                continue
            try:
                parts.extend(self._read(batch.epoch, run))
            except SliceCorruptError as error:
                self._bad.add(run.slice_index)
                self._close()
                corrupt.append((error.key, error.reason))
        samples = _joined(parts)
        lost = wanted - len(samples)
        if lost and self._fill:
            spare = list(samples) or [self._any_sample()]
            samples = [*samples, *itertools.islice(itertools.cycle(spare), lost)]
        if len(samples):
            self._spare = (samples[-1],)
        if self._transform is not None:
            samples = [self._transform(sample) for sample in samples]
        report = ReadReport(self._cost(), tuple(corrupt), lost, is_empty=not len(samples))
        return samples, report

    def begin_pass(self) -> None:
        """Let go of what is open, and forget what was found out, as if nothing was read."""
        self._close()
        self._bad, self._spare = set(), None

    def _prefetch(self, ahead: tuple[int, ...]) -> None:
        if ahead != self._ahead:
            self._ahead = ahead
            self.store.prefetch([self.store.source.slices[index] for index in ahead[: self.store.depth]])

    def _read(self, epoch: int, run: SampleRun) -> Iterator[Sequence[Any]]:
        slice_ = self.store.source.slices[run.slice_index]
        opened = self._open
        if opened is None or self._opened != (epoch, run.slice_index) or run.start < self._stop:
            self._close()
            opened = self._open = self.store.open(slice_, whole=self._shuffle_samples)
            if self._shuffle_samples:
                self._order = sample_order(slice_.samples, seed=self._seed, epoch=epoch, slice_index=run.slice_index)
        self._opened = None  # until it is known again: whoever is interrupted has lost count
        if self._shuffle_samples:
            yield from opened.samples.pick(self._order[run.start : run.stop])
        else:
            yield from opened.samples.take(run.start, run.stop)
        self._opened, self._stop = (epoch, run.slice_index), run.stop
        if run.stop == slice_.samples:
            self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open, self._opened = None, None

    def _any_sample(self) -> Any:
        """A sample to repeat: the last one read, or the first that can be."""
        if self._spare is not None:
            return self._spare[0]
        slices = self.store.source.slices
        for index, slice_ in enumerate(slices):
            if index not in self._bad:
                with suppress(SliceCorruptError):
                    return next(iter(self.store.samples(slice_)))
        raise SliceCorruptError(slices[0].key, slices[0].url, "and so is every other slice.")

    def _cost(self) -> dict[str, float]:
        if self._process != os.getpid():  # where the store has begun anew
            self._told, self._process = {}, os.getpid()
        now, before = self.store.counters.sums(), self._told
        self._told = now
        return {name: amount - before.get(name, 0) for name, amount in now.items() if amount != before.get(name, 0)}


def _joined(parts: list[Sequence[Any]]) -> Sequence[Any]:
    """The samples of all parts; rows of arrays stay together, as far as they are alike."""
    first = parts[0] if parts else ()
    if isinstance(first, np.ndarray):
        alike = all(
            isinstance(part, np.ndarray) and (part.dtype, part.shape[1:]) == (first.dtype, first.shape[1:])
            for part in parts
        )
        if alike:
            return first if len(parts) == 1 else np.concatenate(parts)
    return list(itertools.chain.from_iterable(parts))
