"""The batches of ranks that step together, and the position in an epoch; computed alike on every rank, without I/O.

Each rank holds the slice that it reads and some that come next, and takes its part of a batch from them. A rank that
needs more gets the next slice in the epoch's order, so a rank with larger batches gets more of them. When none is left,
it takes over samples from the end of what another rank holds: the rank that would take longest, and as many as fit both
ranks' parts, in whole slices if possible. So ranks read different slices, except at the end of an epoch, and each
sample is taken once.

A *mixture* has such a pool for each of its sources. The source of each sample of an epoch follows from the sample's
number and the shares alone. So shares hold in any window of the batches of all ranks, and after any change of ranks and
batch sizes.

The number of samples that each rank takes in a step follows from the rest and the batch sizes, or a strategy sets it.
All ranks know the numbers of all ranks, so each computes the same assignment without messages.

*Batches are drawn before they are trained on*, by a loader whose processes read ahead. So a pass draws from a copy of
the position. The position itself takes the same numbers, batch by batch, after they were trained on.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info
from lightning_bytescheduler.slices.catalogue import DataOrder, SliceCatalogue, corrupt_on_any, slice_order
from lightning_bytescheduler.slices.options import LEAST_SHARE
from lightning_bytescheduler.slices.tracker import read_state

SLICES_AHEAD = 8
"""Most following slices that a batch names; no more are prefetched."""

_HELD = 1 + SLICES_AHEAD  # slices that a rank holds: the one it reads, and those to fetch
_VERSION = 5


class SampleRun(NamedTuple):
    """Neighbouring samples of one slice."""

    slice_index: int
    start: int
    stop: int


class SliceBatch(NamedTuple):
    """The contents of a batch: small, as they are sent to the process that reads."""

    epoch: int
    runs: tuple[SampleRun, ...]
    ahead: tuple[int, ...] = ()


class ReadReport(NamedTuple):
    """A reader's report with each batch: only primitives, as it is sent between processes.

    Attributes:
        cost: Cost of reading since the last report, by the names of ``SliceStatistics``; zeros are left out.
        is_empty: Whether there is no batch, as no sample could be read.
        skipped: Samples that were left out: slice key, number in the slice, and the reason in words.
    """

    cost: dict[str, float]
    corrupt: tuple[tuple[str, str], ...] = ()
    is_empty: bool = False
    skipped: tuple[tuple[str, int, str], ...] = ()


def samples_in(runs: Iterable[SampleRun]) -> int:
    """Return the number of samples in runs."""
    return sum(run.stop - run.start for run in runs)


def cut_runs(runs: deque[SampleRun], samples: int) -> tuple[SampleRun, ...]:
    """Take ``samples`` samples from the beginning of runs, which must hold at least as many."""
    found = []
    while samples:
        run = runs.popleft()
        middle = min(run.stop, run.start + samples)
        if middle < run.stop:
            runs.appendleft(run._replace(start=middle))
        found.append(run._replace(stop=middle))
        samples -= middle - run.start
    return tuple(found)


class EpochPosition(NamedTuple):
    """The rest of a source in an epoch.

    Attributes:
        dealt: Number of slices, in the epoch's order, that have been given out.
        held: The runs that each rank holds.
    """

    dealt: int = 0
    held: tuple[tuple[SampleRun, ...], ...] = ()


class EpochPool:
    """Hands out the rest of a source in an epoch.

    Args:
        samples: Samples of each slice of the catalogue; 0 leaves a slice out.
        position: Position to continue from, saved on any number of ranks; ``None`` is the beginning.
    """

    def __init__(
        self,
        order: npt.NDArray[np.int32],
        samples: npt.NDArray[np.int64],
        ranks: int,
        position: EpochPosition | None = None,
    ) -> None:
        position = position or EpochPosition()
        self._order, self._samples = order[samples[order] > 0], samples
        self._dealt = position.dealt
        self._held = [deque(own) for own in position.held]
        if len(self._held) != ranks:  # another number of ranks: deal the held runs out again
            runs = [run for own in position.held for run in own]
            self._held = [deque(runs[rank::ranks]) for rank in range(ranks)]
        self._counts = [samples_in(own) for own in self._held]
        self.left = int(samples[self._order[self._dealt :]].sum()) + sum(self._counts)
        for slices in range(1, _HELD + 1):  # one slice per rank in turns, so that few slices are on all ranks
            self._deal(slices)

    def copy(self) -> EpochPool:
        """Return another one at this position."""
        found = copy.copy(self)  # shares the arrays, which do not change
        found._held, found._counts = [own.copy() for own in self._held], self._counts.copy()
        return found

    @property
    def position(self) -> EpochPosition:
        """Its position."""
        return EpochPosition(self._dealt, tuple(tuple(own) for own in self._held))

    def slices_of(self, rank: int, most: int) -> list[int]:
        """Return indices of the slices that a rank reads next, within its next ``most`` samples."""
        before = itertools.accumulate((run.stop - run.start for run in self._held[rank]), initial=0)
        return [run.slice_index for run, start in zip(self._held[rank], before, strict=False) if start < most]

    def take(self, sizes: Sequence[int]) -> list[tuple[SampleRun, ...]]:
        """Take a batch.

        Args:
            sizes: Samples of each rank; in all at most :attr:`left`.

        Returns:
            The runs of each rank, in its order.
        """
        for rank, size in enumerate(sizes):
            while self._counts[rank] < size:
                if self._dealt < len(self._order):
                    self._give(rank)
                else:
                    self._take_over(rank, sizes)
        taken = [cut_runs(self._held[rank], size) for rank, size in enumerate(sizes)]
        self._counts = [count - size for count, size in zip(self._counts, sizes, strict=True)]
        self.left -= sum(sizes)
        self._deal(_HELD)
        return taken

    def _deal(self, slices: int) -> None:
        for rank, own in enumerate(self._held):
            while len(own) < slices and self._dealt < len(self._order):
                self._give(rank)

    def _give(self, rank: int) -> None:
        index = int(self._order[self._dealt])
        self._dealt += 1
        run = SampleRun(index, 0, int(self._samples[index]))
        self._held[rank].append(run)
        self._counts[rank] += run.stop - run.start

    def _take_over(self, rank: int, sizes: Sequence[int]) -> None:
        # As there are enough samples for all, some ranks hold more than their part of this batch and can give it.
        others = [other for other in range(len(sizes)) if other != rank and self._counts[other] > sizes[other]]
        slowest = max(others, key=lambda other: (self._counts[other] / max(sizes[other], 1), -other))
        both, spare = sizes[rank] + sizes[slowest], self._counts[slowest] - sizes[slowest]
        wanted = max(min(self._counts[slowest] * sizes[rank] // both, spare), 1)
        theirs, found = self._held[slowest], deque[SampleRun]()
        while theirs and (size := theirs[-1].stop - theirs[-1].start) <= wanted:
            found.appendleft(theirs.pop())
            wanted -= size
        if not found:
            last = theirs.pop()
            theirs.append(last._replace(stop=last.stop - wanted))
            found.append(last._replace(start=last.stop - wanted))
        moved = samples_in(found)
        self._counts[slowest] -= moved
        self._counts[rank] += moved
        self._held[rank].extend(found)


class Mixture:
    """The source of each sample of an epoch: always the source that is furthest behind its share.

    So after any number of samples, no source is a whole sample ahead of its share.

    Args:
        weights: The weight of each source, in any unit; shares are rounded to one in 10,000.
        source_of: The number of the source, for each slice of a catalogue.

    Attributes:
        shares: Samples of each source in a period, which is as long as their sum.
        source_of: As given.
    """

    def __init__(self, weights: Sequence[float], source_of: npt.NDArray[np.int64]) -> None:
        parts = [max(round(weight / sum(weights) * LEAST_SHARE), 1) for weight in weights]
        self.shares = tuple(part // math.gcd(*parts) for part in parts)
        self.source_of = source_of
        self._period = sum(self.shares)
        self._shares = np.array(self.shares, np.int64)
        self._counts = np.zeros((self._period + 1, len(self.shares)), np.int64)  # of the first samples of a period
        for number in range(self._period):
            behind = (number + 1) * self._shares - self._period * self._counts[number]
            self._counts[number + 1] = self._counts[number]
            self._counts[number + 1, behind.argmax()] += 1

    def counts(self, samples: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return how many of an epoch's first samples are of each source; a row for each given number of samples."""
        numbers = np.array(samples, np.int64)
        return numbers[:, None] // self._period * self._shares + self._counts[numbers % self._period]

    def samples(self, totals: Sequence[int]) -> int:
        """Return the number of samples until a source is used up, from the samples of each source.

        It is 0, and there is no epoch, if a source has no sample.
        """
        if not all(totals):
            return 0
        found = []
        for source, total in enumerate(totals):
            periods, rest = divmod(total, self.shares[source])
            more = int(np.searchsorted(self._counts[:, source], rest, side="right")) - 1
            found.append(periods * self._period + more)
        return min(found)


