"""What a data module of slices knows of its training data, whichever way it is handed out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import lightning.pytorch as pl

from lightning_bytescheduler.data.batch_plan import BatchPlan
from lightning_bytescheduler.data.batch_reader import ReadNote

__all__ = ["TrainingSlices"]


class TrainingSlices(Protocol):
    """Training data in mid-epoch."""

    @property
    def plan(self) -> BatchPlan:
        """The batches of this rank or worker."""

    @property
    def epoch(self) -> int:
        """The epoch of the data, from 0, which is not Lightning's where that was stopped and resumed."""

    @property
    def fills(self) -> bool:
        """Whether other samples are repeated in the place of those that cannot be read."""

    @property
    def batches(self) -> int | None:
        """Length of a loader, if it is known."""

    def open(self, trainer: pl.Trainer | None) -> None:
        """A loader is about to be made, after a checkpoint was loaded."""

    def note(self, note: ReadNote) -> None:
        """A reader has answered for the next batch."""

    def trained(self) -> None:
        """The next batch has been trained on."""

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """Lightning's epoch has had its last batch, of all ranks."""

    def keep_alive(self) -> None:
        """Something takes time in which nothing is trained."""

    def close(self) -> None:
        """The training is over."""

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint: plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved."""
