"""Keeps Lightning from telling other ranks about a SIGTERM with collectives, where several ranks form one worker.

Lightning has a rank that gets a SIGTERM join a broadcast of the default group from inside the signal handler, wherever
its training thread is, and all ranks join one before each batch. Within a worker that would meet the collectives of a
step in another order on each rank. Here the rank that got the signal ends by itself after its batch, and the fault
board tells all others, of other workers too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as pl

__all__ = ["own_sigterm"]

log = logging.getLogger(__name__)


@contextmanager
def own_sigterm(trainer: pl.Trainer) -> Iterator[None]:
    """Entered before Lightning registers its handlers. They and the loop find these functions in place of their own."""
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop

    def note(signum: int, frame: FrameType | None) -> None:
        log.info("[rank %d] Received SIGTERM", trainer.global_rank)
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note
    loop._broadcast_sigterm_tensor = lambda: None
    try:
        yield
    finally:
        vars(connector).pop("_sigterm_notifier_fn", None)
        vars(loop).pop("_broadcast_sigterm_tensor", None)
