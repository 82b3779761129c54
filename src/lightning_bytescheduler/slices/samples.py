"""The samples of a slice by number: a process makes those of its own batches and skips the others."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.exceptions import SliceCorruptError
from lightning_bytescheduler.slices.formats import ListedSamples, SampleBlock, SampleNumbers
from lightning_bytescheduler.slices.slice import Slice

LeaveOut = Callable[[int, Exception], None]
"""Called with the number of a sample that cannot be decoded, and why. The sample is left out, unless it raises."""


class SliceSamples:
    """Samples of a slice, in parts with ``take``, or in any order with ``pick``, which keeps the whole slice.

    Both raise a ``SliceCorruptError`` if the slice is not as expected, or a sample cannot be decoded and there is no
    ``leave_out``; samples yielded before are correct.

    A known format finds samples without making them. A user's reader makes one after the other. To skip samples it
    begins anew, if all bytes are local, or makes samples in vain.

    Args:
        read: Begins to read its blocks; a user's reader from the sample with the given number on.
        is_here: Whether all bytes are on this machine, for a user's reader; ``None`` for a known format.
    """

    def __init__(
        self,
        slice_: Slice,
        read: Callable[[int], Iterator[SampleBlock[Any]]],
        *,
        is_here: Callable[[], bool] | None = None,
    ) -> None:
        self._slice = slice_
        self._read = read
        self._is_here = is_here
        self._blocks: Iterator[SampleBlock[Any]] | None = None
        self._block: SampleBlock[Any] = ListedSamples([])
        self._begin = self._first = 0  # first samples of the block, and of the reading
        self._all: list[SampleBlock[Any]] = []
        self._begins: list[int] = []

    def take(self, start: int, stop: int, leave_out: LeaveOut | None = None) -> Iterator[Sequence[Any]]:
        """Yield samples ``start`` to ``stop``; earlier ones cannot be requested afterwards."""
        if self._is_here is not None and (self._blocks is None or (start != self._end and self._is_here())):
            self._blocks, self._block = None, ListedSamples([])
            self._begin = self._first = start
        while start < stop:
            while start >= self._end and self._go_on():
                pass
            upto = min(stop, self._end)
            if start >= upto:
                raise self._wrong_count()
            inside = slice(start - self._begin, upto - self._begin)
            yield from self._made(self._block, self._begin, inside, leave_out)
            start = upto
        if stop == self._slice.samples:
            self._require_end()

    def pick(self, numbers: npt.NDArray[np.int64], leave_out: LeaveOut | None = None) -> Iterator[Sequence[Any]]:
        """Yield samples in any order."""
        if not self._all:
            self._read_all()
        if len(self._all) == 1:
            yield from self._made(self._all[0], 0, numbers, leave_out)
            return
        for number in numbers.tolist():
            which = bisect.bisect_right(self._begins, number) - 1
            inside = number - self._begins[which]
            yield from self._made(self._all[which], self._begins[which], slice(inside, inside + 1), leave_out)

    @property
    def _end(self) -> int:
        return self._begin + len(self._block)

    def _go_on(self) -> bool:
        try:
            if self._blocks is None:
                self._blocks = self._read(self._first)
            block = next(self._blocks, None)
        except (ValueError, EOFError) as error:
            raise self._corrupt(self._end, error) from error
        if block is None:
            return False
        self._begin, self._block = self._end, block
        return True

    def _require_end(self) -> None:
        while self._end <= self._slice.samples and self._go_on():  # also reads the remaining bytes
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

    def _made(
        self, block: SampleBlock[Any], begin: int, numbers: SampleNumbers, leave_out: LeaveOut | None
    ) -> Iterator[Sequence[Any]]:
        """Yield samples of a block that begins at number ``begin`` of the slice; ``numbers`` count within the block."""
        try:
            made = block[numbers]
        except ValueError:  # the other samples are correct
            each = range(*numbers.indices(len(block))) if isinstance(numbers, slice) else numbers.tolist()
            for number in each:
                try:
                    one = block[number : number + 1]
                except ValueError as error:
                    if leave_out is None:
                        raise self._corrupt(begin + number, error) from error
                    leave_out(begin + number, error)
                else:
                    yield one
        else:
            yield made

    def _wrong_count(self) -> SliceCorruptError:
        more, counted = self._end > self._slice.samples, self._slice.samples
        what = f"more than the {counted} samples that" if more else f"{self._end} samples, where {counted}"
        reason = f"it holds {what} were counted."
        if more and self._first:
            reason += f" Or the reader did not begin with sample number {self._first}, its argument first."
        return SliceCorruptError(self._slice.key, self._slice.url, reason)

    def _corrupt(self, number: int, error: Exception) -> SliceCorruptError:
        reason = str(error) or type(error).__name__
        return SliceCorruptError(self._slice.key, self._slice.url, f"after sample {number}: {reason}")
