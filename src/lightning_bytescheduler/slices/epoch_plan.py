"""The batches of ranks that step together, and the position in an epoch: pure, and the same on every rank.

Each rank holds the slice that it reads and some that come next, and takes its part of a batch from them. A rank that
needs more gets the next slice in the epoch's order, so a rank with larger batches gets more of them. When none is left,
it takes over the last part of what another rank holds, the one that would take the longest: as much as fits the parts
of both, whole slices if possible. So ranks read different slices, except at the end of an epoch, and each sample is
taken once.

A *mixture* has such a pool for each of its sources. Which source each sample of an epoch is of follows from its number
and the shares alone, so that shares hold in any window of the batches of all ranks, and after any change of ranks and
batch sizes.

How many samples each rank takes in a step follows from what is left and the batch sizes, or comes from a strategy that
shares batches out. All ranks know the numbers of all ranks, so each computes the same assignment without messages.

*Batches are drawn before they are trained on*, by a loader whose processes read ahead. So a pass draws from a copy; the
position takes the same numbers again, batch by batch, when they have been trained on.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError, UnsupportedError
from lightning_bytescheduler.lightning_api import pl, rank_zero_info
from lightning_bytescheduler.slices.batches import SLICES_AHEAD, ReadReport, SampleRun, SliceBatch, cut_runs, samples_in
from lightning_bytescheduler.slices.catalogue import DataOrder, SliceCatalogue, corrupt_on_any, slice_order
from lightning_bytescheduler.slices.options import LEAST_SHARE
from lightning_bytescheduler.slices.tracker import read_state

_HELD = 1 + SLICES_AHEAD  # slices, so that the next ones can be fetched
_VERSION = 4


class EpochPosition(NamedTuple):
    """What is left of an epoch.

    Attributes:
        dealt: Number of slices, in the epoch's order, that have been given out.
    """

    dealt: int = 0
    rest: tuple[SampleRun, ...] = ()
    held: tuple[tuple[SampleRun, ...], ...] = ()


class EpochPool:
    """Hands out what is left of an epoch.

    Args:
        samples: Samples of each slice of the catalogue; 0 leaves a slice out.
        position: Position to continue from, saved on any number of ranks; ``None`` is the beginning.

    Raises:
        OptionError: If it is not a position of this epoch.
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
        self._require_position(position)
        goes_on = len(position.held) == ranks
        self._rest = deque(position.rest)
        if not goes_on:
            self._rest.extend(run for own in position.held for run in own)
        self._held = [deque(own) for own in position.held] if goes_on else [deque[SampleRun]() for _ in range(ranks)]
        self._counts = [samples_in(own) for own in self._held]
        self.left = int(samples[self._order[self._dealt :]].sum()) + samples_in(self._rest) + sum(self._counts)
        for slices in range(1, _HELD + 1):  # one slice per rank in turns, so that few slices are on all ranks
            self._deal(slices)

    def copy(self) -> EpochPool:
        """Return a copy at the same position."""
        return EpochPool(self._order, self._samples, len(self._held), self.position)

    @property
    def position(self) -> EpochPosition:
        """Its position."""
        return EpochPosition(self._dealt, tuple(self._rest), tuple(tuple(own) for own in self._held))

    @property
    def has_more(self) -> bool:
        """Whether some samples are held by no rank."""
        return bool(self._rest) or self._dealt < len(self._order)

    def slices_of(self, rank: int) -> list[int]:
        """Return indices of the slices that a rank will read next."""
        return [run.slice_index for run in self._held[rank]]

    def take(self, sizes: Sequence[int]) -> list[tuple[SampleRun, ...]]:
        """Take a batch.

        Args:
            sizes: Samples of each rank, in all no more than are left.

        Returns:
            The runs of each rank, in its order.
        """
        for rank, size in enumerate(sizes):
            while self._counts[rank] < size:
                if self.has_more:
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
            while len(own) < slices and self.has_more:
                self._give(rank)

    def _give(self, rank: int) -> None:
        if self._rest:
            run = self._rest.popleft()
        else:
            index = int(self._order[self._dealt])
            self._dealt += 1
            run = SampleRun(index, 0, int(self._samples[index]))
        self._held[rank].append(run)
        self._counts[rank] += run.stop - run.start

    def _take_over(self, rank: int, sizes: Sequence[int]) -> None:
        # As there are enough samples for all, some ranks have more than their part of this batch and can give that.
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

    def _require_position(self, position: EpochPosition) -> None:
        """Require existing samples of dealt slices, each once."""
        if not 0 <= position.dealt <= len(self._order):
            raise OptionError("dealt", position.dealt, f"from 0 to {len(self._order)}, the slices of the epoch")
        dealt = set(self._order[: position.dealt].tolist())
        ends: dict[int, int] = {}
        for run in sorted([*position.rest, *(run for own in position.held for run in own)]):
            inside = ends.get(run.slice_index, 0) <= run.start < run.stop
            if run.slice_index not in dealt or not inside or run.stop > self._samples[run.slice_index]:
                raise OptionError("rest", run, "of a slice that is dealt, and of samples that are nowhere else")
            ends[run.slice_index] = run.stop


