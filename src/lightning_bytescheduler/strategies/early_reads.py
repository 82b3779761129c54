"""Finds out who reads weights or gradients between steps, and so waits for what could have travelled on.

Also counts steps that are taken whole for a reason that was not there when the fit began.

Such reads are exact, but each costs the overlap of its step. Nothing has to be declared: a callback that reads nothing
costs nothing, one that reads every hundred steps costs every hundredth step.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_info

__all__ = ["EarlyReads"]

_ENOUGH = 20  # steps of which most were read early, before it is worth a line
_OWNERS = (pl.Callback, pl.LightningModule, Logger)


class EarlyReads:
    """Counts the steps whose updates or gradients were waited for between steps, by who did.

    Args:
        trainer: Reads while it validates, tests or predicts are none of ours.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._steps: Counter[str] = Counter()
        self._whole: Counter[str] = Counter()
        self._first_step: dict[str, int] = {}
        self._told: set[str] = set()

    @property
    def steps(self) -> dict[str, int]:
        """How many steps each reader waited in, by its name, for example ``MyCallback.on_train_batch_end``."""
        return dict(self._steps)

    @property
    def whole_steps(self) -> dict[str, int]:
        """How many steps were taken whole, by why."""
        return dict(self._whole)

    def note_whole_step(self, why: str) -> None:
        """A step that could overlap is taken whole."""
        self._whole[why] += 1
        if self._whole[why] == _ENOUGH:
            rank_zero_info(f"bytescheduler: {_ENOUGH} steps were not deferred, because {why}.")

    def note(self) -> None:
        """Somebody further up this thread's stack waits; called at most once per step."""
        if not self._trainer.training:
            return
        reader = _reader(sys._getframe(1))
        if reader is None:
            return
        step = self._trainer.global_step
        self._steps[reader] += 1
        since = step - self._first_step.setdefault(reader, step) + 1
        if reader not in self._told and self._steps[reader] >= _ENOUGH and 2 * self._steps[reader] > since:
            self._told.add(reader)
            rank_zero_info(
                f"bytescheduler: {reader} looks at weights or gradients between steps, in {self._steps[reader]} of the "
                f"last {since}. They are what DDP would show, but these steps wait for all gradients; looking less "
                "often keeps the overlap."
            )


def _reader(frame: FrameType | None) -> str | None:
    """The innermost method of a callback, module or logger on the stack that is not Lightning's own plumbing."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, _OWNERS) and not frame.f_code.co_name.startswith("_"):
            return f"{type(owner).__name__}.{frame.f_code.co_name}"
        frame = frame.f_back
    return None
