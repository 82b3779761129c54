"""The batches of ranks that share each of them, so many samples each as they are told, from slices of their own.

Every batch of an epoch has as many samples, over all ranks, but for the last one. How they are shared may change with
each batch. All ranks know all shares, so each works out for itself who takes which samples (``shared_pool.py``).

*Batches are drawn before they are trained on*, by a loader whose processes read ahead. So a pass draws from a copy; the
position takes the same shares again, batch by batch, when they have been trained on.

Who takes which samples, where ranks share each batch and their shares change: pure, and the same on every rank.

Each rank holds the slice that it reads and some that come next, and takes its share of a batch from there. Whoever
needs more is given the next slice in the epoch's order; so a rank that is faster gets more of them. When none is left,
it takes over the last of what another holds, of the one that would take the longest: as much as fits the shares of
both, whole slices where that can be. So ranks read different slices, but for the end of an epoch, and each sample is
taken once.

Nothing is told: whoever knows the shares of all batches so far knows who holds what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.slices.batches import SLICES_AHEAD, SliceBatch
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import (
    EpochLine,
    EpochPlan,
    EpochPosition,
    Stretch,
    joined,
    samples_without,
)
from lightning_bytescheduler.slices.lock_step import LockStepEpoch
from lightning_bytescheduler.slices.options import Shortage, require_shortage

__all__ = ["SharedPlan", "SharedPool", "SharedSteps"]

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


@dataclass(frozen=True, kw_only=True)
class SharedSteps:
    """How what is left of an epoch is cut into batches.

    Attributes:
        batch_size: Samples of a batch, over all ranks.
        left: Samples that were not trained on before.
        steps: Batches.
        dropped: Samples that are left out, fewer than there are ranks.
        padded: None is trained on twice.
    """

    batch_size: int
    left: int
    steps: int
    dropped: int = 0
    padded: int = 0

    @classmethod
    def of(cls, left: int, batch_size: int, ranks: int, *, shortage: str) -> SharedSteps:
        """Cut.

        Args:
            left: Samples.
            batch_size: Of a batch, over all ranks.
            ranks: How many there are.
            shortage: ``"drop"`` leaves out a last batch that has fewer samples than there are ranks. With ``"pad"``, a
                rank without one computes on another's, which is to count nothing.
        """
        steps, last = -(-left // batch_size), left % batch_size
        if shortage == "drop" and 0 < last < ranks:
            return cls(batch_size=batch_size, left=left, steps=steps - 1, dropped=last)
        return cls(batch_size=batch_size, left=left, steps=steps)

    def size(self, step: int) -> int:
        """Samples of a batch over all ranks, counted from 0."""
        return min(self.batch_size, self.left - step * self.batch_size)


class SharedPlan(EpochPlan):
    """A ``BatchPlan`` for ranks that share batches.

    Args:
        catalogue: The slices.
        batch_size: Samples of a batch, over all ranks.
        rank: This one.
        ranks: How many there are.
        seed: Of the order of slices.
        shuffle: False keeps the catalogue's order in every epoch.
        shortage: ``"pad"`` or ``"drop"``, see :class:`SharedSteps`.

    Attributes:
        batch_size: As given.

    Raises:
        OptionError: If an option is not allowed.
    """

    def __init__(
        self,
        catalogue: SliceCatalogue,
        *,
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        shortage: Shortage = "pad",
    ) -> None:
        super().__init__(catalogue, seed=seed, shuffle=shuffle)
        self.batch_size = require_whole("batch_size", batch_size, 1)
        self._rank, self._ranks = rank, require_whole("ranks", ranks, 1)
        require_shortage(shortage)
        self._shortage = shortage
        self._shares_of: Callable[[int, int], Sequence[int]] | None = None
        self._unfinished: Callable[[], int] = lambda: 0
        self._sizes: dict[int, int] = {}  # of this rank's batches, by the number that the training loop counts
        self._start(EpochPosition())

    def share_out(
        self, shares: Callable[[int, int], Sequence[int]], *, unfinished: Callable[[], int] = lambda: 0
    ) -> None:
        """Say who takes how much.

        Args:
            shares: Of the n-th batch that is drawn in a pass, which has so many samples: those of each rank.
            unfinished: How many batches the training is into a step that accumulates several. The position is that of
                the beginning of the step, as a checkpoint lacks the gradients of these.
        """
        self._shares_of, self._unfinished = shares, unfinished

    @property
    def facts(self) -> dict[str, str]:
        """What has to be the same on all ranks, for them to share."""
        return {
            "the SliceDataModule's batch_size": f"{self.batch_size} for all ranks",
            "the SliceDataModule's shortage": self._shortage,
            "the order of the slices": f"shuffled from seed {self._seed}" if self._shuffle else "as it is",
            "where the training stands in its slices": f"epoch {self.epoch}, {self._pool.left:,} samples left",
        }

    def size_of(self, batch: int) -> int | None:
        """Samples of this rank in a batch, by the number that the training loop counts; ``None`` if it was not drawn.

        0 where the rank has another's sample, as there are none for it.
        """
        return self._sizes.get(batch)

    def share_of_step(self, batch: int, accumulated: int) -> float:
        """How much a batch counts among those of its step, by samples of all ranks: 1 if they are equally large.

        Args:
            batch: By the number that the training loop counts.
            accumulated: Batches of a step; the last one of an epoch may have fewer.
        """
        first = batch - batch % accumulated
        steps = [self._opened + number - self.counted for number in range(first, first + accumulated)]
        sizes = [self.shares.size(step) for step in steps if step < self.shares.steps]
        return self.shares.size(self._opened + batch - self.counted) * len(sizes) / sum(sizes)

    # ------------------------------------------------------------------ see EpochPlan

    @property
    def shares(self) -> SharedSteps:
        """See ``EpochPlan``."""
        return self._shared

    @property
    def position(self) -> EpochPosition:
        """See ``EpochPlan``."""
        unfinished = min(self._unfinished(), len(self._before))
        pool = self._before[-unfinished] if unfinished else self._pool
        if self._steps == unfinished and not self._is_restored:
            return EpochPosition()
        return EpochPosition(rest=pool.rest, held=pool.held)

    @property
    def begun(self) -> bool:
        """See ``EpochPlan``."""
        return bool(self._steps) or self._is_restored

    def __iter__(self) -> Iterator[SliceBatch]:
        if self._shares_of is None:
            raise UnsupportedError(
                "Batches of all ranks were asked for before the strategy has shared them out: only a Trainer's fit "
                "takes them."
            )
        pool, drawn = self._pool.copy(), deque[tuple[int, ...]]()
        self._drawn = drawn
        self._sizes.clear()
        first, line = self._steps, self._epoch_line
        afterwards: Sequence[int] | None = None
        for step in range(first, self._shared.steps):
            shares = tuple(self._shares_of(step - first, self._shared.size(step)))
            drawn.append(shares)
            taken = pool.take(shares)
            self._sizes[self.counted + step - self._opened] = shares[self._rank]
            own = taken[self._rank]
            if not own:  # something to compute on
                start, _ = next(stretch for stretches in taken for stretch in stretches)
                own = [(start, start + 1)]
            runs = tuple(run for start, stop in own for run in line.runs(start, stop))
            slices = dict.fromkeys(pool.slices_of(self._rank))
            slices.pop(runs[-1].slice_index, None)
            if len(slices) < SLICES_AHEAD and not pool.rest:
                afterwards = self._slices_of_next_epoch() if afterwards is None else afterwards
                slices.update(dict.fromkeys(afterwards))
            yield SliceBatch(self.epoch, runs, tuple(slices)[:SLICES_AHEAD])

    def _start(self, position: EpochPosition) -> None:
        line = self._line(self.epoch, self._left_out)
        rest, held = position.left(line), position.held  # checked
        if position.stages:
            rest, held = self._after_stages(position), ()
        elif len(held) == self._ranks and position.rest is not None:
            rest = list(position.rest)  # the same ranks go on with what they held
        if len(held) != self._ranks:
            held = ((),) * self._ranks
        self._epoch_line = line
        self._pool = SharedPool(line, rest, held)
        self._shared = SharedSteps.of(self._pool.left, self.batch_size, self._ranks, shortage=self._shortage)
        self._is_restored = position.begun
        self._drawn = deque[tuple[int, ...]]()
        self._before = deque[SharedPool]()  # where each batch of an unfinished step began
        self._steps = self._opened = 0

    def _after_stages(self, position: EpochPosition) -> list[Stretch]:
        return LockStepEpoch(
            samples=samples_without(self.catalogue, self._left_out),
            batch_sizes=(self.batch_size,),
            seed=self._seed,
            epoch=self.epoch,
            shuffle=self._shuffle,
            position=position,
        ).stretches

    def _take_step(self) -> None:
        if not self._drawn:
            raise OptionError("steps", self._steps + 1, f"at most {self._steps}, as no more batches were drawn")
        unfinished = self._unfinished()
        if unfinished:
            self._before.append(self._pool.copy())
        while len(self._before) > unfinished:
            self._before.popleft()
        self._pool.take(self._drawn.popleft())

    def _slices_of_next_epoch(self) -> Sequence[int]:
        """Indices of the first slices that this rank will hold then."""
        line = self._line(self.epoch + 1, self._quarantined)
        pool = SharedPool(line, [(0, line.length)] if line.length else [], ((),) * self._ranks)
        return list(pool.slices_of(self._rank))
