"""Where an epoch stands, in a checkpoint, where the strategy draws the batches.

Batch b of an epoch is what lies from b times the batch size on in an order that follows from the seed. So the number of
batches that were trained on says which samples have been used, if batch size, order and samples are still the same;
how many ranks there are has no part in it. Lightning keeps that number. Here is what has to be the same beside it.

*In the middle of a step* that accumulates several batches, a checkpoint lacks the gradients of those that came before.
So a training goes on with the first batch of that step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.lightning_api import pl

POSITION = "lightning_bytescheduler.position"
"""Where a checkpoint has what an epoch's batches are drawn from."""

_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"  # Lightning, of any DataLoader


@dataclass(frozen=True, kw_only=True)
class EpochData:
    """What batches are drawn from.

    Attributes:
        batch_size: Of all ranks together.
        samples: Of an epoch.
        order: In words.
        ranks: That share a batch.
    """

    batch_size: int
    samples: int
    order: str
    ranks: int

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"batches of {self.batch_size} samples (on {ranks}), of {self.samples:,} {self.order}"


def unfinished_batches(trainer: pl.Trainer) -> int:
    """How many batches a fit is into a step that accumulates several."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return 0 if progress.is_last_batch else int(progress.current.processed % trainer.accumulate_grad_batches)


def note_position(checkpoint: dict[str, Any], data: EpochData | None, trainer: pl.Trainer) -> None:
    """Add to a checkpoint of a fit how many batches of a step it is behind, and what its epoch is drawn from.

    Args:
        checkpoint: To be saved.
        data: ``None`` if it has a position of its own.
        trainer: Of the fit.
    """
    noted = {} if data is None else asdict(data)
    checkpoint[POSITION] = {**noted, "batches_of_unfinished_step": unfinished_batches(trainer)}


def rewind_to_step(checkpoint: Mapping[str, Any]) -> None:
    """Have the training go on where the unfinished step begins whose gradients the checkpoint lacks."""
    left = checkpoint.get(POSITION, {}).get("batches_of_unfinished_step", 0)
    if left:
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            done = counts["processed"] - left
            counts.update(ready=done, started=done, processed=done, completed=done)


def is_amid_epoch(saved: Mapping[str, Any] | None, trainer: pl.Trainer) -> bool:
    """Whether a training goes on in the middle of an epoch whose batches were shared out of a DataLoader.

    Args:
        saved: What the checkpoint has of it.
        trainer: Has loaded the checkpoint's progress.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return saved is not None and "samples" in saved and progress.current.processed > 0 and not progress.is_last_batch


def require_same_epoch(saved: Mapping[str, Any] | None, data: EpochData, trainer: pl.Trainer) -> None:
    """Make sure that the epoch can go on.

    Args:
        saved: What the checkpoint has of it.
        data: Of this training.
        trainer: Has loaded the checkpoint's progress.

    Raises:
        OptionError: If the checkpoint is of the middle of an epoch that was drawn from other data, or in other batches.
    """
    if saved is None or not is_amid_epoch(saved, trainer):
        return
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    before = EpochData(**{name: saved[name] for name in asdict(data)})
    if (before.batch_size, before.samples, before.order) == (data.batch_size, data.samples, data.order):
        return
    raise OptionError(
        "batch_size",
        data.batch_size,
        "",
        says=f"The checkpoint is of the middle of an epoch, after {progress.current.processed} of its {before}. This "
        f"training has {data}: which samples are left cannot be told. Give the DataLoader the same data, the same "
        "seed, and batches of the same size: with batch_size='global' its batch_size counts for all ranks, however "
        "many there are. Or go on from the end of an epoch.",
    )


@contextmanager
def loader_resumes() -> Iterator[None]:
    """Lightning warns that a DataLoader begins anew in the middle of an epoch. Here it goes on."""
    warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]
