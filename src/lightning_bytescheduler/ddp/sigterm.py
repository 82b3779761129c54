"""What a SIGTERM does in a fit, in place of Lightning's answer to it, which is a collective of the training thread.

Lightning broadcasts from the first rank, as each batch begins, whether that has got a SIGTERM; and a rank that gets one
broadcasts at once, which no other rank joins: one that is not the first waits for good, and all others for it.

The broadcast of each batch stays where ranks train together, as it keeps a rank from handing over gradients of a batch
that another one does not have: so who is behind is named. But it travels while the batch is loaded and goes forward,
and is waited for before the backward pass. It has a group of its own: after a failure a rank may have begun more
batches than another, and what it still expects must not meet what is broadcast next. Between GPUs it is Lightning's.

SLURM's signal before a job's time is up: all ranks save after the same step, and the job is queued again.

Lightning saves in the signal's handler: at whatever instruction the rank is, in the middle of a step or of a
collective, and each rank somewhere else. Saving asks all ranks for the same collectives, so that they may wait for
each other for good, or save half a step. Here the handler only takes note. The ranks agree on a batch
(``failures/agreed_stop.py``), and at the end of the step that it belongs to all do what Lightning does: save the
checkpoint for the requeued job, and have ``scontrol`` requeue it. Training goes on until SLURM ends it.

Why all save after the same step: they agree on the batch, and which batch ends a step is the same on all ranks.
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
from lightning_bytescheduler.failures.agreed_stop import AgreedStop
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.standstill import break_connections, waiting_for_a_batch
from lightning_bytescheduler.lightning_api import ClusterEnvironment, SIGTERMException, SLURMEnvironment, TrainerFn, pl
from lightning_bytescheduler.scheduler.short_turns import short_turns

log = logging.getLogger(__name__)

_HANDLER = "_slurm_sigusr_handler_fn"  # of Lightning's signal connector
_OBSERVER = "child-process-observer"  # of Lightning's launcher
_ALL_STOP_S = 20.0  # schedulers kill after 30 s
_BEGUN_S = 1.0  # for what is on its way
_LOOK_EVERY = timedelta(seconds=0.5)


def requeues(environment: object) -> bool:
    """Whether a signal of SLURM is to save and requeue the job."""
    return isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)


class RequeueForAll(pl.Callback):
    """Saves and requeues at the end of a step, once a signal has asked any rank to.

    Args:
        stop: The ranks' agreement on a batch; of its own, as training goes on after it. ``None`` on a rank alone.
        failure: Why the others will not answer, if they will not.
        timeout: Longest wait for them, in seconds.
    """

    def __init__(
        self, stop: AgreedStop | None, *, failure: Callable[[], BaseException | None] = lambda: None, timeout: float = 0
    ) -> None:
        self._stop = stop
        self._failure = failure
        self._timeout = timeout
        self._asked = False
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
            self.ask()

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

    def ask(self) -> None:
        """Save and requeue, soon; for a signal's handler."""
        self._asked = True
        if self._stop is not None:
            self._stop.ask()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, idx: int) -> None:
        """Find out whether this is the batch that the ranks have agreed on, or lies behind it."""
        if not self._due:
            self._due = self._asked if self._stop is None else self._stop.begin_batch(self._failure, self._timeout)

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
    return RequeueForAll(None).handled(trainer)


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
        begins_batch: Called where Lightning would find out with a collective whether to end.
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


