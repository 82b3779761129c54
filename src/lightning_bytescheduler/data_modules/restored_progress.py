"""What Lightning's loops have counted when a fit is resumed, where the number of steps may be another one now.

Lightning takes a loader to have the same length before and after. A loader here has what Lightning counts as done and
what is left; with other batch sizes or ranks that is another number, which two moments cannot cope with: an epoch whose
last batch was trained on, and whose end is still to come.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

__all__ = ["counted_batches", "ends_restored_epoch"]


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
