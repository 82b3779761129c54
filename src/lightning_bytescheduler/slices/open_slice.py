"""A slice that is open: its samples by their numbers, from chunks as they come, and what that has cost.

A process makes the samples of its own batches, and passes over the others.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.exceptions import SliceCorruptError
from lightning_bytescheduler.slices.formats import ListedSamples, SampleBlock, SampleNumbers
from lightning_bytescheduler.slices.slice import Bytes, ChunkPlan, Slice, right_chunks

_END = object()


class OpenSlice:
    """A slice between two of its batches, and where the reading of its bytes stands; to be closed.

    Args:
        slice_: What is read.
        plan: Its chunks.
        together: Hand over as many chunks as there are in one piece: for readers that take the whole slice anyway.
        on_close: Told how many seconds were waited for bytes.

    Attributes:
        samples: Its samples.
        slice: What is read.
        plan: Its chunks.
        together: As given.
        next: Number of the next chunk.
        waited: Seconds since the last chunk came.
        stalled: Seconds that were waited for chunks, in all.
    """

    samples: SliceSamples

    def __init__(self, slice_: Slice, plan: ChunkPlan, *, together: bool, on_close: Callable[[float], None]) -> None:
        self.slice = slice_
        self.plan = plan
        self.together = together
        self.next = 0
        self.waited = self.stalled = 0.0
        self._on_close = on_close
        self._chunks: Generator[Bytes, None, None] | None = None

    @property
    def is_read(self) -> bool:
        """Whether its bytes were asked for."""
        return self._chunks is not None

    @property
    def is_over(self) -> bool:
        """Whether there is no next chunk."""
        return self.next >= self.plan.count

    def reads(self, chunks: Generator[Bytes, None, None]) -> Iterator[Bytes]:
        """Its bytes are read from their beginning on in this way, and no longer in the one before."""
        self._let_go()
        self.next, self._chunks = 0, chunks
        return chunks

    def got(self, chunk: Bytes) -> Bytes:
        """Note that the next chunk is here, or several in one piece, and return it."""
        self.next += -(-len(chunk) // self.plan.chunk_bytes)
        self.waited = 0.0
        return chunk

    def close(self) -> None:
        """Let go of the slice; once."""
        self._let_go()
        self._on_close(self.stalled)

    def _let_go(self) -> None:
        if self._chunks is not None:
            self._chunks.close()


def mapped_chunks(reading: OpenSlice, path: str) -> Iterator[Bytes]:
    """Verified chunks of a slice in a file of this machine, without a copy; ends before what is missing or damaged.

    Args:
        reading: Where the reading stands.
        path: Of the file.
    """
    slice_ = reading.slice
    try:
        with open(path, "rb") as file:
            if not slice_.size or os.fstat(file.fileno()).st_size < slice_.start + slice_.size:
                return
            before = slice_.start % mmap.ALLOCATIONGRANULARITY
            length = before + slice_.size
            # Private: a reader may write into what it gets, and neither the file nor others notice.
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=slice_.start - before)
    except OSError:
        return
    for chunk in right_chunks(memoryview(mapped)[before:], reading.plan, together=reading.together):
        yield reading.got(chunk)


class BlockSamples:
    """Samples of a slice whose reader finds them without making them.

    Samples are taken in parts, in any order with ``pick``, which keeps the whole slice. Both raise a
    ``SliceCorruptError`` if the slice is not what it should be; what was yielded before is right.

    Args:
        slice_: The slice.
        blocks: Its samples.
    """

    def __init__(self, slice_: Slice, blocks: Iterator[SampleBlock[Any]]) -> None:
        self._slice = slice_
        self._blocks = blocks
        self._block: SampleBlock[Any] = ListedSamples([])
        self._begin = 0  # its first sample
        self._all: list[SampleBlock[Any]] = []
        self._begins: list[int] = []

    def take(self, start: int, stop: int) -> Iterator[Sequence[Any]]:
        """Samples ``start`` to ``stop``; what is before ``start`` can no longer be asked for."""
        while start < stop:
            while start >= self._end and self._go_on():
                pass
            upto = min(stop, self._end)
            if start >= upto:
                raise self._wrong_count()
            yield from self._made(self._block, self._begin, slice(start - self._begin, upto - self._begin))
            start = upto
        if stop == self._slice.samples:
            self._require_end()

    def pick(self, numbers: npt.NDArray[np.int64]) -> Iterator[Sequence[Any]]:
        """Samples in any order."""
        if not self._all:
            self._read_all()
        if len(self._all) == 1:
            yield from self._made(self._all[0], 0, numbers)
            return
        for number in numbers.tolist():
            which = bisect.bisect_right(self._begins, number) - 1
            inside = number - self._begins[which]
            yield from self._made(self._all[which], self._begins[which], slice(inside, inside + 1))

    @property
    def _end(self) -> int:
        return self._begin + len(self._block)

    def _go_on(self) -> bool:
        """Go to the next block; whether there is one."""
        try:
            block = next(self._blocks, None)
        except (ValueError, EOFError) as error:
            raise _corrupt(self._slice, self._end, error) from error
        if block is None:
            return False
        self._begin, self._block = self._end, block
        return True

    def _require_end(self) -> None:
        while self._end <= self._slice.samples and self._go_on():  # also takes the reader to the end of its bytes
            pass
        if self._end > self._slice.samples:
            raise self._wrong_count()

    def _read_all(self) -> None:
        found, begins = [], []
        while self._go_on():
            if len(self._block):
                found.append(self._block)
                begins.append(self._begin)
        if self._end != self._slice.samples:
            raise self._wrong_count()
        self._all, self._begins = found, begins

    def _made(self, block: SampleBlock[Any], begin: int, numbers: SampleNumbers) -> Iterator[Sequence[Any]]:
        """Samples of a block, whose first is number ``begin`` of the slice; ``numbers`` count from there."""
        try:
            made = block[numbers]
        except ValueError:  # what is before the malformed one is right
            each = range(*numbers.indices(len(block))) if isinstance(numbers, slice) else numbers.tolist()
            for number in each:
                try:
                    one = block[number : number + 1]
                except ValueError as error:
                    raise _corrupt(self._slice, begin + number, error) from error
                yield one
        else:
            yield made

    def _wrong_count(self) -> SliceCorruptError:
        more, counted = self._end > self._slice.samples, self._slice.samples
        what = f"more than the {counted} samples that" if more else f"{self._end} samples, where {counted}"
        return SliceCorruptError(self._slice.key, self._slice.url, f"it holds {what} were counted.")


class ReaderSamples:
    """Samples of a slice whose reader is a user's function, which may take them only one after the other.

    What lies before the next batch is passed over by a reader that begins anew with ``first``, if all bytes are here,
    or by making samples that nobody gets.

    Args:
        slice_: The slice.
        read: The samples from a number on.
        is_here: Whether all bytes are on this machine.
    """

    def __init__(
        self,
        slice_: Slice,
        read: Callable[[int], Iterator[Any]],
        *,
        is_here: Callable[[], bool],
    ) -> None:
        self._slice = slice_
        self._read = read
        self._is_here = is_here
        self._samples: Iterator[Any] | None = None
        self._first = self._place = 0  # where it began, and where it is
        self._all: ListedSamples | None = None

    def take(self, start: int, stop: int) -> Iterator[Sequence[Any]]:
        """See ``BlockSamples``."""
        if self._samples is None or (start != self._place and self._is_here()):
            self._samples, self._first, self._place = self._read(start), start, start
        part: list[Any] = []
        try:
            part.extend(itertools.islice(self._samples, start - self._place, stop - self._place))
            self._place = stop
            self._require_count(start + len(part), stop)
        except (ValueError, EOFError) as error:
            yield part
            raise _corrupt(self._slice, start + len(part), error) from error
        except SliceCorruptError:
            yield part
            raise
        yield part

    def _require_count(self, found: int, stop: int) -> None:
        counted = self._slice.samples
        if found < stop:
            raise ValueError(f"it holds {found} samples, where {counted} were counted.")
        if stop == counted and next(self._samples or iter(()), _END) is not _END:
            reason = f"it holds more than the {counted} samples that were counted."
            if self._first:
                reason += f" Or the reader did not begin with sample number {self._first}, its argument first."
            raise ValueError(reason)

    def pick(self, numbers: npt.NDArray[np.int64]) -> Iterator[Sequence[Any]]:
        """See ``BlockSamples``."""
        if self._all is None:
            self._all = ListedSamples([sample for part in self.take(0, self._slice.samples) for sample in part])
        yield self._all[numbers]


SliceSamples: TypeAlias = BlockSamples | ReaderSamples
"""What a reader of batches asks of a slice."""


def _corrupt(slice_: Slice, number: int, error: Exception) -> SliceCorruptError:
    reason = str(error) or type(error).__name__
    return SliceCorruptError(slice_.key, slice_.url, f"after sample {number}: {reason}")
