"""Samples of one slice by their numbers: a process makes those of its own batches, and passes over the others."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.data.sample_blocks import ListedSamples, SampleBlock, SampleNumbers
from lightning_bytescheduler.data.slice import Slice
from lightning_bytescheduler.exceptions import SliceCorruptError

__all__ = ["BlockSamples", "ReaderSamples", "ReaderSpeed", "SliceSamples"]

_SAME_SECONDS = 2e-4  # a difference that does not matter: about what it takes to send a batch to another process
_WEIGHT = 0.3  # of the newest measurement


class SliceSamples(Protocol):
    """What a reader of batches asks of a slice.

    Attributes:
        begin: The first sample that can still be taken without beginning anew.
    """

    @property
    def begin(self) -> int:
        """See the class."""

    def take(self, start: int, stop: int) -> Iterator[Sequence[Any]]:
        """Samples ``start`` to ``stop``, in parts; asking on from here may let go of what is before ``start``.

        Raises:
            SliceCorruptError: If the slice is not what it should be. What was yielded before is right.
        """

    def pick(self, numbers: npt.NDArray[np.int64]) -> Iterator[Sequence[Any]]:
        """Samples in any order, in parts; keeps the whole slice.

        Raises:
            SliceCorruptError: See ``take``.
        """


class BlockSamples:
    """Samples of a slice whose reader finds them without making them.

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

    @property
    def begin(self) -> int:
        """See ``SliceSamples``."""
        return self._begin

    def take(self, start: int, stop: int) -> Iterator[Sequence[Any]]:
        """See ``SliceSamples``."""
        while start < stop:
            while start >= self._end and self._go_on():
                pass
            upto = min(stop, self._end)
            if start >= upto:
                raise self._wrong_count(f"holds {self._end} samples, where {self._slice.samples} were counted.")
            yield from self._made(self._block, self._begin, slice(start - self._begin, upto - self._begin))
            start = upto
        if stop == self._slice.samples:
            self._require_end()

    def pick(self, numbers: npt.NDArray[np.int64]) -> Iterator[Sequence[Any]]:
        """See ``SliceSamples``."""
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
            raise self._malformed(self._end, error) from error
        if block is None:
            return False
        self._begin, self._block = self._end, block
        return True

    def _require_end(self) -> None:
        while self._end <= self._slice.samples and self._go_on():  # also takes the reader to the end of its bytes
            pass
        if self._end > self._slice.samples:
            raise self._wrong_count(f"holds more than the {self._slice.samples} samples that were counted.")

    def _read_all(self) -> None:
        found, begins = [], []
        while self._go_on():
            if len(self._block):
                found.append(self._block)
                begins.append(self._begin)
        if self._end != self._slice.samples:
            raise self._wrong_count(f"holds {self._end} samples, where {self._slice.samples} were counted.")
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
                    raise self._malformed(begin + number, error) from error
                yield one
        else:
            yield made

    def _malformed(self, number: int, error: Exception) -> SliceCorruptError:
        reason = str(error) or type(error).__name__
        return SliceCorruptError(self._slice.key, self._slice.url, f"after sample {number}: {reason}")

    def _wrong_count(self, what: str) -> SliceCorruptError:
        return SliceCorruptError(self._slice.key, self._slice.url, f"it {what}")


class ReaderSpeed:
    """How long a user's reader takes for a sample, and to come to a sample from the beginning of a slice."""

    def __init__(self) -> None:
        self._sample: float | None = None
        self._begin: float | None = None
        self._skip = 0.0

    def read(self, samples: int, seconds: float) -> None:
        """So many samples were made."""
        each = seconds / max(samples, 1)
        self._sample = each if self._sample is None else self._sample + _WEIGHT * (each - self._sample)

    def began(self, first: int, seconds: float) -> None:
        """A reader that was asked for sample ``first`` has made it."""
        own = max(seconds - (self._sample or 0.0), 0.0)
        self._begin = own if self._begin is None else min(self._begin, own)
        if first:
            self._skip = (own - self._begin) / first

    def should_begin_anew(self, place: int, first: int) -> bool:
        """Whether a reader at ``place`` is asked anew for ``first``, rather than to make what is between."""
        if self._sample is None or self._begin is None:
            return True
        return self._begin + self._skip * first <= (first - place) * self._sample + _SAME_SECONDS


class ReaderSamples:
    """Samples of a slice whose reader is a user's function, which may take them only one after the other.

    What lies before the next batch is passed over in the way that takes less time: by a reader that begins anew with
    ``first``, or by making samples that nobody gets.

    Args:
        slice_: The slice.
        read: The samples from a number on.
        may_begin_anew: Whether the bytes are on this machine.
        speed: What is known of the reader.
    """

    def __init__(
        self,
        slice_: Slice,
        read: Callable[[int], Iterator[Any]],
        *,
        may_begin_anew: Callable[[], bool],
        speed: ReaderSpeed,
    ) -> None:
        self._slice = slice_
        self._read = read
        self._may_begin_anew = may_begin_anew
        self._speed = speed
        self._samples: Iterator[Any] | None = None
        self._place = 0
        self._all: ListedSamples | None = None

    @property
    def begin(self) -> int:
        """See ``SliceSamples``."""
        return self._place

    def take(self, start: int, stop: int) -> Iterator[Sequence[Any]]:
        """See ``SliceSamples``."""
        part: list[Any] = []
        try:
            samples = self._from(start, part)
            began = time.perf_counter()
            skip, wanted = start - self._place, stop - start - len(part)
            part.extend(itertools.islice(samples, skip, skip + wanted))
            if wanted:
                self._speed.read(skip + wanted, time.perf_counter() - began)
            self._place = stop
            if stop == self._slice.samples:
                next(samples, None)  # checks that there is no more
        except SliceCorruptError:
            yield part
            raise
        yield part

    def pick(self, numbers: npt.NDArray[np.int64]) -> Iterator[Sequence[Any]]:
        """See ``SliceSamples``."""
        if self._all is None:
            self._all = ListedSamples(list(self._read(0)))
        yield self._all[numbers]

    def _from(self, start: int, part: list[Any]) -> Iterator[Any]:
        """The samples from ``_place`` on; ``part`` gets the first if the reader began anew for it."""
        if self._samples is not None:
            if start == self._place:
                return self._samples
            if not self._speed.should_begin_anew(self._place, start) or not self._may_begin_anew():
                return self._samples
        began = time.perf_counter()
        self._samples = self._read(start)
        part.extend(itertools.islice(self._samples, 1))
        self._speed.began(start, time.perf_counter() - began)
        self._place = start
        return self._samples
