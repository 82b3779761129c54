"""Where every slice stands in the running epoch, in arrays: 17 bytes a slice."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.slices.shuffle import slice_order
from lightning_bytescheduler.slices.slice import SliceState

__all__ = ["EpochSlices"]


class EpochSlices:
    """States and positions of the slices, and which comes next.

    Slices are named by their index in the catalogue. A slice's *position* is the first sample not known to be trained
    on. At any time ``trained + dropped`` and what AVAILABLE and ASSIGNED slices have left add up to all samples.

    Args:
        samples: Samples of each slice.
        seed: Of the order.
        shuffle: Whether the order is another one in each epoch.

    Attributes:
        epoch: The running epoch, from 0.
        states: A :class:`SliceState` each.
        positions: In samples.
        ranks: Place of each slice in the epoch's order.
        quarantined: Reason by slice; these are left out of the following epochs too.
        trained: Samples known to be trained on in this epoch, each counted once.
        dropped: Samples that this epoch will not train on.
        unfinished: Slices that are AVAILABLE or ASSIGNED.
        looked_at: Slices looked at to find available ones: in an epoch at most one per slice and one per return.
    """

    def __init__(self, samples: npt.NDArray[np.int64], *, seed: int, shuffle: bool) -> None:
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self.states: npt.NDArray[np.uint8] = np.zeros(len(samples), np.uint8)
        self.positions: npt.NDArray[np.int64] = np.zeros(len(samples), np.int64)
        self.quarantined: dict[int, str] = {}
        self.looked_at = 0
        self.start(0)

    def start(self, epoch: int) -> None:
        """Make every slice available again, but for the quarantined ones."""
        self.epoch = epoch
        self._order = slice_order(len(self.samples), seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        self.ranks: npt.NDArray[np.int32] = np.empty_like(self._order)
        self.ranks[self._order] = np.arange(len(self._order), dtype=np.int32)
        self.states[:] = SliceState.AVAILABLE
        self.positions[:] = 0
        out = list(self.quarantined)
        self.states[out] = SliceState.QUARANTINED
        self.cursor = 0  # place in the order; whatever is before it was looked at
        self.returned: list[int] = []  # heap of places; some may have been handed out again by another way
        self._count()

    def restore(
        self,
        *,
        epoch: int,
        states: npt.NDArray[np.uint8],
        positions: npt.NDArray[np.int64],
        quarantined: dict[int, str],
        cursor: int,
        returned: list[int],
    ) -> None:
        """Take up a saved epoch; the values must have been checked."""
        self.quarantined = dict(quarantined)
        self.start(epoch)
        self.states[:] = states
        self.positions[:] = positions
        self.cursor = cursor
        self.returned = sorted(returned)
        self._count()

    def _count(self) -> None:
        left = self.samples - self.positions
        settled = self.states >= SliceState.USED
        self.trained = int(self.positions.sum())
        self.dropped = int(left[settled].sum())
        self.unfinished = int(len(settled) - np.count_nonzero(settled))

    def state(self, index: int) -> SliceState:
        """State of a slice."""
        return SliceState(int(self.states[index]))

    def left(self, index: int) -> int:
        """Samples of a slice that are not known to be trained on."""
        return int(self.samples[index]) - int(self.positions[index])

    def take(self, index: int) -> bool:
        """Assign a slice, if it is available."""
        if self.states[index] != SliceState.AVAILABLE:
            return False
        self.states[index] = SliceState.ASSIGNED
        return True

    def take_returned(self) -> int | None:
        """Assign the first slice of those that came back; None if there is none."""
        while self.returned:
            index = int(self._order[heapq.heappop(self.returned)])
            self.looked_at += 1
            if self.take(index):
                return index
        return None

    def take_next(self) -> int | None:
        """Assign the next slice in the epoch's order; None if none is available there."""
        while self.cursor < len(self._order):
            index = int(self._order[self.cursor])
            self.cursor += 1
            self.looked_at += 1
            if self.take(index):
                return index
        return None

    def train(self, index: int, position: int) -> int:
        """Move a slice's position forward; returns by how many samples. A position behind it changes nothing."""
        gained = position - int(self.positions[index])
        if gained <= 0:
            return 0
        self.positions[index] = position
        self.trained += gained
        return gained

    def finish(self, index: int) -> int:
        """All of an assigned slice was trained on; returns how many samples that adds."""
        gained = self.train(index, int(self.samples[index]))
        self._settle(index, SliceState.USED)
        return gained

    def give_back(self, index: int) -> bool:
        """An assigned slice comes back at its position; returns False if nothing is left of it, so that it is used."""
        if not self.left(index):
            self._settle(index, SliceState.USED)
            return False
        self.states[index] = SliceState.AVAILABLE
        heapq.heappush(self.returned, int(self.ranks[index]))
        return True

    def drop_rest(self, index: int) -> None:
        """What an assigned slice has left is not trained on in this epoch."""
        self.dropped += self.left(index)
        self._settle(index, SliceState.USED)

    def quarantine(self, index: int, reason: str) -> bool:
        """Leave a slice out, of this epoch too if it is not settled; returns False if it was quarantined before."""
        if index in self.quarantined:
            return False
        self.quarantined[index] = reason
        if self.states[index] < SliceState.USED:  # it may be out already, as a quarantine is lifted for later epochs
            self.dropped += self.left(index)
            self._settle(index, SliceState.QUARANTINED)
        return True

    def _settle(self, index: int, state: SliceState) -> None:
        self.states[index] = state
        self.unfinished -= 1

    def abandon(self) -> None:
        """Drop all that is left of the epoch."""
        unsettled = self.states < SliceState.USED
        self.states[unsettled] = SliceState.USED
        self._count()

    @property
    def memory(self) -> int:
        """Bytes of memory held."""
        return sum(column.nbytes for column in (self.states, self.positions, self._order, self.ranks))