class Mixture:
    """Which source each sample of an epoch comes from: one after the other the source that is most behind its share.

    So no source is a sample ahead of its share of the first samples of an epoch, whatever their number.

    Args:
        weights: Of each source, in any unit; shares are rounded to one in 10,000.
        source_of: Number of its source, for each slice of a catalogue.

    Attributes:
        shares: Samples of each source, of as many as they are together.
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
        """Return how many of the first samples of an epoch are of each source; a row for each number of samples."""
        numbers = np.array(samples, np.int64)
        return numbers[:, None] // self._period * self._shares + self._counts[numbers % self._period]

    def samples(self, totals: Sequence[int]) -> int:
        """Return the samples of an epoch, which ends when a source is used up, from the samples of each source.

        Without any sample of a source there is no epoch.
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
    """Hands out what is left of an epoch whose samples are of several sources, with a pool for each.

    Args:
        pools: What is left of each source.
        totals: Samples of each source.

    Raises:
        OptionError: If what was taken is not what the mixture takes first.
    """

    def __init__(self, mixture: Mixture, pools: Sequence[EpochPool], totals: Sequence[int]) -> None:
        self._mixture, self._pools, self._totals = mixture, tuple(pools), tuple(totals)
        taken = [total - pool.left for total, pool in zip(totals, pools, strict=True)]
        self._taken = sum(taken)
        if mixture.counts([self._taken])[0].tolist() != taken:
            raise OptionError("position", taken, f"samples of the sources in shares of {mixture.shares}")
        self.left = mixture.samples(totals) - self._taken

    def copy(self) -> MixedPool:
        """Return a copy at the same position."""
        return MixedPool(self._mixture, [pool.copy() for pool in self._pools], self._totals)

    @property
    def position(self) -> tuple[EpochPosition, ...]:
        """The position of each source."""
        return tuple(pool.position for pool in self._pools)

    @property
    def has_more(self) -> bool:
        """Whether some samples are held by no rank."""
        return any(pool.has_more for pool in self._pools)

    def slices_of(self, rank: int) -> list[int]:
        """Return indices of the slices that a rank will read next, of each source in turn."""
        turns = itertools.zip_longest(*(pool.slices_of(rank) for pool in self._pools))
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

    Steps are full if that leaves each rank a sample in the last one; otherwise earlier ones are smaller. If there are
    fewer samples than ranks in all, the last ranks get none.

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


