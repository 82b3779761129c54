"""The batches of ranks that step together, and where an epoch of them stands.

Which batches a rank trains on: cut from runs of samples, with the slices that come after each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.batch_reader import SliceBatch
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.lock_step import LockStepEpoch, SampleRun, Stage

__all__ = ["SLICES_AHEAD", "BatchPlan", "LockStepPlan", "cut_batches"]

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


_VERSION = 1


class LockStepPlan:
    """A ``BatchPlan`` for ranks that take the same number of steps: one epoch after the other.

    Every rank calls the same methods with the same values, so that all agree without a message.

    Args:
        catalogue: The slices.
        batch_sizes: Of each rank, in samples.
        rank: This one.
        seed: Of the order of slices.
        shuffle: False keeps the catalogue's order in every epoch.
        shortage: ``"pad"`` or ``"drop"``, see :class:`LockStepEpoch`.
        repeats: Whether an epoch follows each, whose first slices are named ahead at the end.

    Attributes:
        epoch: The running epoch, from 0.
        counted: Steps that the training loop counts before those that are left, as it was restored in mid-epoch.

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
        shortage: str = "pad",
        repeats: bool = True,
    ) -> None:
        self.catalogue = catalogue
        self._batch_sizes = tuple(batch_sizes)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < max(len(self._batch_sizes), 1):
            raise OptionError("rank", rank, f"from 0 to {len(self._batch_sizes) - 1}, one for each batch size")
        self._rank = rank
        self._seed, self._shuffle, self._shortage, self._repeats = seed, shuffle, shortage, repeats
        self.epoch = 0
        self.counted = 0
        self._stages: tuple[Stage, ...] = ()
        self._steps = 0
        self._left_out: dict[str, str] = {}  # of this epoch
        self._quarantined: dict[str, str] = {}
        self._start(())

    @property
    def shares(self) -> LockStepEpoch:
        """How what is left of the epoch was shared when it began, or was resumed."""
        return self._shares

    @property
    def quarantined(self) -> dict[str, str]:
        """Reason by key of the slices that are left out from the next epoch on."""
        return dict(self._quarantined)

    @property
    def over(self) -> bool:
        """Whether nothing of the epoch is left to these ranks."""
        return self._steps >= self._shares.steps

    @property
    def begun(self) -> bool:
        """Whether a step of the epoch was taken."""
        return bool(self._steps or self._stages)

    def __len__(self) -> int:
        return self.counted + self._shares.steps - self._steps

    def __iter__(self) -> Iterator[SliceBatch]:
        shares, first = self._shares, self._steps
        sizes = (shares.batch(self._rank, step) for step in range(first, shares.steps))
        runs = shares.runs(self._rank, first_step=first)
        if self._repeats:
            runs = itertools.chain(runs, self._next_epoch())
        return cut_batches(self.epoch, runs, sizes)

    def _next_epoch(self) -> Iterator[SampleRun]:
        yield from self._shared(self.epoch + 1, self._quarantined, ()).runs(self._rank)

    def trained(self) -> None:
        """Count a step that every rank has taken.

        Raises:
            OptionError: If the epoch has no more of them.
        """
        if self.over:
            raise OptionError("steps", self._steps + 1, f"at most {self._shares.steps}, the steps of the epoch")
        self._steps += 1

    def end_epoch(self) -> None:
        """Go to the next epoch; what is left of this one is not trained on."""
        self.start_epoch(self.epoch + 1)

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        Raises:
            OptionError: If it is no number of an epoch.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise OptionError("epoch", epoch, "a whole number, 0 or more")
        self.epoch = epoch
        self.counted = 0
        self._left_out = dict(self._quarantined)
        self._start(())

    def quarantine(self, slices: Mapping[str, str]) -> None:
        """Leave slices out from the next epoch on; this one goes on with the steps that all ranks know of.

        Args:
            slices: Reason by key.
        """
        self._quarantined.update(slices)

    def state_dict(self) -> dict[str, Any]:
        """The position, of primitives; the same on every rank."""
        fingerprint = self.catalogue.fingerprint
        stages = self._shares.after(self._steps)
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "stages": [
                {"batch_sizes": list(stage.batch_sizes), "steps": stage.steps, "shortage": stage.shortage}
                for stage in stages
            ],
            "left_out": dict(self._left_out),
            "quarantined": dict(self._quarantined),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "slices": fingerprint.slices,
            "samples": fingerprint.samples,
            "blocks": list(fingerprint.blocks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved, with as many ranks and with the batch sizes that there are now.

        Between epochs, data and seed may have changed.

        Raises:
            TrackerStateError: If the state is damaged, or of the middle of an epoch of other slices or another order.
                Nothing changed then.
        """
        try:
            if state["version"] != _VERSION:
                raise TrackerStateError(
                    f"The state of the slices is of version {state['version']}, and this release reads version "
                    f"{_VERSION}: resume with the release that saved it."
                )
            stages = tuple(
                Stage(batch_sizes=tuple(saved["batch_sizes"]), steps=saved["steps"], shortage=saved["shortage"])
                for saved in state["stages"]
            )
            epoch = int(state["epoch"])
            left_out, quarantined = dict(state["left_out"]), dict(state["quarantined"])
            if stages:
                self._require_same_order(state)
        except (KeyError, TypeError, AttributeError) as error:
            raise TrackerStateError(f"The state of the slices is damaged: {type(error).__name__}: {error}.") from error
        before = (self.epoch, self._left_out)
        self.epoch, self._left_out = epoch, left_out
        try:
            self._start(stages)
        except OptionError as error:
            self.epoch, self._left_out = before
            raise TrackerStateError(f"The state of the slices is damaged: {error}") from error
        self._quarantined = quarantined

    def _start(self, stages: tuple[Stage, ...]) -> None:
        """Share what is left after some stages; the last one is continued if it was of these ranks."""
        last = stages[-1] if stages else None
        continues = last is not None and (last.batch_sizes, last.shortage) == (self._batch_sizes, self._shortage)
        shares = self._shared(self.epoch, self._left_out, stages[:-1] if continues else stages)
        steps = last.steps if continues and last is not None else 0
        shares.after(steps)  # raises if there are not so many
        self._shares, self._stages, self._steps = shares, stages, steps

    def _shared(self, epoch: int, left_out: Mapping[str, str], stages: Sequence[Stage]) -> LockStepEpoch:
        return LockStepEpoch(
            samples=self._samples_without(left_out),
            batch_sizes=self._batch_sizes,
            seed=self._seed,
            epoch=epoch,
            shuffle=self._shuffle,
            shortage=self._shortage,
            stages=stages,
        )

    def _samples_without(self, keys: Mapping[str, str]) -> npt.NDArray[np.int64]:
        samples: npt.NDArray[np.int64] = self.catalogue.samples.copy()
        for key in keys:
            index = self.catalogue.find(key)
            if index is not None:
                samples[index] = 0
        return samples

    def _require_same_order(self, state: Mapping[str, Any]) -> None:
        here = self.catalogue.fingerprint
        now = (here.slices, here.samples, list(here.blocks), self._seed, self._shuffle)
        saved = tuple(state[name] for name in ("slices", "samples", "blocks", "seed", "shuffle"))
        for name, there, value in zip(("slices", "samples", "blocks", "seed", "shuffle"), saved, now, strict=True):
            if there != value:
                what = (
                    "the slices' keys or sample counts" if name == "blocks" else f"{name} was {there}, is {value} now"
                )
                raise TrackerStateError(
                    f"The state was saved in the middle of an epoch of other data or another order ({what}): "
                    "resume with what it was saved with, or from the end of an epoch."
                )
