"""The batches of ranks that step together, as in ``ddp`` and ``bytescheduler``, and where an epoch of them stands.

Every rank gets one stretch of the epoch's order, so it reads mostly whole slices, and all take the same number of
steps. What is trained on after some steps is therefore not one stretch from the epoch's beginning; it is described by
*stages*: with which batch sizes how many steps were taken. From the stages of an epoch, any other ranks work out what
is left, and share that, without a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.batches import SampleRun, SliceBatch, cut_batches
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import (
    EpochLine,
    EpochPlan,
    EpochPosition,
    Stage,
    Stretch,
    samples_without,
)
from lightning_bytescheduler.slices.options import Shortage, require_shortage

__all__ = ["LockStepEpoch", "LockStepPlan", "LockStepShares"]


class LockStepPlan(EpochPlan):
    """A ``BatchPlan`` for ranks that take the same number of steps, each with batches of its own size.

    Args:
        catalogue: The slices.
        batch_sizes: Of each rank, in samples.
        rank: This one.
        seed: Of the order of slices.
        shuffle: False keeps the catalogue's order in every epoch.
        shortage: ``"pad"`` or ``"drop"``, see :class:`LockStepEpoch`.
        repeats: Whether an epoch follows each, whose first slices are named ahead at the end.

    Raises:
        OptionError: If an option is not allowed.
    """

    def __init__(
        self,
        catalogue: SliceCatalogue,
        *,
        batch_sizes: Sequence[int],
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        shortage: Shortage = "pad",
        repeats: bool = True,
    ) -> None:
        super().__init__(catalogue, seed=seed, shuffle=shuffle)
        self._batch_sizes = tuple(batch_sizes)
        if not is_whole(rank) or rank >= max(len(self._batch_sizes), 1):
            raise OptionError("rank", rank, f"from 0 to {len(self._batch_sizes) - 1}, one for each batch size")
        self._rank = rank
        self._shortage, self._repeats = shortage, repeats
        self._rest: tuple[Stretch, ...] | None = None  # before the stages, unless it is all
        self._start(EpochPosition())

    @property
    def shares(self) -> LockStepEpoch:
        """See ``EpochPlan``."""
        return self._shares

    @property
    def position(self) -> EpochPosition:
        """See ``EpochPlan``."""
        return EpochPosition(rest=self._rest, stages=self._shares.after(self._steps))

    def __iter__(self) -> Iterator[SliceBatch]:
        shares, first = self._shares, self._steps
        sizes = (shares.batch(self._rank, step) for step in range(first, shares.steps))
        runs = shares.runs(self._rank, first_step=first)
        if self._repeats:
            runs = itertools.chain(runs, self._next_epoch())
        return cut_batches(self.epoch, runs, sizes)

    def _next_epoch(self) -> Iterator[SampleRun]:
        yield from self._shared(self.epoch + 1, self._quarantined, EpochPosition()).runs(self._rank)

    def _start(self, position: EpochPosition) -> None:
        """See ``EpochPlan``; the last stage is continued if it was of these ranks."""
        stages = position.stages
        last = stages[-1] if stages else None
        continues = last is not None and (last.batch_sizes, last.shortage) == (self._batch_sizes, self._shortage)
        before = replace(position, stages=stages[:-1] if continues else stages)
        shares = self._shared(self.epoch, self._left_out, before)
        steps = last.steps if continues and last is not None else 0
        shares.after(steps)  # raises if there are not so many
        self._shares, self._steps, self._opened = shares, steps, steps
        self._rest = None if position.rest is None else tuple(before.left(shares.line))

    def _shared(self, epoch: int, left_out: Mapping[str, str], position: EpochPosition) -> LockStepEpoch:
        return LockStepEpoch(
            samples=samples_without(self.catalogue, left_out),
            batch_sizes=self._batch_sizes,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
            shortage=self._shortage,
            position=position,
        )


class LockStepEpoch:
    """What is left of an epoch, shared over ranks so that all take the same number of steps.

    Args:
        samples: Samples of each slice; 0 leaves a slice out.
        batch_sizes: Of each rank, in samples; shares are in proportion to them.
        seed: Of the order of slices.
        epoch: Which epoch.
        shuffle: False keeps the catalogue's order.
        shortage: ``"pad"`` or ``"drop"``, where there is not one sample for each rank in every step.
        stages: How the part of the epoch that is trained on was trained on, from :meth:`after`.
        position: In place of ``stages``.

    Attributes:
        line: The epoch.
        steps: Of every rank: the length of its loader.
        left: Samples of the epoch that were not trained on before.
        padded: Samples that are trained on twice, fewer than there are ranks.
        dropped: Samples that are left out, fewer than there are ranks.

    Raises:
        OptionError: If an option is not allowed, or a stage has more steps than it can have had.
    """

    def __init__(
        self,
        *,
        samples: npt.NDArray[np.int64],
        batch_sizes: Sequence[int],
        seed: int,
        epoch: int,
        shuffle: bool = True,
        shortage: str = "pad",
        stages: Sequence[Stage] = (),
        position: EpochPosition | None = None,
    ) -> None:
        self.line = EpochLine(samples, seed=seed, epoch=epoch, shuffle=shuffle)
        position = EpochPosition(stages=tuple(stages)) if position is None else position
        self._stretches = position.left(self.line)  # what is left, in order
        for stage in position.stages:
            self._share(stage.batch_sizes, stage.shortage)
            if not is_whole(stage.steps) or stage.steps > self.steps:
                raise OptionError("steps", stage.steps, f"from 0 to {self.steps}, the steps of that stage")
            self._stretches = self._left_after(stage.steps)
        self._share(batch_sizes, shortage)
        self._shortage = shortage
        self._stages = position.stages

    @property
    def stretches(self) -> list[Stretch]:
        """What is left, in order."""
        return list(self._stretches)

    def _share(self, batch_sizes: Sequence[int], shortage: str) -> None:
        if not len(batch_sizes) or not all(is_whole(size, 1) for size in batch_sizes):
            raise OptionError("batch_sizes", batch_sizes, "a whole number for each rank, 1 or more")
        require_shortage(shortage)
        self.left = sum(stop - start for start, stop in self._stretches)
        self._shares = LockStepShares.of(self.left, batch_sizes, shortage=shortage)
        self.steps, self.padded, self.dropped = self._shares.steps, self._shares.padded, self._shares.dropped

    def share(self, rank: int) -> int:
        """Samples of a rank in all of its steps."""
        return self._shares.samples[rank]

    def batch(self, rank: int, step: int) -> int:
        """Samples of a rank in a step, counted from 0."""
        return self._shares.batch(rank, step)

    def runs(self, rank: int, *, first_step: int = 0) -> Iterator[SampleRun]:
        """What a rank trains on, in order, from a step on.

        The last ranks' last sample is padding, if there is any: from the beginning of what is left.
        """
        offset, stop = self._own(rank)
        for low, high in self._on_line(offset + self._shares.samples_until(rank, first_step), stop):
            yield from self.line.runs(low, high)
        if self._is_padded(rank) and first_step < self.steps:
            place = (rank - (len(self._shares.samples) - self.padded)) % self.left
            for low, high in self._on_line(place, place + 1):
                yield from self.line.runs(low, high)

    def _is_padded(self, rank: int) -> bool:
        """Whether a rank's last sample is one that another has, or had.

        Padding is in the last step only: where an epoch is left before it, nothing was trained on twice.
        """
        return rank >= len(self._shares.samples) - self.padded

    def _own(self, rank: int) -> tuple[int, int]:
        """Where a rank's own samples begin and end, counting what is left from 0."""
        offset = sum(share - self._is_padded(earlier) for earlier, share in enumerate(self._shares.samples[:rank]))
        return offset, offset + self._shares.samples[rank] - self._is_padded(rank)

    def after(self, steps: int) -> tuple[Stage, ...]:
        """The stages of the epoch, once every rank has taken so many steps of this one.

        Raises:
            OptionError: If there are not so many steps.
        """
        if not is_whole(steps) or steps > self.steps:
            raise OptionError("steps", steps, f"from 0 to {self.steps}, the steps there are")
        if not steps:
            return self._stages
        return (*self._stages, Stage(batch_sizes=self._shares.batch_sizes, steps=steps, shortage=self._shortage))

    def _left_after(self, steps: int) -> list[tuple[int, int]]:
        """Stretches of the line that nobody trained on in the first steps, nor is to be dropped at the end."""
        left: list[tuple[int, int]] = []
        stop = 0
        for rank in range(len(self._shares.samples)):
            offset, stop = self._own(rank)
            left += self._on_line(offset + self._shares.samples_until(rank, steps), stop)
        # Dropped samples are a matter of these ranks: others may have a step for them.
        return left + self._on_line(stop, self.left)

    def _on_line(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Places of what is left, as stretches of the line through the epoch."""
        found = []
        before = 0
        for low, high in self._stretches:
            first, last = max(start - before, 0), min(stop - before, high - low)
            if first < last:
                found.append((low + first, low + last))
            before += high - low
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LockStepShares:
    """Shares of ranks that step together.

    Attributes:
        batch_sizes: Of each rank, in samples.
        steps: Of every rank.
        samples: Of each rank: in every step at least one, at most its batch size.
        padded: Samples that are trained on twice so that each rank has one in every step.
        dropped: Samples left out for the same reason.
    """

    batch_sizes: tuple[int, ...]
    steps: int
    samples: tuple[int, ...]
    padded: int
    dropped: int

    @classmethod
    def of(cls, samples: int, batch_sizes: Sequence[int], *, shortage: str) -> LockStepShares:
        """Share samples out, in proportion to the batch sizes.

        All steps but the last are full where that leaves each rank a sample in the last; otherwise the steps before it
        give some up. Only where even one sample a step is too much to ask (as with fewer samples than ranks), samples
        are padded or dropped, fewer than there are ranks.

        Args:
            samples: To share.
            batch_sizes: Of each rank, 1 or more.
            shortage: ``"pad"`` or ``"drop"``.
        """
        ranks, together = len(batch_sizes), sum(batch_sizes)
        steps = -(-samples // together)
        padded = dropped = 0
        if samples < steps * ranks:
            if shortage == "pad":
                padded = steps * ranks - samples
            else:
                # As many samples as the last step has are fewer than ranks here: see _apportion.
                steps -= 1
                dropped = samples - steps * together
        given = samples + padded - dropped
        shares = _apportion(given, batch_sizes, steps)
        return cls(batch_sizes=tuple(batch_sizes), steps=steps, samples=shares, padded=padded, dropped=dropped)

    def samples_until(self, rank: int, step: int) -> int:
        """Samples of a rank in its first ``step`` steps."""
        return min(step * self.batch_sizes[rank], self.samples[rank] - (self.steps - step))

    def batch(self, rank: int, step: int) -> int:
        """Samples of a rank in a step, counted from 0."""
        return self.samples_until(rank, step + 1) - self.samples_until(rank, step)


def _apportion(samples: int, batch_sizes: Sequence[int], steps: int) -> tuple[int, ...]:
    """Shares of ``samples``, from ``steps`` to ``steps * batch size`` each."""
    if not steps:
        return tuple(0 for _ in batch_sizes)
    full = (steps - 1) * sum(batch_sizes)
    last = samples - full
    if last >= len(batch_sizes):
        # One for each rank in the last step, and what else there is by batch size, rounded down.
        spare, room = last - len(batch_sizes), sum(batch_sizes) - len(batch_sizes)
        tails = [1 + (spare * (size - 1) // room if room else 0) for size in batch_sizes]
        missing = last - sum(tails)
        for rank in sorted(range(len(tails)), key=lambda rank: (tails[rank] - batch_sizes[rank], rank)):
            if not missing:
                break
            if tails[rank] < batch_sizes[rank]:
                tails[rank] += 1
                missing -= 1
        return tuple((steps - 1) * size + tail for size, tail in zip(batch_sizes, tails, strict=True))
    # One for each rank in the last step; the full steps before it give up what that takes, the largest batches first.
    shares = [(steps - 1) * size + 1 for size in batch_sizes]
    excess = sum(shares) - samples
    while excess:
        for rank in sorted(range(len(shares)), key=lambda rank: (-batch_sizes[rank], rank)):
            if excess and shares[rank] > steps:
                shares[rank] -= 1
                excess -= 1
    return tuple(shares)
