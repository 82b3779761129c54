"""What a SIGTERM does in a fit, in place of Lightning's answer to it, which is a collective of the training thread.

Lightning broadcasts from the first rank, as each batch begins, whether that has got a SIGTERM; and a rank that gets one
broadcasts at once, which no other rank joins: one that is not the first waits for good, and all others for it.

The broadcast before each batch stays where ranks train together. It waits for half a round trip, but keeps a rank from
beginning a batch that another one does not have, or fails before: so who is behind is named, and a checkpoint on
exception has every update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_bytescheduler.failures.agreed_stop import AgreedStop
from lightning_bytescheduler.lightning_api import SIGTERMException, pl

__all__ = ["SigtermForAll", "own_sigterm"]

log = logging.getLogger(__name__)

_BEGINS_BATCH = "_broadcast_sigterm_tensor"  # of the epoch loop; older versions of Lightning have none
_ALL_STOP_S = 20.0  # schedulers kill after 30 s


@contextmanager
def own_sigterm(
    trainer: pl.Trainer,
    *,
    received: Callable[[], None] | None = None,
    begins_batch: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Have this rank take a SIGTERM without a collective.

    Entered before Lightning registers its handlers. They and the loop find these functions in place of their own.

    Args:
        trainer: Whose fit it is.
        received: Called by the handler; Lightning is told to end this rank where it is left out.
        begins_batch: Called where Lightning, where it does, would find out whether to end with a collective.
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop

    def handle(signum: int, frame: FrameType | None) -> None:
        log.info("[rank %d] Received SIGTERM", trainer.global_rank)
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        if received is None:
            connector.received_sigterm = True
        else:
            received()

    connector._sigterm_notifier_fn = handle
    loop._broadcast_sigterm_tensor = begins_batch
    try:
        yield
    finally:
        vars(connector).pop("_sigterm_notifier_fn", None)
        vars(loop).pop(_BEGINS_BATCH, None)


class SigtermForAll:
    """A SIGTERM for any rank ends all, before the same batch of a training, or of a validation within it or without.

    Args:
        trainer: Whose run it is.
        stop: The ranks' agreement.
        land: Takes what is still due of the last step, which others may not have computed yet.
        agree: Says whether any rank says so, when all ask.
        failure: Why the others will not answer, if they will not.
        timeout: Longest wait for them, in seconds.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        stop: AgreedStop,
        *,
        land: Callable[[], object],
        agree: Callable[[bool], bool],
        failure: Callable[[], BaseException | None],
        timeout: float,
    ) -> None:
        self._trainer = trainer
        self._stop = stop
        self._land = land
        self._agree = agree
        self._failure = failure
        self._timeout = timeout
        self._told_by_loop = hasattr(trainer.fit_loop.epoch_loop, _BEGINS_BATCH)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """While a run lasts. What came too late to end it is left where Lightning leaves it, for who asks."""
        together = getattr(self._trainer.fit_loop.epoch_loop, _BEGINS_BATCH, lambda: None)

        def begins_batch() -> None:
            self.begin_batch()
            together()

        try:
            with own_sigterm(self._trainer, received=self._stop.ask, begins_batch=begins_batch):
                yield
        finally:
            if self._stop.asked:
                self._received()

    def _received(self) -> None:
        connector: Any = self._trainer._signal_connector
        connector.received_sigterm = True

    def begin_training_batch(self) -> None:
        """For the callback's hook: where Lightning's loop does not say it before."""
        if not self._told_by_loop:
            self.begin_batch()

    def end_training(self) -> None:
        """All ranks have taken the last step: end here if any has got a SIGTERM.

        Raises:
            SIGTERMException: If so.
        """
        if self._agree(self._stop.asked):
            self._received()
            raise SIGTERMException

    def begin_batch(self, *, trains: bool = True) -> None:
        """End here if all ranks do.

        Args:
            trains: Whether what follows is a batch to train on.

        Raises:
            SIGTERMException: If so.
        """
        if not self._stop.begin_batch(self._failure, self._timeout, trains=trains):
            return
        # A rank that is slower may still be in its last batch: who ends now would take its gradients away, and its own
        # last step would lack those of that rank.
        self._land()
        if not self._stop.await_stopped(self._failure, min(self._timeout, _ALL_STOP_S)):
            log.warning("[rank %d] ends by a SIGTERM, and not all others have come as far", self._trainer.global_rank)
        self._received()
        raise SIGTERMException
