"""Who reads weights or gradients between steps, or unseen, and so costs overlap or exactness; told once, by name."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType

from torch import nn

from lightning_bytescheduler.ddp.steps import StepListener
from lightning_bytescheduler.lightning_api import Logger, pl, rank_zero_info, rank_zero_warn

__all__ = ["ENOUGH", "EarlyReads", "SeenReads"]

log = logging.getLogger(__name__)

_NAMES_SHOWN = 3


def say_unseen(names: Sequence[str], step: int, *, certain: bool, rank: int) -> None:
    """Say loudly that weights were read where no gate sees it: a warning on rank 0, an error in the log elsewhere.

    Args:
        names: Of the parameters.
        step: In which it was found.
        certain: Whether they were the weights of the step before; else they may have been.
        rank: Of this process.
    """
    shown = ", ".join(map(repr, names[:_NAMES_SHOWN]))
    shown += f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    late = "had the weights of the step before" if certain else "may have had the weights of the step before"
    message = (
        f"bytescheduler: in step {step} {shown} {'was' if len(names) == 1 else 'were'} read by code that takes a "
        f"weight's memory past PyTorch's functions, for the first time after the first step: it {late}, and this "
        "training is not DDP's to the last bit. From here on their updates are waited for. To avoid it, hand such code "
        "weight.detach(), use it from the first step on, or train with cross_barrier=False."
    )
    if rank == 0:
        rank_zero_warn(message)
    else:
        log.error("rank %d: %s", rank, message)


ENOUGH = 20  # steps of which most were read early, before it is worth a line
_OWNERS = (pl.Callback, pl.LightningModule, Logger)


class SeenReads(StepListener):
    """Counts the steps whose updates or gradients were waited for between steps, and what else costs.

    Args:
        names: Of the parameters, by their ids.
        rank: Of this process.

    Attributes:
        steps: How many steps each reader waited in, by its name, for example ``MyCallback.on_train_batch_end``.
        whole_steps: How many steps were taken whole, by why.
        unseen: In which step each parameter was found to have been read past its gate, by its name.
    """

    def __init__(self, names: Mapping[int, str] | None = None, rank: int = 0) -> None:
        self._names = names or {}
        self._rank = rank
        self._told: set[str] = set()
        self.steps: Counter[str] = Counter()
        self.whole_steps: Counter[str] = Counter()
        self.unseen: dict[str, int] = {}

    def stepped_whole(self, why: str) -> None:
        """See :class:`StepListener`."""
        self.whole_steps[why] += 1
        if self.whole_steps[why] == ENOUGH:
            rank_zero_info(f"bytescheduler: {ENOUGH} steps were not deferred, because {why}.")

    def read_early(self, reader: str, since: int = 0) -> None:
        """A reader waited in one more step; told once it has in most of ``since`` steps."""
        self.steps[reader] += 1
        if reader not in self._told and self.steps[reader] >= ENOUGH and 2 * self.steps[reader] > since:
            self._told.add(reader)
            rank_zero_info(
                f"bytescheduler: {reader} looks at weights or gradients between steps, in {self.steps[reader]} steps "
                "so far. They are what DDP would show, but these steps wait for all gradients; looking less often "
                "keeps the overlap."
            )

    def read_unseen(self, parameters: list[nn.Parameter], step: int, certain: bool) -> None:
        """See :class:`StepListener`."""
        found = [self._names[id(p)] for p in parameters]
        self.unseen.update(dict.fromkeys(found, step))
        say_unseen(found, step, certain=certain, rank=self._rank)


class EarlyReads(SeenReads):
    """See :class:`SeenReads`: by callback, module or logger.

    Such reads are exact, but each costs the overlap of its step. Nothing has to be declared: a callback that reads
    nothing costs nothing, one that reads every hundred steps costs every hundredth step.

    Args:
        trainer: Reads while it validates, tests or predicts are none of ours.
        names: See :class:`SeenReads`.
        rank: See :class:`SeenReads`.
    """

    def __init__(self, trainer: pl.Trainer, names: Mapping[int, str] | None = None, rank: int = 0) -> None:
        super().__init__(names, rank)
        self._trainer = trainer
        self._first_step: dict[str, int] = {}

    def waited_early(self) -> None:
        """See :class:`StepListener`."""
        if not self._trainer.training:
            return
        step = self._trainer.global_step
        if reader := _reader(sys._getframe(1)):
            self.read_early(reader, step - self._first_step.setdefault(reader, step) + 1)


def _reader(frame: FrameType | None) -> str | None:
    """The innermost method of a callback, module or logger on the stack that is not Lightning's own plumbing."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, _OWNERS) and not frame.f_code.co_name.startswith("_"):
            return f"{type(owner).__name__}.{frame.f_code.co_name}"
        frame = frame.f_back
    return None
