"""The place of the epoch loop's decision to validate, where rounds are looked after: what all kinds of rounds share.

Lightning asks its epoch loop after each batch, when all of its hooks have run. Whoever takes that place counts steps
from batches, agrees with the other ranks of its worker on what one of them would do, and ends the loops.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.rank_session import RankSession
from lightning_bytescheduler.lightning_api import pl

__all__ = ["LoopBoundaries"]


class LoopBoundaries(ABC):
    """Takes the place of the epoch loop's decision to validate, from :meth:`attach` to :meth:`detach`.

    Args:
        trainer: Whose loop it is.
        session: This rank's.
        group: The ranks of this worker.
        clock: Seconds; injected by tests.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: RankSession,
        *,
        group: WorkerGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._counts = session
        self._group = group
        self._clock = clock
        self._loop: Any = trainer.fit_loop.epoch_loop  # its decision is not a public method
        self._own_decision: Callable[..., bool] = self._loop._should_check_val_fx
        self._least: tuple[Any, Any] = (trainer.fit_loop.min_epochs, self._loop.min_steps)
        self._began = clock()
        self._global_step = trainer.global_step
        self._samples = 0
        self._tokens = 0
        self._loss: float | None = None
        self._ended = False  # for the ranks of this worker, which have agreed on it

    def attach(self) -> None:
        """Begin to decide."""
        self._loop._should_check_val_fx = self._after_batch
        self._began = self._clock()

    def detach(self) -> None:
        """Leave the loop as it was."""
        self._loop.__dict__.pop("_should_check_val_fx", None)
        self._trainer.fit_loop.min_epochs, self._loop.min_steps = self._least

    def report_batch(self, *, samples: int, tokens: int, loss: float | None) -> None:
        """Take note of a batch, which is a step or, where gradients are accumulated, a part of one."""
        self._samples += samples
        self._tokens += tokens
        self._loss = loss

    @abstractmethod
    def _after_batch(self, data_fetcher: Any) -> bool:
        """A batch has been trained on, and all hooks have run; returns whether to validate."""

    def _agree(self, stepped: bool, *facts: bool) -> tuple[bool, ...]:
        """What is so on any rank of this worker; with a step, its samples are taken together too."""
        loss = self._loss
        own = [self._samples, self._tokens, 0 if loss is None else self._samples, (loss or 0.0) * self._samples]
        numbers = self._group.total([*map(float, facts), *(own if stepped else ())])
        if stepped:
            samples, tokens, measured, losses = numbers[len(facts) :]
            self._samples, self._tokens = round(samples), round(tokens)
            self._loss = losses / measured if measured else None
        return tuple(number > 0 for number in numbers[: len(facts)])

    def _count_step(self) -> None:
        self._global_step = self._trainer.global_step
        self._counts.count(
            samples=self._samples, seconds=self._clock() - self._began, tokens=self._tokens, loss=self._loss
        )
        self._samples = self._tokens = 0

    def _reaches_limit(self, epoch: bool) -> bool:
        fit_loop = self._trainer.fit_loop
        if fit_loop.max_steps != -1 and self._trainer.global_step >= fit_loop.max_steps:
            return True
        last = fit_loop.max_epochs not in (None, -1) and self._trainer.current_epoch + 1 >= int(fit_loop.max_epochs)
        return epoch and last

    def _stop(self) -> None:
        """Leave the loops, also if this worker has not done what it was to do at least."""
        self._trainer.should_stop = True
        self._trainer.fit_loop.min_epochs = None
        self._loop.min_steps = None
