"""What plans of ranks that step together have in common: one epoch after the other, and a position to be saved.

Every rank calls the same methods with the same values, so that all agree without a message.

An epoch's samples as a line, and where a training stands on it.

The line goes through all slices in the epoch's order, from 0 to the number of samples. What is left of an epoch is
stretches of it, (start, stop) each, which do not depend on who trains on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.batches import SampleRun, SliceBatch
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.shuffle import slice_order
from lightning_bytescheduler.slices.tracker_state import read_state

__all__ = ["EpochLine", "EpochPlan", "EpochPosition", "SharedEpoch", "Stage", "Stretch", "joined", "samples_without"]

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


_VERSION = 1
_VERSION_WITH_REST = 2  # what was left is written down, and not only how it came to that


class SharedEpoch(Protocol):
    """How what was left of an epoch is shared."""

    @property
    def steps(self) -> int:
        """Of every rank."""

    @property
    def left(self) -> int:
        """Samples that were not trained on before."""

    @property
    def padded(self) -> int:
        """Samples that are trained on twice."""

    @property
    def dropped(self) -> int:
        """Samples that are left out."""


class EpochPlan:
    """A ``BatchPlan`` for ranks that take the same number of steps.

    Args:
        catalogue: The slices.
        seed: Of the order of slices.
        shuffle: False keeps the catalogue's order in every epoch.

    Attributes:
        catalogue: As given.
        epoch: The running epoch, from 0.
        counted: Steps that the training loop counts before those that are left, as it was restored in mid-epoch.
    """

    def __init__(self, catalogue: SliceCatalogue, *, seed: int, shuffle: bool) -> None:
        self.catalogue = catalogue
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 0
        self.counted = 0
        self._steps = 0  # that were taken of what is shared at present
        self._opened = 0  # of these, when the loader was made
        self._left_out: dict[str, str] = {}  # of this epoch
        self._quarantined: dict[str, str] = {}

    # ------------------------------------------------------------------ of each kind

    @property
    def shares(self) -> SharedEpoch:
        """How what is left of the epoch was shared when it began, or was resumed."""
        raise NotImplementedError

    @property
    def position(self) -> EpochPosition:
        """What was trained on."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[SliceBatch]:
        raise NotImplementedError

    def _start(self, position: EpochPosition) -> None:
        """Share what is left, and set ``_steps``; nothing has changed if it raises."""
        raise NotImplementedError

    def _take_step(self) -> None:
        """A step was taken."""

    # ------------------------------------------------------------------ of all

    @property
    def quarantined(self) -> dict[str, str]:
        """Reason by key of the slices that are left out from the next epoch on."""
        return dict(self._quarantined)

    @property
    def over(self) -> bool:
        """Whether nothing of the epoch is left to these ranks."""
        return self._steps >= self.shares.steps

    @property
    def begun(self) -> bool:
        """Whether a step of the epoch was taken."""
        return bool(self._steps) or self.position.begun

    def __len__(self) -> int:
        return self.counted + self.shares.steps - self._steps

    def open(self, counted: int) -> None:
        """A loader is made of what is left.

        Args:
            counted: Steps that the training loop counts before those that are left.
        """
        self.counted, self._opened = counted, self._steps

    def trained(self) -> None:
        """Count a step that every rank has taken.

        Raises:
            OptionError: If the epoch has no more of them.
        """
        if self.over:
            raise OptionError("steps", self._steps + 1, f"at most {self.shares.steps}, the steps of the epoch")
        self._take_step()
        self._steps += 1

    def end_epoch(self) -> None:
        """Go to the next epoch; what is left of this one is not trained on."""
        self.start_epoch(self.epoch + 1)

    def start_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.

        Raises:
            OptionError: If it is no number of an epoch.
        """
        self.epoch = require_whole("epoch", epoch, 0)
        self.counted = self._opened = 0
        self._left_out = dict(self._quarantined)
        self._start(EpochPosition())

    def quarantine(self, slices: Mapping[str, str]) -> None:
        """Leave slices out from the next epoch on; this one goes on with the steps that all ranks know of.

        Args:
            slices: Reason by key.
        """
        self._quarantined.update(slices)

    def _line(self, epoch: int, left_out: Mapping[str, str]) -> EpochLine:
        samples = samples_without(self.catalogue, left_out)
        return EpochLine(samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)

    def state_dict(self) -> dict[str, Any]:
        """The position, of primitives; the same on every rank."""
        fingerprint, position = self.catalogue.fingerprint, self.position
        state: dict[str, Any] = {
            "version": _VERSION,
            "epoch": self.epoch,
            "stages": [
                {"batch_sizes": list(stage.batch_sizes), "steps": stage.steps, "shortage": stage.shortage}
                for stage in position.stages
            ],
            "left_out": dict(self._left_out),
            "quarantined": dict(self._quarantined),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "slices": fingerprint.slices,
            "samples": fingerprint.samples,
            "blocks": list(fingerprint.blocks),
        }
        if position.rest is not None:
            state["version"] = _VERSION_WITH_REST
            state["rest"] = [list(stretch) for stretch in position.rest]
            state["held"] = [[list(stretch) for stretch in own] for own in position.held]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved, with as many ranks and with the batch sizes that there are now.

        Between epochs, data and seed may have changed.

        Raises:
            TrackerStateError: If the state is damaged, or of the middle of an epoch of other slices or another order.
                Nothing changed then.
        """
        has_rest = isinstance(state, Mapping) and state.get("version") == _VERSION_WITH_REST
        version = _VERSION_WITH_REST if has_rest else _VERSION
        saved = read_state(state, _SavedPosition, version=version, what="The state of the slices")
        position = EpochPosition(rest=saved.rest, held=saved.held, stages=saved.stages)
        if position.begun:
            self._require_same_order(saved)
        before = (self.epoch, self._left_out)
        self.epoch, self._left_out = saved.epoch, saved.left_out
        try:
            self._start(position)
        except OptionError as error:
            self.epoch, self._left_out = before
            raise TrackerStateError(f"The state of the slices is damaged: {error}") from error
        self._quarantined = saved.quarantined

    def _require_same_order(self, saved: _SavedPosition) -> None:
        here = self.catalogue.fingerprint
        now = {
            "slices": here.slices,
            "samples": here.samples,
            "blocks": here.blocks,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }
        for name, value in now.items():
            there = getattr(saved, name)
            if there != value:
                what = (
                    "the slices' keys or sample counts" if name == "blocks" else f"{name} was {there}, is {value} now"
                )
                raise TrackerStateError(
                    f"The state was saved in the middle of an epoch of other data or another order ({what}): "
                    "resume with what it was saved with, or from the end of an epoch."
                )


class _SavedPosition(msgspec.Struct):
    """A plan's saved state: the types that are required of it."""

    epoch: Annotated[int, msgspec.Meta(ge=0)]
    stages: tuple[Stage, ...]
    left_out: dict[str, str]
    quarantined: dict[str, str]
    seed: int
    shuffle: bool
    slices: int
    samples: int
    blocks: tuple[str, ...]
    rest: tuple[tuple[int, int], ...] | None = None
    held: tuple[tuple[tuple[int, int], ...], ...] = ()
