"""Which batches a rank trains on: cut from runs of samples, with the slices that come after each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from lightning_bytescheduler.data.batch_reader import SliceBatch
from lightning_bytescheduler.data.lock_step import SampleRun

__all__ = ["SLICES_AHEAD", "BatchPlan", "cut_batches"]

SLICES_AHEAD = 8
"""How many slices a batch names that come after it: no more are prefetched."""


class BatchPlan(Protocol):
    """The batches of a rank. Its position is what was trained on, not what was handed to a process that reads.

    A plan that knows how many batches there are has a length too.
    """

    def __iter__(self) -> Iterator[SliceBatch]:
        """Batches from the position on; whoever was handed some before and did not train on them gets them again."""

    def trained(self) -> None:
        """The next batch has been trained on."""


def cut_batches(epoch: int, runs: Iterable[SampleRun], sizes: Iterable[int]) -> Iterator[SliceBatch]:
    """Cut runs of samples into batches of the sizes given; ends with the sizes."""
    source = iter(runs)
    waiting: deque[SampleRun] = deque()

    def fill() -> None:
        while len(waiting) <= SLICES_AHEAD and (run := next(source, None)) is not None:
            waiting.append(run)

    for size in sizes:
        parts: list[SampleRun] = []
        missing = size
        while missing:
            fill()
            run = waiting.popleft()
            taken = min(missing, run.stop - run.start)
            middle = run.start + taken
            parts.append(SampleRun(slice_index=run.slice_index, start=run.start, stop=middle))
            if middle < run.stop:
                waiting.appendleft(SampleRun(slice_index=run.slice_index, start=middle, stop=run.stop))
            missing -= taken
        fill()
        here = parts[-1].slice_index
        ahead = tuple(dict.fromkeys(run.slice_index for run in waiting if run.slice_index != here))
        yield SliceBatch(epoch, tuple(parts), ahead[:SLICES_AHEAD])
