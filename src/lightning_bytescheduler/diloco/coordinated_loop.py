"""Where Lightning's training loop and a coordinator's rounds meet: after each batch, when all of its hooks have run.

Nobody stands still for anybody here: an epoch, a validation and the end of a fit are each worker's own. The leader's
validations take place at the end of a round, when its weights are the global ones and nothing of it is under way, or at
the end of its epoch, with what it has trained sent before. The others validate nothing.

The ranks of one worker agree after each batch on what one of them would do, and what the first one knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_bytescheduler.diloco.coordinated_rounds import CoordinatedRounds
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.lightning_api import pl

__all__ = ["CoordinatedBoundaries"]


class CoordinatedBoundaries:
    """Takes the place of the epoch loop's decision to validate, from :meth:`attach` to :meth:`detach`.

    Args:
        trainer: Whose loop it is.
        session: This worker's.
        group: The ranks of this worker.
        leads: Whether this worker leads, to begin with.
        clock: Seconds; injected by tests.

    Attributes:
        leads: Whether it does, as its ranks have agreed after the last batch.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: CoordinatedRounds,
        *,
        group: WorkerGroup,
        leads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.leads = leads
        self._trainer = trainer
        self._session = session
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
        self._wants_validation = False
        self._validates = False
        self._ended = False  # for the ranks of this worker, which have agreed on it
        self._left = False
        self._aside = False

    def attach(self) -> None:
        """Begin to decide."""
        self._loop._should_check_val_fx = self._after_batch
        self._began = self._clock()
        if self._session.over:
            self._stop()

    def detach(self) -> None:
        """Leave the loop as it was."""
        self._loop.__dict__.pop("_should_check_val_fx", None)
        self._trainer.fit_loop.min_epochs, self._loop.min_steps = self._least

    def report_batch(self, *, samples: int, tokens: int, loss: float | None) -> None:
        """Take note of a batch, which is a step or, where gradients are accumulated, a part of one."""
        self._samples += samples
        self._tokens += tokens
        self._loss = loss

    def before_batch(self) -> bool:
        """Returns whether training goes on."""
        self._session.check()
        return not self._session.over

    def before_epoch(self) -> bool:
        """Returns whether all ranks of this worker train on; called by those that would."""
        self._ended = self._group.any(self._session.over)
        return not self._ended

    def before_epoch_end(self) -> None:
        """An epoch is this worker's own."""

    def after_validation(self) -> None:
        """Go back to the rounds; all ranks of this worker stop if one is to."""
        if not self._validates:
            return
        self._validates = False
        if self._group.any(self._trainer.should_stop):
            self._trainer.should_stop = True
        self._session.resume()
        if self._session.over:
            self._stop()
        self._began = self._clock()

    def wait_aside(self) -> bool:
        """There is nothing to train on here for now; returns whether training is over."""
        session = self._session
        session.check()
        if not self._aside:
            self._aside = True
            session.pause(shows=False)
        if session.is_over_elsewhere():
            self.come_back()
        return session.over

    def come_back(self) -> None:
        """There is something to train on again."""
        if self._aside:
            self._aside = False
            self._session.resume()
            if self._session.over:
                self._stop()
            self._began = self._clock()

    def before_end(self) -> None:
        """Training ends on this rank, and so on all ranks of its worker: leave, with the global weights."""
        if not self._ended:
            self._ended = self._group.any(True)
        self._leave(quickly=False)

    def _after_batch(self, data_fetcher: Any) -> bool:
        session, loop, trainer = self._session, self._loop, self._trainer
        stepped = trainer.global_step != self._global_step
        signal = bool(trainer.received_sigterm)
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        wants, epoch, stops, signal, self.leads = self._agree(
            stepped, self._own_decision(data_fetcher), loop._num_ready_batches_reached(), stops, signal, session.leads
        )
        if stops:
            trainer.should_stop = True
        if stepped:
            self._count_step()
        if signal:
            self._leave(quickly=True)
            trainer._signal_connector.received_sigterm = True  # on all ranks of the worker: Lightning ends each
            return False
        self._wants_validation = self.leads and (self._wants_validation or wants)
        version = session.version
        while not session.over and session.is_due():
            session.synchronise()
        at_end = epoch or stops or self._reaches_limit(epoch)
        if session.over:
            self._stop()
        validates = self._wants_validation and (session.version > version or at_end or session.over)
        if validates:
            self._wants_validation = False
            self._validates = True
            session.pause()
        if stepped:
            self._began = self._clock()
        return validates

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
        self._session.count(
            samples=self._samples, seconds=self._clock() - self._began, tokens=self._tokens, loss=self._loss
        )
        self._samples = self._tokens = 0

    def _reaches_limit(self, epoch: bool) -> bool:
        fit_loop = self._trainer.fit_loop
        if fit_loop.max_steps != -1 and self._trainer.global_step >= fit_loop.max_steps:
            return True
        last = fit_loop.max_epochs not in (None, -1) and self._trainer.current_epoch + 1 >= int(fit_loop.max_epochs)
        return epoch and last

    def _leave(self, *, quickly: bool) -> None:
        if not self._left:
            self._left = True
            self._session.leave(quickly=quickly)

    def _stop(self) -> None:
        """Leave the loops, also if this worker has not done what it was to do at least."""
        self._trainer.should_stop = True
        self._trainer.fit_loop.min_epochs = None
        self._loop.min_steps = None