class EpochPlan:
    """The batches of ranks that take the same number of steps and have the same position.

    Args:
        mixture: Of the sources of the slices; ``None`` if they are one.
        repeats: Whether another epoch follows, whose first slices are named ahead at the end.
        is_shared: Whether :meth:`share_out` sets the shares of each batch. All batches but the last then have equal
            size. A rank without a sample computes on a copy of another's, with weight 0.

    Attributes:
        epoch: The current epoch, from 0.
        counted: Steps that the training loop counts before the remaining ones, after a resume in mid-epoch.
        padded: Samples that are trained on twice, fewer than there are ranks: each has one in every step.
    """

    fills = True
    steps: int
    padded: int
    _steps: int  # taken since the epoch began or was resumed
    _opened: int  # the value of _steps when the loader was made

    def __init__(
        self,
        catalogue: SliceCatalogue,
        *,
        batch_sizes: Sequence[int],
        mixture: Mixture | None = None,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        repeats: bool = True,
        is_shared: bool = False,
    ) -> None:
        self.catalogue = catalogue
        self._mixture = mixture or Mixture([1.0], np.zeros(len(catalogue), np.int64))
        self._batch_sizes = tuple(batch_sizes)
        self.batch_size = sum(self._batch_sizes)
        self._rank = rank
        self._seed, self._shuffle, self._repeats = seed, shuffle, repeats
        self.is_shared = is_shared
        self._shares_of: Callable[[int, int], Sequence[int]] | None = None
        self._unfinished: Callable[[], int] = lambda: 0
        self._sizes: dict[int, int] = {}  # this rank's batches by the training loop's number
        self._quarantined: dict[str, str] = {}
        self._corrupt: dict[str, str] = {}  # found by this rank in this epoch
        self._only_ends = False
        self.start_epoch(0)

    def share_out(
        self, shares: Callable[[int, int], Sequence[int]], *, unfinished: Callable[[], int] = lambda: 0
    ) -> None:
        """Set how batches are shared.

        Args:
            shares: Returns the samples of each rank in the n-th batch drawn in a pass, from n and its size.
            unfinished: Returns how many batches of an unfinished accumulated step are trained. The position is then the
                beginning of the step, as a checkpoint lacks their gradients.
        """
        self._shares_of, self._unfinished = shares, unfinished

    @property
    def facts(self) -> dict[str, str]:
        """The facts that have to be the same on all ranks that share batches."""
        return {
            "the SliceDataModule's batch_size": f"{self.batch_size} for all ranks",
            "the order of the slices": f"shuffled from seed {self._seed}" if self._shuffle else "as it is",
            "where the training stands in its slices": f"epoch {self.epoch}, {self._pool.left:,} samples left",
        }

    def size_of(self, batch: int) -> int | None:
        """Return this rank's samples in a batch, by the training loop's number; ``None`` if it was not drawn.

        0 if the rank has a copy of another's sample.
        """
        return self._sizes.get(batch)

    def share_of_step(self, batch: int, accumulated: int) -> float:
        """Return a batch's weight within its step, by samples of all ranks; 1 if batches are equally large."""
        first = self._opened - self.counted + batch - batch % accumulated
        sizes = [
            min(self.batch_size, self.left - step * self.batch_size)
            for step in range(first, min(first + accumulated, self.steps))
        ]
        return sizes[batch % accumulated] * len(sizes) / sum(sizes)

    @property
    def over(self) -> bool:
        """Whether nothing of the epoch is left."""
        return self._steps >= self.steps

    @property
    def begun(self) -> bool:
        """Whether a step of the epoch was taken."""
        return bool(self._steps) or self._is_restored

    @property
    def batches(self) -> int:
        """Steps of the opened loader, including those that Lightning counts as done."""
        return self.counted if self._only_ends else self.counted + self.steps - self._steps

    def __iter__(self) -> Iterator[SliceBatch]:
        if self.is_shared and self._shares_of is None:
            raise UnsupportedError(
                "Batches of all ranks were asked for before the strategy has shared them out: only a Trainer's fit "
                "takes them."
            )
        pool, drawn = self._pool.copy(), deque[tuple[int, ...]]()
        self._drawn = drawn
        self._sizes.clear()
        first = self._steps
        afterwards: Sequence[int] | None = None
        for step in range(first, self.steps):
            sizes = self._sizes_of(step - first, pool.left)
            drawn.append(sizes)
            taken = pool.take(sizes)
            self._sizes[self.counted + step - self._opened] = sizes[self._rank]
            runs = taken[self._rank]
            if not runs:  # a copy to compute on
                others = [own[0] for own in taken if own]
                run = others[self._rank % len(others)]
                runs = (run._replace(stop=run.start + 1),)
            slices = dict.fromkeys(pool.slices_of(self._rank))
            for run in runs:
                slices.pop(run.slice_index, None)
            if len(slices) < SLICES_AHEAD and self._repeats and not pool.has_more:
                if afterwards is None:
                    afterwards = self._pool_of(self.epoch + 1, self._quarantined, None).slices_of(self._rank)
                slices.update(dict.fromkeys(afterwards))
            yield SliceBatch(self.epoch, runs, tuple(slices)[:SLICES_AHEAD])

    def open(self, trainer: pl.Trainer | None) -> None:
        """Prepare for a new loader, after a checkpoint was loaded; reports padding.

        Raises:
            OptionError: If there is no sample.
        """
        if self.over and self.begun:  # nothing is left of the epoch for these ranks
            self.start_epoch(self.epoch + 1)
        self._only_ends = trainer is not None and not self.begun and ends_restored_epoch(trainer)
        self.counted, self._opened = 0, self._steps
        if trainer is not None and trainer.fit_loop.restarting:
            current: Any = trainer.fit_loop.epoch_loop.batch_progress.current  # its type lacks attributes
            self.counted = int(current.processed)  # Lightning's count of done batches in the epoch
        if not self.steps:
            allowed = "one that can be read, of each source: all are quarantined"
            raise OptionError("train", f"{len(self.catalogue)} slices", allowed)
        if self.padded:
            rank_zero_info(
                f"slices: the samples of epoch {self.epoch} do not go round, so {self.padded} will be repeated, for "
                f"every rank to take {self.steps} steps."
            )

    def received(self, report: ReadReport) -> None:
        """Store corrupt slices."""
        self._corrupt.update(report.corrupt)

    def trained(self) -> None:
        """Count a step that every rank has taken.

        Raises:
            OptionError: If no more batches were drawn.
        """
        if not self._drawn:
            raise OptionError("steps", self._steps + 1, f"at most {self._steps}, as no more batches were drawn")
        unfinished = self._unfinished()
        if unfinished:
            self._before.append(self._pool.position)
        while len(self._before) > unfinished:
            self._before.popleft()
        self._pool.take(self._drawn.popleft())
        self._steps += 1

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch = epoch
        self.counted = 0
        self._left_out = dict(self._quarantined)
        self._start(None)

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

    def keep_alive(self) -> None:
        """Do nothing, as ranks have no lease."""

    def close(self) -> None:
        """Do nothing; the position stays."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in primitives; the same on every rank."""
        return {
            "together": {
                "version": _VERSION,
                "epoch": self.epoch,
                "position": msgspec.json.decode(msgspec.json.encode(self._position())),  # as lists
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
            TrackerStateError: If the state is damaged, of the middle of an epoch of other slices or another order, or
                of workers that do not step together. Nothing has changed then.
        """
        if state.keys() == {"epoch"}:
            return  # of a coordinator's run, whose position is the coordinator's
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
        before = (self.epoch, self._left_out)
        self.epoch, self._left_out = saved.epoch, saved.left_out
        try:
            self._start(saved.position)
        except OptionError as error:
            self.epoch, self._left_out = before
            raise TrackerStateError(f"The state of the slices is damaged: {error}") from error
        self._quarantined = saved.quarantined

    @property
    def _order(self) -> DataOrder:
        return self.catalogue.order(seed=self._seed, shuffle=self._shuffle)

    def _start(self, position: tuple[EpochPosition, ...] | None) -> None:
        """Set up what is left; nothing has changed if it raises."""
        self._pool = self._pool_of(self.epoch, self._left_out, position)
        self._is_restored = position is not None
        self._drawn = deque[tuple[int, ...]]()
        self._before = deque[tuple[EpochPosition, ...]]()  # where each batch of an unfinished step began
        self._steps = self._opened = 0
        self.left, ranks = self._pool.left, len(self._batch_sizes)
        self.steps = -(-self.left // self.batch_size)
        self.padded = 0 if self.is_shared else max(self.steps * ranks - self.left, 0)

    def _pool_of(
        self, epoch: int, left_out: Mapping[str, str], position: tuple[EpochPosition, ...] | None
    ) -> MixedPool:
        samples: npt.NDArray[np.int64] = self.catalogue.samples.copy()
        samples[[index for key in left_out if (index := self.catalogue.find(key)) is not None]] = 0
        order = slice_order(len(samples), seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        sources = range(len(self._mixture.shares))
        own = [np.where(self._mixture.source_of == source, samples, 0) for source in sources]
        places = [None for _ in sources] if position is None else position
        if len(places) != len(own):
            raise OptionError("position", len(places), f"of {len(own)} sources")
        pools = [EpochPool(order, one, len(self._batch_sizes), place) for one, place in zip(own, places, strict=True)]
        return MixedPool(self._mixture, pools, [int(one.sum()) for one in own])

    def _sizes_of(self, number: int, left: int) -> tuple[int, ...]:
        if self._shares_of is None:
            return step_sizes(left, self._batch_sizes)
        return tuple(self._shares_of(number, min(self.batch_size, left)))

    def _position(self) -> tuple[EpochPosition, ...] | None:
        unfinished = min(self._unfinished(), len(self._before))
        if self._steps == unfinished and not self._is_restored:
            return None
        return self._before[-unfinished] if unfinished else self._pool.position


class _SavedPosition(msgspec.Struct):
    """Types of a plan's saved state."""

    epoch: Annotated[int, msgspec.Meta(ge=0)]
    position: tuple[EpochPosition, ...] | None
    left_out: dict[str, str]
    quarantined: dict[str, str]
    order: DataOrder
    shares: tuple[int, ...]


def ends_restored_epoch(trainer: pl.Trainer) -> bool:
    """Whether Lightning still has to end an epoch without batches left, as after a validation at its end.

    An epoch that was saved right after its last batch is ended here; like in Lightning, without a validation.
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
