"""What plans of ranks that step together have in common: one epoch after the other, and a position to be saved.

Every rank calls the same methods with the same values, so that all agree without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Protocol

import msgspec

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.batches import SliceBatch
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_line import EpochLine, EpochPosition, Stage, samples_without
from lightning_bytescheduler.slices.tracker_state import read_state

__all__ = ["EpochPlan", "SharedEpoch"]

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
