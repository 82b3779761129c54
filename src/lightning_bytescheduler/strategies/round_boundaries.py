"""Where Lightning's training loop and the rounds of DiLoCo meet: after each batch, when all of its hooks have run.

Lightning asks its epoch loop there whether to validate. The answer is given here instead: an update is sent if it is
due, and a validation, the end of an epoch or of the training happen at the end of a round, at the same one on all
workers. What each worker would do by itself is only what it asks the others for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import lightning.pytorch as pl

from lightning_bytescheduler.outer_loop.worker_session import WorkerSession

__all__ = ["RoundBoundaries"]


class RoundBoundaries:
    """Takes the place of the epoch loop's decision to validate, from :meth:`attach` to :meth:`detach`.

    Args:
        trainer: Whose loop it is.
        session: This worker's.
        first_worker: Whether this is worker 0, whose steps say when to validate within an epoch.
        together: What holds while all workers validate together.
        clock: Seconds; injected by tests.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: WorkerSession,
        *,
        first_worker: bool,
        together: Callable[[], AbstractContextManager[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._first_worker = first_worker
        self._together = together
        self._open = ExitStack()
        self._clock = clock
        self._loop: Any = trainer.fit_loop.epoch_loop  # its decision is not a public method
        self._own_decision: Callable[..., bool] = self._loop._should_check_val_fx
        self._least: tuple[Any, Any] = (trainer.fit_loop.min_epochs, self._loop.min_steps)
        self._began = clock()
        self._global_step = trainer.global_step
        self._samples = 0
        self._tokens = 0
        self._loss: float | None = None
        self._epoch_to_end = False  # this worker's share is used up, and the others do not know yet

    def attach(self) -> None:
        """Begin to decide."""
        self._loop._should_check_val_fx = self._after_batch
        self._began = self._clock()

    def detach(self) -> None:
        """Leave the loop as it was."""
        self._open.close()
        self._loop.__dict__.pop("_should_check_val_fx", None)
        self._trainer.fit_loop.min_epochs, self._loop.min_steps = self._least

    def note_batch(self, *, samples: int, tokens: int, loss: float | None) -> None:
        """Take note of a batch, which is a step or, where gradients are accumulated, a part of one."""
        self._samples += samples
        self._tokens += tokens
        self._loss = loss

    def before_batch(self) -> bool:
        """Go on after all workers stood still; returns whether training goes on."""
        self._session.check()
        if not self._session.halted:
            return True
        self._open.close()
        goes_on = self._session.pass_on()
        self._began = self._clock()
        if not goes_on:
            self._stop()
        return goes_on

    def before_epoch_end(self) -> None:
        """See to it that the epoch ends for all.

        With overlap, the round that this worker's last batch fell into may have ended for another reason.
        """
        session, trainer = self._session, self._trainer
        if not self._epoch_to_end or session.over:
            return
        self._epoch_to_end = False
        self._open.close()
        if not session.pass_on():
            self._stop()
            return
        session.end_round_for_all(epoch=True)
        if self._halt(own_epoch_ends=True):
            trainer.validating = True
            self._loop.val_loop.run()
            trainer.training = True

    def _after_batch(self, data_fetcher: Any) -> bool:
        session, loop, trainer = self._session, self._loop, self._trainer
        wants_validation = self._own_decision(data_fetcher)
        stepped = trainer.global_step != self._global_step
        if stepped:
            self._count_step()
        epoch = loop._num_ready_batches_reached()
        stop = self._wants_to_stop(epoch)
        if epoch or stop:
            session.end_round_for_all(epoch=epoch, validate=wants_validation, stop=stop)
            self._epoch_to_end = epoch and session.boundary is not None and not session.boundary.epoch
        else:
            if wants_validation and self._first_worker:
                session.ask(validate=True)
            if stepped and session.due and not session.halted:
                session.end_round()
        if stepped:
            self._began = self._clock()
        return session.halted and self._halt(epoch)

    def _count_step(self) -> None:
        self._global_step = self._trainer.global_step
        self._session.count(
            samples=self._samples, seconds=self._clock() - self._began, tokens=self._tokens, loss=self._loss
        )
        self._samples = self._tokens = 0

    def _wants_to_stop(self, epoch: bool) -> bool:
        fit_loop = self._trainer.fit_loop
        if fit_loop.max_steps != -1 and self._trainer.global_step >= fit_loop.max_steps:
            return True
        if self._trainer.should_stop and fit_loop._can_stop_early:
            return True
        last = fit_loop.max_epochs not in (None, -1) and self._trainer.current_epoch + 1 >= int(fit_loop.max_epochs)
        return epoch and last

    def _halt(self, own_epoch_ends: bool) -> bool:
        """All workers stand still: do here what the end of this round is for. Returns whether to validate."""
        boundary = self._session.boundary
        if boundary is None:
            return False
        if boundary.epoch and not own_epoch_ends:
            # Another worker has gone through its share of the data: the epoch ends here as if this batch were the last.
            self._loop.batch_progress.is_last_batch = True
            self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if boundary.stop:
            self._stop()
        if boundary.validate:
            self._open.enter_context(self._together())
        return boundary.validate

    def _stop(self) -> None:
        """Leave the loops, also if this worker has not done what it was to do at least."""
        self._trainer.should_stop = True
        self._trainer.fit_loop.min_epochs = None
        self._loop.min_steps = None
