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
from lightning_bytescheduler.diloco.loop_boundaries import LoopBoundaries
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.lightning_api import pl

__all__ = ["CoordinatedBoundaries"]


class CoordinatedBoundaries(LoopBoundaries):
    """Validates at the end of a round, on the leader alone; each worker's epochs and end are its own.

    Args:
        trainer: Whose loop it is.
        session: This worker's.
        group: The ranks of this worker.
        leads: Whether this worker leads, to begin with.
        clock: Seconds; injected by tests.

    Attributes:
        leads: Whether it does, as its ranks have agreed after the last batch.
        ends_all: Whether its end is to be that of all workers, as its ``EarlyStopping`` has stopped it.
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
        super().__init__(trainer, session, group=group, clock=clock)
        self.leads = leads
        self.ends_all = False
        self._session = session
        self._wants_validation = False
        self._validates = False
        self._left = False
        self._aside = False

    def attach(self) -> None:
        """Begin to decide."""
        super().attach()
        if self._session.over:
            self._stop()

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
        """There is nothing to train on here for now; returns whether training is over. All ranks of the worker ask."""
        session = self._session
        session.check()
        if not self._aside:
            self._aside = True
            session.pause(shows=False)
        if self._group.any(session.is_over_elsewhere()):
            self.come_back()
        return session.over

    def come_back(self) -> None:
        """There is something to train on again, for all ranks of the worker."""
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

    def _leave(self, *, quickly: bool) -> None:
        if not self._left:
            self._left = True
            self._session.leave(quickly=quickly, for_all=self.ends_all and self.leads)
