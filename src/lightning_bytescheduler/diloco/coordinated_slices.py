"""The slices of a ``SliceDataModule`` from the coordinator that the rounds are of.

Epochs of the data go on by themselves: a worker that finds nothing when its epoch begins waits for a slice that comes
back, or for the next epoch. Nothing of it waits in a step: the tracker is called from the plan's own thread.

Where several ranks train together as one worker, the first one calls the tracker for all of them: see
``slices.training``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from typing import cast

import msgspec

from lightning_bytescheduler.diloco.coordinated_runtime import CoordinatedRuntime
from lightning_bytescheduler.diloco.coordinator_client import Answer as HttpAnswer
from lightning_bytescheduler.diloco.coordinator_client import CoordinatorClient
from lightning_bytescheduler.diloco.coordinator_protocol import SLICES_PATH
from lightning_bytescheduler.diloco.process_groups import WorkerGroup, WorkerWorld
from lightning_bytescheduler.exceptions import CoordinatorError, SchedulerTimeoutError, UnsupportedError
from lightning_bytescheduler.lightning_api import TrainerFn, pl
from lightning_bytescheduler.slices.data_module import SliceDataModule
from lightning_bytescheduler.slices.messages import (
    Call,
    JoinAgain,
    JoinTracker,
    Reply,
    TrackerClient,
    decode,
    encode,
)
from lightning_bytescheduler.slices.tracker import SliceTracker
from lightning_bytescheduler.slices.training import Idle, TrackedTraining

_LOOK_S = 1.0
_NO_SESSION = 403  # of this run: the coordinator has given this worker up
_STOP_S = 5.0


class CoordinatedSlices:
    """One worker's way to the coordinator's tracker, a ``TrackerHost``.

    Args:
        data: Whose slices they are.
        client: The connection; not there before the worker has joined.
        idle: Told while this worker has nothing to train on.
        timeout: Longest wait for an answer, in seconds.
        check: Raises what has ended the training, if anything.
        ranks: Of this worker, if several train together.

    Attributes:
        idle: As given.
        ranks: As given.
    """

    worker = 0
    workers = 1
    waits = True

    def __init__(
        self,
        data: SliceDataModule,
        client: Callable[[], CoordinatorClient | None],
        *,
        idle: Idle,
        timeout: float,
        check: Callable[[], None],
        ranks: WorkerGroup | None = None,
    ) -> None:
        self.idle = idle
        self.ranks = ranks
        self._data = data
        self._client = client
        self._timeout = timeout
        self._check = check
        self._tracker: _CoordinatorTracker | None = None

    def connect(self, make: Callable[[], SliceTracker]) -> TrackerClient:
        """See ``TrackerHost``; nobody makes a tracker here."""
        client = self._client()
        if client is None:
            raise UnsupportedError("Cannot take slices from the coordinator before this worker has joined.")
        self._tracker = _CoordinatorTracker(client, timeout=self._timeout, check=self._check)
        return self._tracker

    @property
    def training(self) -> None:
        """Nobody has to end epochs of the data for all workers."""
        return

    def finish(self) -> None:
        """The training is over here: give back what is held."""
        training = self._data.training
        if isinstance(training, TrackedTraining):
            training.leave()

    def close(self, *, failed: bool) -> bool:
        """Stop calling; bounded, idempotent. Returns whether the plan's thread has ended, after a failure."""
        if self._tracker is None:
            return True
        self._tracker.closed = True
        training = self._data.training
        return not failed or not isinstance(training, TrackedTraining) or training.halt(_STOP_S)


def coordinated_slices(
    trainer: pl.Trainer,
    runtime: CoordinatedRuntime,
    *,
    world: WorkerWorld,
    timeout: float,
    check: Callable[[], None],
) -> CoordinatedSlices | None:
    """Have a worker take the slices of a fit from the coordinator, if its data is in slices.

    Args:
        trainer: Before the setup of its data.
        runtime: The worker's part in the run; has a connection once this worker has joined.
        world: Where this rank is.
        timeout: Longest wait for an answer, in seconds.
        check: Raises what another rank has failed with, if any.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    if not isinstance(data, SliceDataModule):
        return None

    def check_all() -> None:
        check()
        runtime.check()

    ranks = runtime.group if world.size > 1 else None
    slices = CoordinatedSlices(
        data, lambda: runtime.client, idle=runtime, timeout=timeout, check=check_all, ranks=ranks
    )
    data.teardown(TrainerFn.FITTING)  # of a failed fit, after which Lightning does not
    data.bind_tracker(slices)
    return slices


class _CoordinatorTracker:
    """Its calls wait for the network, so that they are for the plan's thread.

    Attributes:
        closed: Whether nothing is to be asked any more.
    """

    def __init__(self, client: CoordinatorClient, *, timeout: float, check: Callable[[], None]) -> None:
        self.closed = False
        self._client = client
        self._timeout = timeout
        self._check = check

    def answer(self, message: Call) -> Reply:
        if isinstance(message, JoinTracker):  # the coordinator knows this worker by the name that it gave itself
            message = msgspec.structs.replace(message, worker=self._client.worker)
        deadline = time.monotonic() + self._timeout
        while True:
            answer = self._answer_to(message, deadline)
            if answer.status == 200:
                return cast(Reply, decode(answer.body))
            if answer.status != _NO_SESSION:
                raise CoordinatorError(f"The coordinator hands out no slices to this worker: {answer.words}")
            # It was away for longer than its lease. The client joins again, and what it held has gone to others.
            if not isinstance(message, JoinTracker):
                return JoinAgain()
            time.sleep(_LOOK_S / 4)
            self._look(deadline)

    def _answer_to(self, message: Call, deadline: float) -> HttpAnswer:
        future = self._client.start(self._client.request("POST", SLICES_PATH, body=encode(message).encode()))
        try:
            while not wait([future], _LOOK_S).done:
                self._look(deadline)
            return future.result()
        except CancelledError:
            self._check()
            raise SchedulerTimeoutError("The connection to the coordinator ended before it answered.") from None
        finally:
            future.cancel()

    def _look(self, deadline: float) -> None:
        """Whether to wait on."""
        self._check()
        if self.closed:
            raise SchedulerTimeoutError("The training ended before the coordinator answered about slices.")
        if time.monotonic() >= deadline:
            raise SchedulerTimeoutError(
                f"The coordinator gave no answer about slices for {self._timeout:.0f} s. Raise the strategy's timeout "
                "if it may be away for longer."
            )
