"""SLURM's signal before a job's time is up: all ranks save after the same step, and the job is queued again.

Lightning saves in the signal's handler: at whatever instruction the rank is, in the middle of a step or of a
collective, and each rank somewhere else. Saving asks all ranks for the same collectives, so that they may wait for
each other for good, or save half a step. Here the handler only takes note. The ranks agree on a batch
(``failures/agreed_stop.py``), and at the end of the step that it belongs to all do what Lightning does: save the
checkpoint for the requeued job, and have ``scontrol`` requeue it. Training goes on until SLURM ends it.

Why all save after the same step: they agree on the batch, and which batch ends a step is the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from lightning_bytescheduler.ddp.sigterm import own_sigterm
from lightning_bytescheduler.failures.agreed_stop import AgreedStop
from lightning_bytescheduler.lightning_api import SLURMEnvironment, pl

__all__ = ["OwnStop", "RequeueForAll", "requeues", "worker_signals"]

log = logging.getLogger(__name__)

_HANDLER = "_slurm_sigusr_handler_fn"  # of Lightning's signal connector


def requeues(environment: object) -> bool:
    """Whether a signal of SLURM is to save and requeue the job."""
    return isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)


class OwnStop:
    """The agreement of a rank that trains alone."""

    def __init__(self) -> None:
        self._asked = False

    def ask(self) -> None:
        """See AgreedStop."""
        self._asked = True

    def begin_batch(self, failure: Callable[[], BaseException | None], timeout: float) -> bool:
        """See AgreedStop."""
        return self._asked


class RequeueForAll(pl.Callback):
    """Saves and requeues at the end of a step, once a signal has asked any rank to.

    Args:
        stop: The ranks' agreement on a batch; of its own, as training goes on after it.
        failure: Why the others will not answer, if they will not.
        timeout: Longest wait for them, in seconds.
    """

    def __init__(
        self, stop: AgreedStop | OwnStop, *, failure: Callable[[], BaseException | None], timeout: float
    ) -> None:
        self._stop = stop
        self._failure = failure
        self._timeout = timeout
        self._requeue: Callable[[], object] = lambda: None
        self._due = False
        self._done = False

    @contextmanager
    def handled(self, trainer: pl.Trainer) -> Iterator[None]:
        """While a run lasts; entered before Lightning registers its handlers, which finds this one in their place."""
        connector: Any = trainer._signal_connector
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        requeue = getattr(connector, _HANDLER)

        def handle(signum: int, frame: FrameType | None) -> None:
            log.info("[rank %d] has got signal %d: the job is saved and requeued", trainer.global_rank, signum)
            self._stop.ask()

        environment: Any = trainer._accelerator_connector.cluster_environment
        self._requeue = lambda: requeue(environment.requeue_signal, None)
        setattr(connector, _HANDLER, handle)
        callbacks.append(self)  # behind those whose state is saved
        try:
            yield
        finally:
            vars(connector).pop(_HANDLER, None)
            if self in callbacks:
                callbacks.remove(self)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        """Find out whether this is the batch that the ranks have agreed on, or lies behind it."""
        if not self._due:
            self._due = self._stop.begin_batch(self._failure, self._timeout)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and requeue, once, if it is time and a step has ended."""
        if self._due and not self._done and not trainer.fit_loop._should_accumulate():
            self._done = True
            self._requeue()


def worker_signals(trainer: pl.Trainer, environment: object, *, together: bool) -> AbstractContextManager[None]:
    """Signals for a worker that is a training of its own.

    Args:
        trainer: Whose fit it is.
        environment: The cluster's.
        together: Whether several ranks are that worker.
    """
    if together:
        return own_sigterm(trainer)
    if not requeues(environment):
        return nullcontext()
    return RequeueForAll(OwnStop(), failure=lambda: None, timeout=0.0).handled(trainer)
