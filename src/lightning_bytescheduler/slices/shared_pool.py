"""Who takes which samples, where ranks share each batch and their shares change: pure, and the same on every rank.

Each rank holds the slice that it reads and some that come next, and takes its share of a batch from there. Whoever
needs more is given the next slice in the epoch's order; so a rank that is faster gets more of them. When none is left,
it takes over the last of what another holds, of the one that would take the longest: as much as fits the shares of
both, whole slices where that can be. So ranks read different slices, but for the end of an epoch, and each sample is
taken once.

Nothing is told: whoever knows the shares of all batches so far knows who holds what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from lightning_bytescheduler.slices.batches import SLICES_AHEAD
from lightning_bytescheduler.slices.epoch_line import EpochLine, Stretch, joined

__all__ = ["SharedPool"]

_HELD = 1 + SLICES_AHEAD  # slices, so that those that come next can be fetched


class SharedPool:
    """What is left of an epoch.

    Args:
        line: The epoch.
        rest: What nobody holds, in order.
        held: What each rank holds, in its order.

    Attributes:
        left: Samples.
    """

    def __init__(self, line: EpochLine, rest: Iterable[Stretch], held: Sequence[Iterable[Stretch]]) -> None:
        self._line = line
        self._rest = deque(rest)
        self._held = [deque(own) for own in held]
        self._counts = [_samples(own) for own in self._held]
        self.left = _samples(self._rest) + sum(self._counts)
        for slices in range(1, _HELD + 1):  # in turns, so that few slices are on all ranks
            self._deal(slices)

    def copy(self) -> SharedPool:
        """Another one that stands where this does."""
        return SharedPool(self._line, self._rest, self._held)

    @property
    def rest(self) -> tuple[Stretch, ...]:
        """What nobody holds, in order."""
        return tuple(self._rest)

    @property
    def held(self) -> tuple[tuple[Stretch, ...], ...]:
        """What each rank holds, in its order."""
        return tuple(tuple(own) for own in self._held)

    def slices_of(self, rank: int) -> Iterable[int]:
        """Indices of the slices that a rank will read next, if shares stay as they are."""
        return [self._line.slice_at(start) for start, _ in self._held[rank]]

    def take(self, shares: Sequence[int]) -> list[list[Stretch]]:
        """Take a batch.

        Args:
            shares: Samples of each rank, together no more than there are left.

        Returns:
            What each rank gets, in its order.
        """
        for rank, share in enumerate(shares):
            while self._counts[rank] < share:
                if self._rest:
                    self._give(rank)
                else:
                    self._take_over(rank, shares)
        taken = [self._cut(rank, share) for rank, share in enumerate(shares)]
        self.left -= sum(shares)
        self._deal(_HELD)
        return taken

    def _cut(self, rank: int, samples: int) -> list[Stretch]:
        own, found = self._held[rank], []
        self._counts[rank] -= samples
        while samples:
            start, stop = own.popleft()
            middle = min(stop, start + samples)
            if middle < stop:
                own.appendleft((middle, stop))
            found.append((start, middle))
            samples -= middle - start
        return joined(found)

    def _deal(self, slices: int) -> None:
        for rank, own in enumerate(self._held):
            while self._rest and len(own) < slices:
                self._give(rank)

    def _give(self, rank: int) -> None:
        start, stop = self._rest.popleft()
        end = min(stop, self._line.end_of_slice(start))
        if end < stop:
            self._rest.appendleft((end, stop))
        self._held[rank].append((start, end))
        self._counts[rank] += end - start

    def _take_over(self, rank: int, shares: Sequence[int]) -> None:
        # As there are enough for all, some have more than their share of this batch, and keep that.
        others = [other for other in range(len(shares)) if other != rank and self._counts[other] > shares[other]]
        slowest = max(others, key=lambda other: (self._counts[other] / max(shares[other], 1), -other))
        both, spare = shares[rank] + shares[slowest], self._counts[slowest] - shares[slowest]
        wanted = max(min(self._counts[slowest] * shares[rank] // both, spare), 1)
        theirs, found = self._held[slowest], deque[Stretch]()
        while theirs and (size := theirs[-1][1] - theirs[-1][0]) <= wanted:
            found.appendleft(theirs.pop())
            wanted -= size
        if not found:
            start, stop = theirs.pop()
            theirs.append((start, stop - wanted))
            found.append((stop - wanted, stop))
        moved = _samples(found)
        self._counts[slowest] -= moved
        self._counts[rank] += moved
        self._held[rank].extend(found)


def _samples(stretches: Iterable[Stretch]) -> int:
    return sum(stop - start for start, stop in stretches)