class MixedPool:
    """Hands out the rest of an epoch whose samples are of several sources, with a pool for each.

    Args:
        mixture: The sources and their shares.
        order: Of the slices in the epoch.
        samples: See :class:`EpochPool`.
        ranks: Number of ranks.
        position: Of each source, to continue from; ``None`` is the beginning.

    Attributes:
        left: Samples that are left of the epoch.
        empty: The first source without a sample, if any; there is no epoch then.
    """

    def __init__(
        self,
        mixture: Mixture,
        order: npt.NDArray[np.int32],
        samples: npt.NDArray[np.int64],
        ranks: int,
        position: Sequence[EpochPosition] | None = None,
    ) -> None:
        own = [np.where(mixture.source_of == source, samples, 0) for source in range(len(mixture.shares))]
        self._mixture = mixture
        places = itertools.repeat(None) if position is None else position
        self._pools = [EpochPool(order, one, ranks, place) for one, place in zip(own, places, strict=False)]
        totals = [int(one.sum()) for one in own]
        self.empty = totals.index(0) if 0 in totals else None
        self._taken = sum(totals) - sum(pool.left for pool in self._pools)
        self.left = mixture.samples(totals) - self._taken

    def copy(self) -> MixedPool:
        """Return another one at this position."""
        found = copy.copy(self)
        found._pools = [pool.copy() for pool in self._pools]
        return found

    @property
    def position(self) -> tuple[EpochPosition, ...]:
        """The position of each source."""
        return tuple(pool.position for pool in self._pools)

    def slices_of(self, rank: int) -> list[int]:
        """Return indices of the slices that a rank will read next in the epoch, of each source in turn."""
        now, end = self._mixture.counts([self._taken, self._taken + self.left]).tolist()
        most = [last - first for first, last in zip(now, end, strict=True)]
        turns = itertools.zip_longest(*(pool.slices_of(rank, own) for pool, own in zip(self._pools, most, strict=True)))
        return [index for turn in turns for index in turn if index is not None]

    def take(self, sizes: Sequence[int]) -> list[tuple[SampleRun, ...]]:
        """Take a batch; see :meth:`EpochPool.take`."""
        self.left -= sum(sizes)
        if len(self._pools) == 1:  # a step of one source takes microseconds
            return self._pools[0].take(sizes)
        counts = self._mixture.counts([self._taken + size for size in itertools.accumulate(sizes, initial=0)])
        self._taken += sum(sizes)
        own = np.diff(counts, axis=0).T.tolist()  # of each source: samples of each rank
        taken = [pool.take(source) for pool, source in zip(self._pools, own, strict=True)]
        return [tuple(itertools.chain.from_iterable(parts)) for parts in zip(*taken, strict=True)]


