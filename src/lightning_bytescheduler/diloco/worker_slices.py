"""The slices of a ``SliceDataModule`` under ``diloco``: how the workers of a fit get them.

*Workers launched together* get them from one tracker at worker 0. The strategy ends epochs of the data, for all workers
at once: see ``RoundBoundaries``.

*Workers of a coordinator* get them from the coordinator. Each epoch of a worker is its share of one epoch of the data.
It has no batch if others have taken all there is, and waits where that epoch cannot begin yet. Where several ranks
train together as one worker, the first rank calls the tracker for all of them: see ``slices.training``.

No step waits for the tracker: it is called from the plan's own thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from typing import cast

import msgspec
import torch.distributed as dist

from lightning_bytescheduler.diloco.coordinator_client import Answer
from lightning_bytescheduler.diloco.coordinator_protocol import SLICES_PATH
from lightning_bytescheduler.diloco.mailbox import Caller, Mailbox
from lightning_bytescheduler.diloco.process_groups import WorkerWorld, worker_name
from lightning_bytescheduler.diloco.runtime import CoordinatedRuntime
from lightning_bytescheduler.exceptions import CoordinatorError, SchedulerTimeoutError, UnsupportedError
from lightning_bytescheduler.lightning_api import TrainerFn, pl
from lightning_bytescheduler.slices.data_module import SliceDataModule
from lightning_bytescheduler.slices.tracker import (
    Call,
    JoinAgain,
    JoinTracker,
    Reply,
    SliceTracker,
    TrackerClient,
    decode,
    encode,
)
from lightning_bytescheduler.slices.training import Idle, TrackedTraining

log = logging.getLogger(__name__)

_MAILBOX = "slices"
_THREAD = "bytescheduler-slice-tracker"
_STOP_S = 5.0
_MOMENT_S = 0.5
_LOOK_S = 1.0
_NO_SESSION = 403  # of this run: the coordinator has given this worker up


class WorkerSlices:
    """One worker's way to the tracker: a ``TrackerHost``, and a ``TrackerClient`` where the tracker is elsewhere.

    Args:
        data: The data module of the slices.
        timeout: Longest wait for an answer, in seconds.
        check: Raises the error that has ended the training, if any.

    Attributes:
        closed: Whether this worker must ask nothing more.
    """

    waits = False
    counts_merged = False
    worker = 0
    workers = 1

    def __init__(self, data: SliceDataModule, *, timeout: float, check: Callable[[], None]) -> None:
        self._data = data
        self._timeout = timeout
        self._check = check
        self._server: Mailbox | None = None
        self._asks = False
        self.closed = False

    @property
    def training(self) -> TrackedTraining | None:
        """This worker's batches of a fit, after its setup; ``None`` before."""
        training = self._data.training
        return training if isinstance(training, TrackedTraining) else None

    def finish(self) -> None:
        """The training is over here: the tracker knows what was trained on, and is asked nothing more."""
        if self._asks:
            self._halt()
            self.closed = True

    def close(self, *, failed: bool) -> bool:
        """Stop answering and calling; bounded, idempotent. Returns whether the threads have ended."""
        self.closed = True
        ended = not (failed and (self._asks or self._server is not None)) or self._halt()
        return (self._server is None or self._server.stop(_MOMENT_S if failed else _STOP_S)) and ended

    def _halt(self) -> bool:
        return self.training is None or self.training.halt(_STOP_S)

    def _look(self) -> None:
        """Raise if it makes no sense to wait for an answer."""
        self._check()
        if self.closed:
            raise SchedulerTimeoutError("The training ended before its questions about slices were answered.")


class SharedSlices(WorkerSlices):
    """The slices of workers launched together. At worker 0 it has a thread, which answers the others.

    Args:
        data: See :class:`WorkerSlices`.
        world: Where this worker is.
        timeout: See :class:`WorkerSlices`.
        check: See :class:`WorkerSlices`.
    """

    def __init__(self, data: SliceDataModule, world: WorkerWorld, *, timeout: float, check: Callable[[], None]) -> None:
        super().__init__(data, timeout=timeout, check=check)
        self.worker, self.workers = world.worker, world.workers
        self._store: dist.Store = world.store

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        """See ``TrackerHost``. The first call waits for worker 0."""
        if self.worker != 0:
            name = worker_name(self.worker)
            self._caller = Caller(self._store, sender=name, timeout=self._timeout, check=self._look)
            self._asks = True
            return self
        tracker = make()
        if self._server is None:

            def handle(_: str, text: str) -> bytes:
                return encode(tracker.answer(cast(Call, decode(text)))).encode()  # refuses what workers do not send

            self._server = Mailbox(self._store, _MAILBOX, thread=_THREAD, handle=handle, on_error=_reading_ended)
        return tracker

    def answer(self, message: Call) -> Reply:
        """See ``TrackerClient``; waits for the network, so that it is for the plan's thread."""
        return cast(Reply, decode(self._caller.call(_MAILBOX, encode(message))))


