"""The slices of a ``SliceDataModule`` under ``diloco``: one tracker at worker 0 hands them out to all workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch.distributed as dist

from lightning_bytescheduler.diloco.mailbox import Caller, Mailbox, await_key, connection_to
from lightning_bytescheduler.diloco.process_groups import WorkerWorld, worker_name
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.lightning_api import TrainerFn, pl
from lightning_bytescheduler.slices.data_module import SliceDataModule
from lightning_bytescheduler.slices.messages import (
    Call,
    JoinAgain,
    JoinTracker,
    Reply,
    RequestSlice,
    TrackerClient,
    decode,
    encode,
)
from lightning_bytescheduler.slices.tracker import SliceTracker
from lightning_bytescheduler.slices.training import TrackedTraining

log = logging.getLogger(__name__)

_MAILBOX = "slices"
_OVER = "slices/over"  # and a worker's number, once it asks for nothing more
_THREAD = "bytescheduler-slice-tracker"
_STOP_S = 5.0
_MOMENT_S = 0.5


class SharedSlices:
    """One worker's way to the tracker, a ``TrackerHost``. At worker 0 it has a thread, which answers the others.

    Epochs of the data are the strategy's, which ends them for all workers at once: see ``RoundBoundaries``.

    Args:
        data: Whose slices they are.
        store: That all workers share.
        worker: Number of this one.
        workers: How many there are.
        timeout: Longest wait for worker 0, in seconds.
        check: Raises what another worker has failed with, if any.
    """

    waits = False

    def __init__(
        self,
        data: SliceDataModule,
        store: dist.Store,
        *,
        worker: int,
        workers: int,
        timeout: float,
        check: Callable[[], None],
    ) -> None:
        self._data = data
        self.worker = worker
        self.workers = workers
        self._store = store
        self._timeout = timeout
        self._check = check
        self._server: Mailbox | None = None
        self._client: _RemoteTracker | None = None

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        """See ``TrackerHost``. Worker 0 is waited for with the first call."""
        if self.worker != 0:
            self._client = _RemoteTracker(
                Caller(
                    self._store,
                    sender=worker_name(self.worker),
                    timeout=self._timeout,
                    check=self._check,
                )
            )
            return self._client
        tracker = make()
        if self._server is None:

            def handle(_: str, text: str) -> bytes:
                return encode(tracker.answer(cast(Call, decode(text)))).encode()  # refuses what workers do not send

            self._server = Mailbox(self._store, _MAILBOX, thread=_THREAD, handle=handle, on_error=_reading_ended)
        return tracker

    @property
    def training(self) -> TrackedTraining | None:
        """What workers share in a fit, after its setup."""
        training = self._data.training
        return training if isinstance(training, TrackedTraining) else None

    def finish(self) -> None:
        """The training is over here: ask nothing more. Worker 0 waits for the others, which may be in their last step.

        Raises:
            Exception: What another worker has failed with.
        """
        store = connection_to(self._store)
        if self._client is not None:
            self._client.closed = True
            store.set(f"{_OVER}/{self.worker}", "1")
        if self._server is not None:
            for worker in range(1, self.workers):
                await_key(store, f"{_OVER}/{worker}", limit=self._timeout, check=self._check)

    def close(self, *, failed: bool) -> bool:
        """Stop answering and calling; bounded, idempotent. Returns whether the threads have ended."""
        if self._client is not None:
            self._client.closed = True
        connected = self._client is not None or self._server is not None
        if failed and connected and self.training is not None and not self.training.halt(_MOMENT_S):
            return False
        return self._server is None or self._server.stop(_MOMENT_S if failed else _STOP_S)


def share_slices(
    trainer: pl.Trainer, world: WorkerWorld, *, timeout: float, check: Callable[[], None]
) -> SharedSlices | None:
    """Have the workers of a fit share its slices, if its data module is one of slices.

    Args:
        trainer: Before the setup of its data.
        world: Where this rank is.
        timeout: See :class:`SharedSlices`.
        check: See :class:`SharedSlices`.

    Raises:
        UnsupportedError: If several ranks train together as one worker: they need equally many batches.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    if not isinstance(data, SliceDataModule):
        return None
    if world.inner_size > 1:
        raise UnsupportedError(
            "A SliceDataModule hands its slices out to workers of one process. Leave inner out, train with a "
            "coordinator, or use data loaders, whose samples are split among all processes."
        )
    slices = SharedSlices(data, world.store, worker=world.worker, workers=world.workers, timeout=timeout, check=check)
    data.teardown(TrainerFn.FITTING)  # of a failed fit, after which Lightning does not
    data.bind_tracker(slices)
    return slices


def _reading_ended(error: BaseException) -> None:
    if not isinstance(error, RuntimeError):  # else the store is gone, which the others find out by themselves
        log.error("Slices are handed out no more: %s", error)


class _RemoteTracker:
    """Once closed, it only lets its worker leave."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.closed = False

    def answer(self, message: Call) -> Reply:
        if self.closed and not isinstance(message, (JoinTracker, RequestSlice)):
            return JoinAgain()  # the training is over, and worker 0 may have gone
        return cast(Reply, decode(self._caller.call(_MAILBOX, encode(message))))
