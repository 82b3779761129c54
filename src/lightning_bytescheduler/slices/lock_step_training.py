"""Training data of ranks that step together, and of a single process.

What Lightning's loops have counted when a fit is resumed, where the number of steps may be another one now.

Lightning takes a loader to have the same length before and after. A loader here has what Lightning counts as done and
what is left; with other batch sizes or ranks that is another number, which two moments cannot cope with: an epoch whose
last batch was trained on, and whose end is still to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.batch_reader import ReadNote
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.plans import LockStepPlan

__all__ = ["LockStepTraining", "counted_batches", "ends_restored_epoch", "require_same_slices"]


def counted_batches(trainer: pl.Trainer) -> int:
    """Batches of the epoch that Lightning counts as done when it goes on in the middle of one."""
    loop = trainer.fit_loop
    current: Any = loop.epoch_loop.batch_progress.current  # typed as less than it is
    return int(current.processed) if loop.restarting else 0


def ends_restored_epoch(trainer: pl.Trainer) -> bool:
    """Whether Lightning still has to end an epoch that has no batches left, as after a validation at its end.

    An epoch that was saved after its last batch, before all else, is ended here; like Lightning, without a validation.
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
    # By itself, a loop with max_steps never takes an epoch to be complete.
    loop._restarting = loop.epoch_loop.restarting = False
    return False


class LockStepTraining:
    """``TrainingSlices`` that every rank works out for itself: all get the same number of steps, without a message.

    Args:
        plan: The batches of this rank.

    Attributes:
        plan: As given.
    """

    fills = True

    def __init__(self, plan: LockStepPlan) -> None:
        self.plan = plan
        self._corrupt: dict[str, str] = {}
        self._only_ends = False

    @property
    def epoch(self) -> int:
        """See ``TrainingSlices``."""
        return self.plan.epoch

    @property
    def batches(self) -> int:
        """Steps of the loader that was opened, those included that Lightning counts as done."""
        return self.plan.counted if self._only_ends else len(self.plan)

    def open(self, trainer: pl.Trainer | None) -> None:
        """Say what is padded or dropped.

        Raises:
            OptionError: If there is not a single step.
        """
        plan = self.plan
        if plan.over and plan.begun:  # these ranks have no step for what was left to others
            plan.end_epoch()
        plan.counted = 0
        self._only_ends = False
        if trainer is not None:
            self._only_ends = not plan.begun and ends_restored_epoch(trainer)
            plan.counted = counted_batches(trainer)
        shares = plan.shares
        if not shares.steps:
            raise OptionError(
                "train", f"{shares.left} samples", "a sample for each rank: check what is quarantined, or use 'pad'"
            )
        if shares.padded or shares.dropped:
            what = f"{shares.padded} will be repeated" if shares.padded else f"{shares.dropped} will be left out"
            rank_zero_info(
                f"slices: the samples of epoch {plan.epoch} do not go round, so {what}, for every rank to take "
                f"{shares.steps} steps."
            )

    def note(self, note: ReadNote) -> None:
        """Remember slices that are corrupt."""
        self._corrupt.update(note.corrupt)

    def trained(self) -> None:
        """Count a step."""
        self.plan.trained()

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """Go to the next epoch, without the slices that any rank found to be corrupt."""
        self.plan.quarantine(self._agreed(trainer))
        self._corrupt = {}
        self.plan.end_epoch()

    def keep_alive(self) -> None:
        """Nobody waits for this."""

    def close(self) -> None:
        """The position stays."""

    def state_dict(self) -> dict[str, Any]:
        """The plan's, the same at every rank."""
        return {"together": self.plan.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved.

        Raises:
            TrackerStateError: If it was saved by workers that do not step together, or does not fit.
        """
        if "together" not in state:
            raise TrackerStateError(
                "The state of the slices was saved by workers that did not step together. Resume with the strategy "
                "that it was saved with, or load only the weights."
            )
        self.plan.load_state_dict(state["together"])

    def _agreed(self, trainer: pl.Trainer) -> dict[str, str]:
        """The slices that any rank has found to be corrupt: every rank has to leave out the same."""
        found = self._corrupt
        if trainer.world_size == 1 or not trainer.strategy.reduce_boolean_decision(bool(found), all=False):
            return found
        catalogue = self.plan.catalogue
        marks = torch.zeros(len(catalogue), dtype=torch.int32, device=trainer.strategy.root_device)
        for key in found:
            index = catalogue.find(key)
            if index is not None:
                marks[index] = 1
        marked = trainer.strategy.reduce(marks, reduce_op="sum").cpu()
        keys = [catalogue.key(int(index)) for index in marked.nonzero().flatten()]
        return {key: found.get(key, "Another rank found it to be corrupt.") for key in keys}


def require_same_slices(trainer: pl.Trainer, catalogue: SliceCatalogue) -> None:
    """Compare the slices of all ranks; called by all of them.

    Raises:
        OptionError: At every rank, if one sees others than rank 0.
    """
    if trainer.world_size == 1:
        return
    here = asdict(catalogue.fingerprint)
    there = trainer.strategy.broadcast(here)
    if not trainer.strategy.reduce_boolean_decision(here == there, all=True):
        raise OptionError(
            "train",
            f"{here['slices']} slices, {here['samples']} samples",
            f"the same slices on every rank: rank 0 has {there['slices']} with {there['samples']} samples, and some "
            "rank has others, or the same under other names",
        )