def _reading_ended(error: BaseException) -> None:
    if not isinstance(error, RuntimeError):  # else the store is gone, which the others find out by themselves
        log.error("No more slices are handed out: %s", error)


class CoordinatedSlices(WorkerSlices):
    """The slices that a run's coordinator hands out.

    Args:
        data: See :class:`WorkerSlices`.
        runtime: This worker's part in the run; has a connection once it has joined.
        timeout: See :class:`WorkerSlices`.
        check: See :class:`WorkerSlices`.

    Attributes:
        idle: Told while this worker has nothing to train on.
        ranks: The ranks of this worker, if several train together.
    """

    waits = True
    counts_merged = True

    def __init__(
        self, data: SliceDataModule, runtime: CoordinatedRuntime, *, timeout: float, check: Callable[[], None]
    ) -> None:
        super().__init__(data, timeout=timeout, check=check)
        self._runtime = runtime
        self.idle: Idle = runtime
        self.ranks = runtime.group if runtime.group.size > 1 else None

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        """See ``TrackerHost``; no worker makes a tracker here."""
        client = self._runtime.client
        if client is None:
            raise UnsupportedError("Cannot take slices from the coordinator before this worker has joined.")
        self._client, self._asks = client, True
        return self

    def answer(self, message: Call) -> Reply:
        """See ``TrackerClient``; waits for the network, so that it is for the plan's thread."""
        if isinstance(message, JoinTracker):  # the coordinator knows this worker by the name that it gave itself
            message = msgspec.structs.replace(message, worker=self._client.worker)
        deadline = time.monotonic() + self._timeout
        while True:
            answer = self._answer_to(message, deadline)
            if answer.status == 200:
                return cast(Reply, decode(answer.body))
            if answer.status != _NO_SESSION:
                raise CoordinatorError(f"The coordinator hands out no slices to this worker: {answer.words}")
            # This worker was away for longer than its lease. The client joins again; the slices have gone to others.
            if not isinstance(message, JoinTracker):
                return JoinAgain()
            time.sleep(_LOOK_S / 4)
            self._look_until(deadline)

    def _answer_to(self, message: Call, deadline: float) -> Answer:
        future = self._client.start(self._client.request("POST", SLICES_PATH, body=encode(message).encode()))
        try:
            while not wait([future], _LOOK_S).done:
                self._look_until(deadline)
            return future.result()
        except CancelledError:
            self._look()
            raise SchedulerTimeoutError("The connection to the coordinator ended before it answered.") from None
        finally:
            future.cancel()

    def _look(self) -> None:
        self._runtime.group.check()
        super()._look()

    def _look_until(self, deadline: float) -> None:
        self._look()
        if time.monotonic() >= deadline:
            raise SchedulerTimeoutError(
                f"The coordinator gave no answer about slices for {self._timeout:.0f} s. Raise the strategy's timeout "
                "if it may be away for longer."
            )


def worker_slices(
    trainer: pl.Trainer,
    world: WorkerWorld,
    runtime: CoordinatedRuntime | None,
    *,
    timeout: float,
    check: Callable[[], None],
) -> SharedSlices | CoordinatedSlices | None:
    """Have the workers share the slices of a fit, if its data module is one of slices.

    Args:
        trainer: The Trainer, before the setup of its data.
        world: The place of this rank among the workers.
        runtime: The worker's part in a coordinator's run, if there is one.
        timeout: See :class:`WorkerSlices`.
        check: Raises the error if another rank has failed.

    Raises:
        UnsupportedError: If several ranks that were launched together train as one worker: they need equally many
            batches.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    if not isinstance(data, SliceDataModule):
        return None
    slices: SharedSlices | CoordinatedSlices
    if runtime is None:
        if world.inner_size > 1:
            raise UnsupportedError(
                "A SliceDataModule hands its slices out to workers of one process. Leave inner out, train with a "
                "coordinator, or use data loaders, whose samples are split among all processes."
            )
        slices = SharedSlices(data, world, timeout=timeout, check=check)
    else:
        slices = CoordinatedSlices(data, runtime, timeout=timeout, check=check)
    data.teardown(TrainerFn.FITTING)  # after a failed fit, for which Lightning does not call it
    data.bind_tracker(slices)
    return slices
