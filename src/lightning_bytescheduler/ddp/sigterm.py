"""Handles SIGTERM in a fit, in place of Lightning's handling, which is a collective on the training thread.

As each batch begins, Lightning broadcasts whether rank 0 has got a SIGTERM. A rank that gets one calls the broadcast at
once, and no other rank joins. If that is not rank 0, it waits forever, and all others wait for it.

Where ranks train together the broadcast of each batch remains. So no rank hands over gradients of a batch that rank 0
has not begun, and a late rank can be named. But it is asynchronous: it runs during the loading and the forward pass,
and is awaited before the backward pass. It has its own group, of gloo: after a failure a rank may have begun more
batches than another, and its receives must not match other broadcasts. Rank 0 learns of signals to other ranks from the
store (``failures/board.py``). What its broadcast says in one batch holds for all ranks from the next batch on.

In an evaluation ranks may have unequally many batches, and do not broadcast. Within a fit a SIGTERM counts from the
next batch of training on. In a run without training the rank that gets it ends before its next batch, and so do the
others, with an error that names it.

After SLURM's signal before a job's time limit all ranks save after the same step, and the job is requeued. Lightning
saves in the signal handler: at any instruction of a step or a collective, at a different one on each rank. Saving needs
the same collectives on all ranks, so they could wait for each other forever or save half a step. Here the handler only
asks for it. At the end of the step in which rank 0's broadcast tells it, all do Lightning's work: save the checkpoint
for the requeued job, and run ``scontrol requeue``. Training goes on until SLURM ends it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import leave
from lightning_bytescheduler.collectives.operations import broadcast_from_first, ends_within, wait_unless
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.standstill import BATCH, break_connections, waiting
from lightning_bytescheduler.lightning_api import SIGTERMException, SLURMEnvironment, TrainerFn, pl
from lightning_bytescheduler.scheduler.threads import short_turns

log = logging.getLogger(__name__)

_HANDLER = "_slurm_sigusr_handler_fn"  # attribute of Lightning's signal connector
_OBSERVER = "child-process-observer"  # thread of Lightning's launcher
_BEGUN_S = 1.0  # seconds for messages in flight
_LOOK_EVERY = timedelta(seconds=0.5)


def requeues(environment: object) -> bool:
    """Whether a signal of SLURM saves and requeues the job."""
    return isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)


class RequeueForAll(pl.Callback):
    """Saves and requeues at the end of a step, once a signal has reached any rank.

    Args:
        ranks: Tells all ranks; ``None`` for a rank that trains by itself.
    """

    def __init__(self, ranks: SigtermForAll | None) -> None:
        self._ranks = ranks
        self._asked = False
        self._requeue: Callable[[], object] = lambda: None
        self._done = False

    @contextmanager
    def handled(self, trainer: pl.Trainer) -> Iterator[None]:
        """Install the handler during a run; enter this before Lightning registers its own handlers."""
        connector: Any = trainer._signal_connector
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        requeue = getattr(connector, _HANDLER)

        def handle(signum: int, frame: FrameType | None) -> None:
            log.info("[rank %d] got signal %d: saves, and requeues the job", trainer.global_rank, signum)
            self.ask()

        environment: Any = trainer._accelerator_connector.cluster_environment
        self._requeue = lambda: requeue(environment.requeue_signal, None)
        setattr(connector, _HANDLER, handle)
        callbacks.append(self)  # after callbacks whose state is saved
        try:
            yield
        finally:
            vars(connector).pop(_HANDLER, None)
            if self in callbacks:
                callbacks.remove(self)

    def ask(self) -> None:
        """Request saving and requeueing; safe in a signal handler."""
        self._asked = True
        if self._ranks is not None:
            self._ranks.requeue.ask()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and requeue once, if it is due and a step has ended."""
        due = self._asked if self._ranks is None else self._ranks.requeues
        if due and not self._done and not trainer.fit_loop._should_accumulate():
            self._done = True
            self._requeue()


def worker_signals(trainer: pl.Trainer, environment: object, *, together: bool) -> AbstractContextManager[None]:
    """Return a context that handles signals for a worker that trains by itself."""
    if together:
        return own_sigterm(trainer)
    if not requeues(environment):
        return nullcontext()
    return RequeueForAll(None).handled(trainer)