def step_sizes(left: int, batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of each rank in the next step.

    Steps are full if that leaves a sample for each rank in the last step; otherwise earlier steps are smaller. If fewer
    samples than ranks are left in all, the last ranks get none.

    Args:
        left: Samples of all remaining steps.
        batch_sizes: Batch size of each rank, 1 or more.
    """
    ranks, together = len(batch_sizes), sum(batch_sizes)
    later = -(-left // together) - 1
    size = max(min(together, left - later * ranks), min(ranks, left))
    if size >= together:
        return tuple(batch_sizes)
    if size < ranks:
        return (1,) * size + (0,) * (ranks - size)
    # One for each rank, and the rest in proportion to batch sizes, rounded down.
    sizes = [1 + (size - ranks) * (most - 1) // (together - ranks) for most in batch_sizes]
    for rank in sorted(range(ranks), key=lambda rank: sizes[rank] - batch_sizes[rank])[: size - sum(sizes)]:
        sizes[rank] += 1
    return tuple(sizes)


class EpochLeft:
    """The rest of an epoch. Batches are drawn ahead; they count once they were trained on.

    Args:
        pool: At the position where this begins.
        batch_size: Samples of a full batch of all ranks.
        is_restored: Whether that position is in the middle of the epoch.

    Attributes:
        samples: Samples that were left there.
        steps: Steps that these samples make.
        taken: Those of the steps that were trained on.
        pool: The position of a checkpoint: before an unfinished step, as a checkpoint lacks its gradients.
    """

    def __init__(self, pool: MixedPool, batch_size: int, *, is_restored: bool) -> None:
        self.pool, self.is_restored = pool, is_restored
        self.samples = pool.left
        self.steps = -(-pool.left // batch_size)
        self.taken = 0
        self._unfinished = 0  # of the drawn ones, trained on
        self._drawn = deque[tuple[int, ...]]()  # sizes by rank

    def draw(
        self, sizes: Callable[[int, int], tuple[int, ...]]
    ) -> Iterator[tuple[MixedPool, tuple[int, ...], list[tuple[SampleRun, ...]]]]:
        """Draw batches anew, from the first one that was not trained on.

        Args:
            sizes: Returns the samples of each rank in the n-th of them, from n and the samples that are left.

        Yields:
            The pool after each batch, the batch's sizes, and the runs of each rank in it.
        """
        pool, drawn = self.pool.copy(), deque(itertools.islice(self._drawn, self._unfinished))
        self._drawn = drawn
        for own in drawn:
            pool.take(own)
        for number in range(self.steps - self.taken):
            own = sizes(number, pool.left)
            drawn.append(own)
            yield pool, own, pool.take(own)

    def count(self, unfinished: int) -> None:
        """Count the next drawn batch as trained on; ``unfinished`` batches then belong to an unfinished step."""
        if len(self._drawn) <= self._unfinished:
            raise OptionError("steps", self.taken + 1, f"at most {self.taken}, as no more batches were drawn")
        self.taken += 1
        self._unfinished += 1
        while self._unfinished > unfinished:
            self.pool.take(self._drawn.popleft())
            self._unfinished -= 1

    @property
    def has_begun(self) -> bool:
        """Whether a step of the epoch was taken."""
        return self.taken > 0 or self.is_restored

    @property
    def position(self) -> tuple[EpochPosition, ...] | None:
        """Where a checkpoint goes on; ``None`` is the beginning of the epoch."""
        return self.pool.position if self.is_restored or self.taken > self._unfinished else None


@dataclass(eq=False)
class EpochPlan:
    """The batches of ranks that take the same number of steps and have the same position.

    Args:
        mixture: Of the sources of the slices; ``None`` if they are one.
        repeats: Whether another epoch follows; its first slices are then named ahead at the end of one.
        is_shared: Whether :meth:`share_out` sets the shares of each batch. All batches but the last then have equal
            size. A rank without a sample computes on a copy of another's, with weight 0.

    Attributes:
        epoch: The current epoch, from 0.
        left: The rest of it, from where it began or was resumed.
        batch_size: Samples of a full batch of all ranks.
        mixture: As given.
    """

    fills = True
    catalogue: SliceCatalogue
    _: KW_ONLY
    batch_sizes: Sequence[int]
    mixture: Mixture | None = None
    rank: int = 0
    seed: InitVar[int] = 0
    shuffle: InitVar[bool] = True
    repeats: bool = True
    is_shared: bool = False

    def __post_init__(self, seed: int, shuffle: bool) -> None:
        self.batch_size = sum(self.batch_sizes)
        self._mixture = self.mixture or Mixture([1.0], np.zeros(len(self.catalogue), np.int64))
        self._order = self.catalogue.order(seed=seed, shuffle=shuffle)
        self._shares_of: Callable[[int, int], Sequence[int]] | None = None
        self._unfinished: Callable[[], int] = lambda: 0
        self._sizes: dict[int, int] = {}  # this rank's batches by the training loop's number
        self._first = 0  # the training loop's number of the first step of ``left``
        self._only_ends = False
        self._quarantined: dict[str, str] = {}
        self._corrupt: dict[str, str] = {}  # found by this rank in this epoch
        self.start_epoch(0)

    def share_out(
        self, shares: Callable[[int, int], Sequence[int]], *, unfinished: Callable[[], int] = lambda: 0
    ) -> None:
        """Set how batches are shared.

        Args:
            shares: Returns the samples of each rank in the n-th batch drawn in a pass, from n and its size.
            unfinished: Returns how many batches of an unfinished accumulated step were trained on. The position is then
                before that step, as a checkpoint lacks their gradients.
        """
        self._shares_of, self._unfinished = shares, unfinished

    @property
    def facts(self) -> dict[str, str]:
        """The facts that have to be the same on all ranks that share batches."""
        return {
            "the SliceDataModule's batch_size": f"{self.batch_size} for all ranks",
            "the order of the slices": f"shuffled from seed {self._order.seed}" if self._order.shuffle else "as it is",
            "where the training stands in its slices": f"epoch {self.epoch}, {self.left.pool.left:,} samples left",
        }

    def size_of(self, batch: int) -> int | None:
        """Return this rank's samples in a batch, by the training loop's number; ``None`` if it was not drawn.

        0 if the rank has a copy of another's sample.
        """
        return self._sizes.get(batch)

    def share_of_step(self, batch: int, accumulated: int) -> float:
        """Return a batch's weight in its accumulated step, by samples of all ranks; 1 if batches are equally large."""
        first, samples = batch - batch % accumulated - self._first, self.left.samples
        steps = range(first, min(first + accumulated, self.left.steps))
        sizes = [min(self.batch_size, samples - step * self.batch_size) for step in steps]
        return sizes[batch % accumulated] * len(sizes) / sum(sizes)

    @property
    def padded(self) -> int:
        """Samples that are trained on twice, so that each rank has one in every step; fewer than ranks."""
        return 0 if self.is_shared else max(self.left.steps * len(self.batch_sizes) - self.left.samples, 0)

    @property
    def batches(self) -> int:
        """Steps of the opened loader, with those that Lightning counts as done."""
        return self._first + (0 if self._only_ends else self.left.steps)

    def __iter__(self) -> Iterator[SliceBatch]:
        if self.is_shared and self._shares_of is None:
            raise UnsupportedError(
                "Batches of all ranks were asked for before the strategy has shared them out: they are only for a "
                "Trainer's fit."
            )
        self._sizes.clear()
        number = self._first + self.left.taken
        afterwards: Sequence[int] | None = None
        for pool, sizes, taken in self.left.draw(self._sizes_of):
            self._sizes[number] = sizes[self.rank]
            number += 1
            runs = taken[self.rank]
            if not runs:  # a copy to compute on
                others = [own[0] for own in taken if own]
                run = others[self.rank % len(others)]
                runs = (run._replace(stop=run.start + 1),)
            slices = dict.fromkeys(pool.slices_of(self.rank))
            for run in runs:
                slices.pop(run.slice_index, None)
            if len(slices) < SLICES_AHEAD and self.repeats:  # the end of the epoch is near
                if afterwards is None:
                    afterwards = self._pool_of(self.epoch + 1, self._quarantined, None).slices_of(self.rank)
                slices.update(dict.fromkeys(afterwards))
            yield SliceBatch(self.epoch, runs, tuple(slices)[:SLICES_AHEAD])

    def open(self, trainer: pl.Trainer | None) -> None:
        """Prepare for a new loader, after any checkpoint was loaded; report padding.

        Raises:
            OptionError: If there is no sample.
        """
        if self.left.has_begun and self.left.taken == self.left.steps:  # nothing is left of the epoch for these ranks
            self.start_epoch(self.epoch + 1)
        self._only_ends = trainer is not None and not self.left.has_begun and ends_restored_epoch(trainer)
        counted = 0
        if trainer is not None and trainer.fit_loop.restarting:
            current: Any = trainer.fit_loop.epoch_loop.batch_progress.current  # its type lacks attributes
            counted = int(current.processed)  # Lightning's count of done batches in the epoch
        self._first = counted - self.left.taken
        if not self.left.steps:
            of = self._mixture.source_of.tolist()
            url = self.catalogue[of.index(self.left.pool.empty)].url
            allowed = "a slice that can be read of each source: all slices of the one with this file are quarantined"
            raise OptionError("train", url, allowed)
        self.say_padded(f"epoch {self.epoch}")

    def say_padded(self, of: str) -> None:
        """Say how many samples are repeated."""
        if self.padded:
            rank_zero_info(
                f"slices: the samples of {of} do not suffice for all ranks: {self.padded} will be repeated, so that "
                f"every rank takes {self.left.steps} steps."
            )

    def received(self, report: ReadReport) -> None:
        """Store corrupt slices."""
        self._corrupt.update(report.corrupt)

    def trained(self) -> None:
        """Count a step that every rank has taken.

        Raises:
            OptionError: If no more batches were drawn.
        """
        self.left.count(self._unfinished())

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._start(epoch, self._quarantined, None)

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """Go to the next epoch (or repeat this one to overfit), without slices that any rank found corrupt."""

        def total(numbers: Sequence[float]) -> list[float]:
            own = torch.tensor(numbers, device=trainer.strategy.root_device)
            sums: list[float] = trainer.strategy.reduce(own, reduce_op="sum").tolist()
            return sums

        self._quarantined.update(corrupt_on_any(tuple(self.catalogue), self._corrupt, total))
        self._corrupt = {}
        overfits: bool = trainer.overfit_batches  # type: ignore[attr-defined]  # the same batches in each epoch
        self.start_epoch(self.epoch if overfits else self.epoch + 1)

    def close(self) -> None:
        """Do nothing; the position stays."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in primitives; the same on every rank."""
        return {
            "together": {
                "version": _VERSION,
                "epoch": self.epoch,
                "position": msgspec.json.decode(msgspec.json.encode(self.left.position)),  # as lists
                "left_out": dict(self._left_out),
                "quarantined": dict(self._quarantined),
                "order": msgspec.structs.asdict(self._order),
                "shares": list(self._mixture.shares),
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was saved, with any number of ranks and any batch sizes.

        Between epochs, data and seed may have changed.

        Raises:
            TrackerStateError: If the state is of the middle of an epoch of other slices or another order, or of workers
                that do not step together. Nothing has changed then.
        """
        if "epoch" in state:
            return  # of a coordinator's run; the coordinator has the position
        if "together" not in state:
            raise TrackerStateError(
                "The state of the slices was saved by workers that did not step together. Resume with the strategy "
                "that it was saved with, or load only the weights."
            )
        saved = read_state(state["together"], _SavedPosition, version=_VERSION, what="The state of the slices")
        difference = self._order.difference(saved.order)
        if saved.shares != self._mixture.shares:
            difference = f"the shares of its sources were {saved.shares}, are {self._mixture.shares} now"
        if saved.position is not None and difference is not None:
            raise TrackerStateError(
                f"The state was saved in the middle of an epoch of other data or another order ({difference}): resume "
                "with what it was saved with, or from the end of an epoch."
            )
        self._start(saved.epoch, saved.left_out, saved.position)
        self._quarantined = saved.quarantined

    def _start(self, epoch: int, left_out: Mapping[str, str], position: tuple[EpochPosition, ...] | None) -> None:
        """Go to a position of an epoch."""
        pool = self._pool_of(epoch, left_out, position)
        self.left = EpochLeft(pool, self.batch_size, is_restored=position is not None)
        self.epoch, self._left_out, self._first = epoch, dict(left_out), 0

    def _pool_of(
        self, epoch: int, left_out: Mapping[str, str], position: tuple[EpochPosition, ...] | None
    ) -> MixedPool:
        samples: npt.NDArray[np.int64] = self.catalogue.samples.copy()
        samples[[index for key in left_out if (index := self.catalogue.find(key)) is not None]] = 0
        order = slice_order(len(samples), seed=self._order.seed, epoch=epoch, shuffle=self._order.shuffle)
        return MixedPool(self._mixture, order, samples, len(self.batch_sizes), position)

    def _sizes_of(self, number: int, left: int) -> tuple[int, ...]:
        if self._shares_of is None:
            return step_sizes(left, self.batch_sizes)
        return tuple(self._shares_of(number, min(self.batch_size, left)))


class _SavedPosition(msgspec.Struct):
    """Types of a plan's saved state."""

    epoch: Annotated[int, msgspec.Meta(ge=0)]
    position: tuple[EpochPosition, ...] | None
    left_out: dict[str, str]
    quarantined: dict[str, str]
    order: DataOrder
    shares: tuple[int, ...]


def ends_restored_epoch(trainer: pl.Trainer) -> bool:
    """Whether Lightning still has to end an epoch of which no batch is left, as after a validation at its end.

    An epoch that was saved right after its last batch is ended here; as in Lightning, without a validation.
    """
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress
    epochs: Any = loop.epoch_progress
    if not loop.restarting or not batches.is_last_batch:
        return False
    if epochs.current.processed < epochs.current.started:
        if batches.current.completed == batches.current.processed:
            return True
        batches.increment_completed()
        epochs.increment_processed()
        epochs.increment_completed()
        loop.epoch_loop._batches_that_stepped += 1
    # On its own, a loop with max_steps never treats an epoch as complete.
    loop._restarting = loop.epoch_loop.restarting = False
    return False
