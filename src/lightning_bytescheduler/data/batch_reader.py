"""Reads batches: the samples of the runs that make up a batch, in any process, one batch after the other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from lightning_bytescheduler.data.lock_step import SampleRun
from lightning_bytescheduler.data.shuffle import sample_order
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.data.statistics import SliceStatistics
from lightning_bytescheduler.data.store import SliceStore
from lightning_bytescheduler.exceptions import SliceCorruptError

__all__ = ["BatchReader", "ReadNote", "SliceBatch"]


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


class ReadNote(NamedTuple):
    """What a reader has to tell besides the samples; of primitives only, as it travels with each batch.

    Attributes:
        cost: What reading has cost since the last note, by the names of ``SliceStatistics``.
        corrupt: Key and reason of each slice that was found to be corrupt.
        lost: Samples of this batch that could not be read.
        is_empty: Whether there are none at all, so that there is no batch.
        depth: How many slices ahead the reader would like to know.
    """

    cost: dict[str, float]
    corrupt: tuple[tuple[str, str], ...] = ()
    lost: int = 0
    is_empty: bool = False
    depth: int = 0


class BatchReader:
    """Reads batches of a store. Can be pickled before its first batch.

    Neighbouring batches continue one another's slice. A reader that gets every second batch reads over the others'
    samples: with several of them each reads all bytes, which are local, and transforms its own samples only.

    Args:
        store: Where samples are read.
        transform: Applied to each sample.
        shuffle_samples: Take the samples of a slice in an order of their own, which holds a whole slice in memory.
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
        self._place: tuple[int, int, int] | None = None  # epoch, slice and position of what is open
        self._samples: Iterator[Any] = iter(())
        self._bad: set[int] = set()
        self._ahead: tuple[int, ...] = ()
        self._spare: Any = None
        self._told, self._process = store.statistics, os.getpid()

    def read(self, batch: SliceBatch) -> tuple[list[Any], ReadNote]:
        """The samples of a batch.

        Raises:
            SliceCorruptError: If no slice at all can be read, to fill a batch whose samples are lost.
            SourceUnavailableError: If a source stays away.
        """
        if batch.ahead != self._ahead:
            self._ahead = batch.ahead
            self.store.prefetch([self.store.source.slices[index] for index in batch.ahead[: self.store.depth]])
        samples: list[Any] = []
        corrupt: list[tuple[str, str]] = []
        wanted = sum(run.stop - run.start for run in batch.runs)
        for run in batch.runs:
            if run.slice_index in self._bad:
                continue
            try:
                samples.extend(self._read(batch.epoch, run))
            except SliceCorruptError as error:
                self._bad.add(run.slice_index)
                self._place, self._samples = None, iter(())
                corrupt.append((error.key, error.reason))
        lost = wanted - len(samples)
        if lost and self._fill:
            spare = samples or [self._any_sample()]
            samples = [*samples, *itertools.islice(itertools.cycle(spare), lost)]
        if samples:
            self._spare = (samples[-1],)
        if self._transform is not None:
            samples = [self._transform(sample) for sample in samples]
        note = ReadNote(self._cost(), tuple(corrupt), lost, is_empty=not samples, depth=self.store.depth)
        return samples, note

    def _read(self, epoch: int, run: SampleRun) -> Iterator[Any]:
        slice_ = self.store.source.slices[run.slice_index]
        place = self._place
        if place is None or place[:2] != (epoch, run.slice_index) or place[2] > run.start:
            first = 0 if self._shuffle_samples else run.start
            samples = self.store.samples(slice_, first)
            self._samples = (
                self._shuffled(epoch, run.slice_index, slice_, samples) if self._shuffle_samples else samples
            )
            place = (epoch, run.slice_index, first)
        self._place = None  # until it is known again: whoever is interrupted has lost count
        skip = run.start - place[2]
        yield from itertools.islice(self._samples, skip, skip + run.stop - run.start)
        if run.stop == slice_.samples:
            next(self._samples, None)  # checks that there is no more, and lets go of the slice
            self._samples = iter(())
        else:
            self._place = (epoch, run.slice_index, run.stop)

    def _shuffled(self, epoch: int, index: int, slice_: Slice, samples: Iterator[Any]) -> Iterator[Any]:
        whole = list(samples)
        order = sample_order(slice_.samples, seed=self._seed, epoch=epoch, slice_index=index)
        return (whole[number] for number in order.tolist())

    def _any_sample(self) -> Any:
        """A sample to repeat: the last one read, or the first that can be."""
        if self._spare is not None:
            return self._spare[0]
        error: SliceCorruptError | None = None
        for index, slice_ in enumerate(self.store.source.slices):
            if index not in self._bad:
                try:
                    return next(iter(self.store.samples(slice_)))
                except SliceCorruptError as raised:
                    error = raised
        if error is None:
            slice_ = self.store.source.slices[0]
            error = SliceCorruptError(slice_.key, slice_.url, "and so is every other slice.")
        raise error

    def _cost(self) -> dict[str, float]:
        if self._process != os.getpid():  # where the store has begun anew
            self._told, self._process = SliceStatistics(), os.getpid()
        now, before = asdict(self.store.statistics), asdict(self._told)
        self._told = SliceStatistics(**now)
        return {name: amount - before[name] for name, amount in now.items()}