@contextmanager
def own_sigterm(
    trainer: pl.Trainer,
    *,
    received: Callable[[], None] | None = None,
    begins_batch: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Handle SIGTERM on this rank without a collective.

    Enter this before Lightning registers its handlers; they and the loop then use these functions.

    Args:
        trainer: The Trainer of the fit.
        received: Called by the handler; if left out, Lightning ends this rank.
        begins_batch: Called where Lightning would use a collective.
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    note = received or partial(setattr, connector, "received_sigterm", True)

    def handle(signum: int, frame: FrameType | None) -> None:
        log.info("[rank %d] Received SIGTERM", trainer.global_rank)
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        note()

    connector._sigterm_notifier_fn = handle
    loop._broadcast_sigterm_tensor = begins_batch
    try:
        yield
    finally:
        vars(connector).pop("_sigterm_notifier_fn", None)
        vars(loop).pop("_broadcast_sigterm_tensor", None)


def ends_by_sigterm(exception: SIGTERMException, rank: int) -> None:
    """End this process with the exit code of an unhandled SIGTERM, and log it; Lightning would report success."""
    exception.code = 128 + signal.SIGTERM
    log.warning("[rank %d] A SIGTERM, to this rank or another one, ends training: exit code %d", rank, exception.code)
    for thread in threading.enumerate():
        # it kills this process, which may be saving, once another one has ended with this code
        if thread.name == _OBSERVER:
            vars(thread)["_child_processes"] = []


class SigtermForAll:
    """After a SIGTERM to any rank, ends all ranks before the same batch of training; also passes on SLURM's signal.

    Attributes:
        agreed: Whether all ranks end here, and know it.
        requeue: Asks all ranks to save and requeue.
        requeues: Whether they do so at the end of this batch's step.
    """

    def __init__(self, trainer: pl.Trainer, board: FaultBoard) -> None:
        self._trainer = trainer
        self._strategy: Any = trainer.strategy
        self._board = board
        self._stop, self.requeue = board.request("stop"), board.request("requeue")
        self.agreed = self.requeues = False
        self._group: dist.ProcessGroup | None = None  # for these broadcasts only
        self._begun: dist.Work | None = None  # completes when rank 0 has begun this batch, too
        self._told = torch.zeros(2, dtype=torch.float32, device="cpu")  # by rank 0: whether to stop, and to requeue

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle SIGTERM during a run; all ranks enter this.

        A signal that comes too late to end the run is passed on to Lightning.
        """
        if self._trainer.state.fn == TrainerFn.FITTING:
            with short_turns():  # for gloo's threads
                self._group = dist.new_group(timeout=timedelta(seconds=self._strategy._longest_wait_s), backend="gloo")
        try:
            with own_sigterm(self._trainer, received=self._stop.ask, begins_batch=self._begin_batch):
                yield
        finally:
            self.call_off()
            if self._stop.asked:
                self._received()

    def _received(self) -> None:
        connector: Any = self._trainer._signal_connector
        connector.received_sigterm = True

    def _begin_batch(self) -> None:
        self.await_batch_begun()  # the last batch may have had no backward pass
        stops, self.requeues = map(bool, self._told.tolist())
        if stops:
            self._strategy.flush()
            self.end_training()
        self._strategy.count_batch()
        if self._group is not None:
            if self._stop.known or self.requeue.known:
                self._told.copy_(torch.tensor([self._stop.known, self.requeue.known]))
            self._begun = broadcast_from_first(self._group, self._told)

    def await_batch_begun(self) -> None:
        """Wait until rank 0 has begun this batch, too.

        Raises:
            BaseException: The reason if it never will.
        """
        if self._begun is not None:
            with self._strategy._explained(), waiting(BATCH):
                wait_unless(self._begun, lambda: self._board.fault, look_every=_LOOK_EVERY)
            self._begun = None

    def call_off(self) -> None:
        """At the end of a run, cancel a wait for a batch that rank 0 does not have. Idempotent."""
        begun, self._begun = self._begun, None
        group, self._group = self._group, None
        if group is None:
            return
        idle = ends_within(begun, _BEGUN_S)
        if not idle:
            break_connections(group)  # gloo cannot cancel, and would wait when the interpreter ends
        leave(group, idle=idle)

    def end_training(self) -> None:
        """End here, after the last step or earlier, if any rank has got a SIGTERM; all ranks call this.

        Raises:
            SIGTERMException: If so.
        """
        self.await_batch_begun()  # the last batch may have had no backward pass
        if self._strategy.reduce_boolean_decision(self._stop.asked, all=False):
            self.agreed = True
            self._received()
            raise SIGTERMException

    def begin_evaluated_batch(self) -> None:
        """End here if another rank has failed, or without training if this one has got a SIGTERM.

        Raises:
            SIGTERMException: If so.
            RankFailedError: Names the other rank.
        """
        if self._stop.asked and self._group is None:  # in a fit all end together, before the next batch of training
            self._received()
            raise SIGTERMException
        if self._board.fault is not None:
            raise self._board.fault
