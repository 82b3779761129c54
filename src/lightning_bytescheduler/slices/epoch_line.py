"""An epoch's samples as a line, and where a training stands on it.

The line goes through all slices in the epoch's order, from 0 to the number of samples. What is left of an epoch is
stretches of it, (start, stop) each, which do not depend on who trains on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.batches import SampleRun
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.shuffle import slice_order

__all__ = ["EpochLine", "EpochPosition", "Stage", "Stretch", "joined", "samples_without"]

Stretch: TypeAlias = tuple[int, int]


class EpochLine:
    """All samples of an epoch, in order.

    Args:
        samples: Samples of each slice; 0 leaves a slice out.
        seed: Of the order of slices.
        epoch: Which epoch.
        shuffle: False keeps the catalogue's order.

    Attributes:
        length: Samples of the epoch.

    Raises:
        OptionError: If an option is not allowed.
    """

    def __init__(self, samples: npt.NDArray[np.int64], *, seed: int, epoch: int, shuffle: bool = True) -> None:
        counts = np.asarray(samples, dtype=np.int64)
        if counts.ndim != 1 or (counts < 0).any():
            raise OptionError("samples", samples, "a count for each slice, 0 or more")
        self._order = slice_order(len(counts), seed=seed, epoch=epoch, shuffle=shuffle)
        self._ends = np.cumsum(counts[self._order], dtype=np.int64)
        self.length = int(self._ends[-1]) if len(self._ends) else 0

    def end_of_slice(self, place: int) -> int:
        """Where the slice ends that has a sample."""
        return int(self._ends[np.searchsorted(self._ends, place, side="right")])

    def slice_at(self, place: int) -> int:
        """Index, in the catalogue, of the slice that has a sample."""
        return int(self._order[np.searchsorted(self._ends, place, side="right")])

    def runs(self, start: int, stop: int) -> Iterator[SampleRun]:
        """A stretch, in slices."""
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[place])
            begin = int(self._ends[place - 1]) if place else 0
            if start < end:
                upto = min(stop, end)
                yield SampleRun(slice_index=int(self._order[place]), start=start - begin, stop=upto - begin)
                start = upto
            place += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Steps that were taken together; plain numbers, to be kept in a checkpoint.

    Attributes:
        batch_sizes: Of each rank, in samples.
        steps: How many steps.
        shortage: As the epoch was shared.
    """

    batch_sizes: tuple[int, ...]
    steps: int
    shortage: str = "pad"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPosition:
    """What of an epoch was trained on: whatever is not in ``rest`` or ``held``, and after that the stages.

    Attributes:
        rest: Stretches that were left, but for what ranks held; ``None`` for the whole line.
        held: And those that each rank held, in its order.
        stages: Steps of fixed batch sizes that were taken since, of all that was left.
    """

    rest: tuple[Stretch, ...] | None = None
    held: tuple[tuple[Stretch, ...], ...] = ()
    stages: tuple[Stage, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether anything was trained on."""
        return self.rest is not None or bool(self.stages)

    def left(self, line: EpochLine) -> list[Stretch]:
        """Stretches that were left before the stages, in order.

        Raises:
            OptionError: If they are no stretches of this line, or overlap.
        """
        if self.rest is None:
            return [(0, line.length)] if line.length else []
        found = sorted([*self.rest, *(stretch for own in self.held for stretch in own)])
        ends = [0, *(stop for _, stop in found)]
        if any(not end <= start < stop for end, (start, stop) in zip(ends, found, strict=False)) or (
            ends[-1] > line.length
        ):
            raise OptionError("rest", self.rest, f"stretches of an epoch of {line.length} samples that do not overlap")
        return joined(found)


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same samples in as few stretches as can be, of stretches in order."""
    found: list[Stretch] = []
    for start, stop in stretches:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def samples_without(catalogue: SliceCatalogue, keys: Mapping[str, str] | Sequence[str]) -> npt.NDArray[np.int64]:
    """Samples of each slice, 0 for those of the keys."""
    samples: npt.NDArray[np.int64] = catalogue.samples.copy()
    for key in keys:
        index = catalogue.find(key)
        if index is not None:
            samples[index] = 0
    return samples
