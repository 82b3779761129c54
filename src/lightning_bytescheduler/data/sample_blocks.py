"""Blocks of samples that are made when they are asked for: what lets several processes share the work on one slice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.data.stream import SliceStream

__all__ = ["ListedSamples", "SampleBlock", "SampleNumbers", "SliceBlocks", "samples_of"]

SampleNumbers = slice | npt.NDArray[np.int64]
"""Which samples of a block: neighbours, or any in any order."""

_AT_ONCE = 1024  # samples of a block made at once where they are wanted one after the other: bounds memory

_Sample = TypeVar("_Sample", covariant=True)


class SampleBlock(Protocol[_Sample]):
    """Neighbouring samples of a slice. An array of rows is one."""

    def __len__(self) -> int:
        """How many there are, known without making any."""

    def __getitem__(self, numbers: SampleNumbers, /) -> Sequence[_Sample]:
        """Make these, and no others.

        Raises:
            ValueError: If one is malformed.
        """


SliceBlocks = Callable[[SliceStream], Iterator[SampleBlock[Any]]]
"""A reader that finds samples without making them: blocks of a slice, one after the other, as its bytes arrive."""


class ListedSamples:
    """A block of samples that were made already."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, numbers: SampleNumbers) -> list[Any]:
        if isinstance(numbers, slice):
            return self._samples[numbers]
        return [self._samples[number] for number in numbers.tolist()]


def samples_of(blocks: Iterator[SampleBlock[Any]], first: int) -> Iterator[Any]:
    """The samples of blocks, one after the other, from number ``first`` on."""
    return itertools.chain.from_iterable(_parts(blocks, first))  # a sample costs no Python frame


def _parts(blocks: Iterator[SampleBlock[Any]], first: int) -> Iterator[Sequence[Any]]:
    for block in blocks:
        count = len(block)
        for start in range(min(first, count), count, _AT_ONCE):
            try:
                part = block[start : start + _AT_ONCE]
            except ValueError:  # what is before the malformed one is right
                yield from (block[number : number + 1] for number in range(start, count))
                raise
            yield part
        first = max(first - count, 0)
