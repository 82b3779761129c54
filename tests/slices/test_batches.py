"""Batches of slices that cannot be read: other samples are repeated in their place, or the reading ends."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_bytescheduler.exceptions import SliceCorruptError, SourceUnavailableError
from lightning_bytescheduler.slices.epoch_plan import SampleRun, SliceBatch
from lightning_bytescheduler.slices.loader import BatchReader
from lightning_bytescheduler.slices.options import StoreOptions
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.store import SliceStore
from tests.slices.faults import FaultySource, lines

COUNT = 6
BATCHES = [SliceBatch(0, (SampleRun(index, 0, COUNT),)) for index in range(3)]


def reader_of(source: FaultySource, *, fill: bool = True) -> BatchReader:
    return BatchReader(SliceStore(source, StoreOptions(timeout=0.1)), fill=fill)


def damaged(slice_: Slice, start: int, answer: bytes) -> bytes:
    return b"?" * len(answer)


def test_a_corrupt_slice_is_named_and_others_repeated() -> None:
    source = FaultySource(3, count=COUNT)
    source.fault = lambda slice_, start, answer: damaged(slice_, start, answer) if slice_.key == "s1" else answer
    reader = reader_of(source)
    read = [reader.read(batch) for batch in BATCHES]
    assert read[0][0] == lines(0, COUNT)
    assert read[1][0] == lines(2, COUNT)
    assert read[2][0] == lines(2, COUNT)
    assert [[key for key, _ in report.corrupt] for _, report in read] == [[], ["s1"], []]


def test_what_is_repeated_is_spread_over_other_slices() -> None:
    source = FaultySource(4, count=COUNT)
    source.fault = lambda slice_, start, answer: damaged(slice_, start, answer) if slice_.key in "s1 s2" else answer
    runs = [SampleRun(index, start, start + 2) for index in (1, 2) for start in range(0, COUNT, 2)]
    readers = [reader_of(source), reader_of(source)]  # as processes that take turns
    read = [readers[number % 2].read(SliceBatch(0, (run,)))[0] for number, run in enumerate(runs)]
    assert [sample for samples in read for sample in samples] == lines(3, COUNT) * 2
    (last, _) = readers[0].read(SliceBatch(0, (SampleRun(2, 4, COUNT), SampleRun(0, 0, 1))))
    assert list(last) == [*lines(3, COUNT)[4:], lines(0, COUNT)[0]]


def test_a_mixture_is_repeated_of_its_own_source() -> None:
    source = FaultySource(3, count=COUNT)
    source.fault = lambda slice_, start, answer: damaged(slice_, start, answer) if slice_.key == "s0" else answer
    store = SliceStore(source, StoreOptions(timeout=0.1))
    reader = BatchReader(store, source_of=np.array([0, 1, 0]))
    assert reader.read(BATCHES[0])[0] == lines(2, COUNT)


def test_a_bad_sample_may_be_read_twice_in_a_batch() -> None:
    """In place of a lost one, and as itself."""

    def no_3(sample: str) -> str:
        return sample if not sample.endswith("line 3") else str(1 // 0)

    source = FaultySource(2, count=COUNT)
    source.fault = lambda slice_, start, answer: damaged(slice_, start, answer) if slice_.key == "s0" else answer
    reader = BatchReader(SliceStore(source, StoreOptions(timeout=0.1)), transform=no_3, skip=True)
    samples, report = reader.read(SliceBatch(0, (SampleRun(0, 0, COUNT), SampleRun(1, 0, COUNT))))
    good = [line for line in lines(1, COUNT) if not line.endswith("line 3")]
    assert list(samples) == [*good, *good, *good[:2]]
    assert [number for _, number, _ in report.skipped] == [3]


def test_without_a_fill_its_batch_is_empty() -> None:
    source = FaultySource(1, count=COUNT)
    source.fault = damaged
    samples, report = reader_of(source, fill=False).read(BATCHES[0])
    assert (len(samples), report.is_empty) == (0, True)


def test_nothing_readable_at_all_is_an_error() -> None:
    source = FaultySource(2, count=COUNT)
    source.fault = damaged
    with pytest.raises(SliceCorruptError, match="corrupt"):
        reader_of(source).read(BATCHES[0])


def test_where_no_other_slice_is_left_a_corrupt_one_is_an_error() -> None:
    source = FaultySource(1, count=500)
    source.fault = lambda slice_, start, answer: damaged(slice_, start, answer) if start else answer
    reader = reader_of(source)
    assert list(reader.read(SliceBatch(0, (SampleRun(0, 0, 2),)))[0]) == lines(0, 2)
    with pytest.raises(SliceCorruptError, match=r"'s0' at test://s0\.txt is corrupt: and so is every other"):
        reader.read(SliceBatch(0, (SampleRun(0, 2, 500),)))


def test_a_source_that_stays_away_ends_the_reading() -> None:
    def gone(slice_: Slice, start: int, answer: bytes) -> bytes:
        raise ConnectionError("gone")

    source = FaultySource(2, count=COUNT)
    source.fault = gone
    with pytest.raises(SourceUnavailableError, match="gone"):
        reader_of(source).read(BATCHES[0])