@contextmanager
def sigterm_ends_at_once(environment: ClusterEnvironment | None) -> Iterator[None]:
    """While ranks connect to each other, a SIGTERM ends this one as it would end a process without a handler.

    Nothing is lost yet. A handler would not be run while the thread stands in gloo's code, waiting for a rank that has
    got the signal, too: torchrun's agents, which end all ranks when a machine joins, wait 30 s before they kill.

    Args:
        environment: Of the cluster; processes that Lightning has started are its affair.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)  # None: not of Python, which could not put it back
    if environment is None or not environment.creates_processes_externally or not main or before is None:
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def ends_by_sigterm(exception: SIGTERMException, rank: int) -> None:
    """Have this process end as one without a handler would, and say so: Lightning's exception means success.

    Args:
        exception: That ends it.
        rank: This one.
    """
    exception.code = 128 + signal.SIGTERM
    log.warning("[rank %d] A SIGTERM, to this rank or another one, ends training: exit code %d", rank, exception.code)
    for thread in threading.enumerate():
        if thread.name == _OBSERVER:  # would kill this process, which may be saving, when another one has ended so
            vars(thread)["_child_processes"] = []


class SigtermForAll:
    """A SIGTERM for any rank ends all, before the same batch of a training, or of a validation within it or without.

    Args:
        trainer: Whose run it is.
        board: Of its ranks.
    """

    def __init__(self, trainer: pl.Trainer, board: FaultBoard) -> None:
        self._trainer = trainer
        self._strategy: Any = trainer.strategy
        self._board = board
        self._stop = board.agree_on_stop()
        self._group: dist.ProcessGroup | None = None  # for that alone
        self._begun: dist.Work | None = None  # the first rank has begun this batch, too

    @contextmanager
    def handled(self) -> Iterator[None]:
        """While a run lasts. What came too late to end it is left where Lightning leaves it, for who asks.

        Entered by all ranks.
        """
        if self._trainer.state.fn == TrainerFn.FITTING and self._strategy.root_device.type == "cpu":
            with short_turns():  # for gloo's own threads
                self._group = dist.new_group(timeout=timedelta(seconds=self._strategy._longest_wait_s), backend="gloo")
        together = self._trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor

        def begins_batch() -> None:
            self.begin_batch()
            if self._group is None:
                with waiting_for_a_batch(outside=False):
                    together()
                return
            self.await_batch_begun()  # of a batch without a backward pass
            self._begun = broadcast_from_first(self._group, torch.zeros(1, dtype=torch.float32, device="cpu"))

        try:
            with own_sigterm(self._trainer, received=self._stop.ask, begins_batch=begins_batch):
                yield
        finally:
            self.call_off()
            if self._stop.asked:
                self._received()

    def _received(self) -> None:
        connector: Any = self._trainer._signal_connector
        connector.received_sigterm = True

    def await_batch_begun(self) -> None:
        """Wait until the first rank has begun this batch, too.

        Raises:
            BaseException: Why, if it never will.
        """
        if self._begun is not None:
            with self._strategy._explained(), waiting_for_a_batch(outside=True):
                wait_unless(self._begun, lambda: self._board.fault, look_every=_LOOK_EVERY)
            self._begun = None

    def call_off(self) -> None:
        """The run is over: nobody goes on waiting for a batch that the first rank lacks. Idempotent."""
        begun, self._begun = self._begun, None
        group, self._group = self._group, None
        if group is None:
            return
        idle = ends_within(begun, _BEGUN_S)
        if not idle:
            break_connections(group)  # gloo has no other way, and would wait at the interpreter's end
        leave(group, idle=idle)

    def end_training(self) -> None:
        """All ranks have taken the last step: end here if any has got a SIGTERM.

        Raises:
            SIGTERMException: If so.
        """
        self.await_batch_begun()  # of a last batch without a backward pass
        if self._strategy.reduce_boolean_decision(self._stop.asked, all=False):
            self._received()
            raise SIGTERMException

    def begin_batch(self, *, trains: bool = True) -> None:
        """End here if all ranks do.

        Args:
            trains: Whether what follows is a batch to train on.

        Raises:
            SIGTERMException: If so.
        """
        failure, timeout = self._strategy._no_hope, self._strategy._longest_wait_s
        if not self._stop.begin_batch(failure, timeout, trains=trains):
            return
        # A rank that is slower may still be in its last batch: who ends now would take its gradients away, and its own
        # last step would lack those of that rank.
        self._strategy.flush()
        if not self._stop.await_stopped(failure, min(timeout, _ALL_STOP_S)):
            log.warning("[rank %d] ends by a SIGTERM, and not all others have come as far", self._trainer.global_rank)
        self._received()
        raise SIGTERMException
