"""The slices of a ``SliceDataModule`` from the coordinator that the rounds are of.

Epochs of the data go on by themselves: a worker that finds nothing when its epoch begins waits for a slice that comes
back, or for the next epoch. Nothing of it waits in a step: the tracker is called from the plan's own thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

import msgspec

from lightning_bytescheduler.diloco.coordinator_client import Answer as HttpAnswer
from lightning_bytescheduler.diloco.coordinator_client import CoordinatorClient
from lightning_bytescheduler.diloco.coordinator_protocol import SLICES_PATH
from lightning_bytescheduler.exceptions import CoordinatorError, SchedulerTimeoutError, UnsupportedError
from lightning_bytescheduler.lightning_api import TrainerFn, pl
from lightning_bytescheduler.slices.data_module import SliceDataModule
from lightning_bytescheduler.slices.messages import Call, Joined, JoinTracker, decode, encode
from lightning_bytescheduler.slices.plan_thread import Idle
from lightning_bytescheduler.slices.tracker_client import LocalTracker, RemoteTracker, TrackerClient
from lightning_bytescheduler.slices.training import TrackedTraining

__all__ = ["CoordinatedSlices", "coordinated_slices"]

_T = TypeVar("_T")
_LOOK_S = 1.0


class CoordinatedSlices:
    """One worker's way to the coordinator's tracker, a ``TrackerHost``.

    Args:
        data: Whose slices they are.
        client: The connection; not there before the worker has joined.
        idle: Told while this worker has nothing to train on.
        timeout: Longest wait for an answer, in seconds.
        check: Raises what has ended the training, if anything.

    Attributes:
        idle: As given.
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
    ) -> None:
        self.idle = idle
        self._data = data
        self._client = client
        self._timeout = timeout
        self._check = check
        self._tracker: _CoordinatorTracker | None = None

    def connect(self, make: Callable[[], LocalTracker]) -> TrackerClient:
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
        """Stop calling; idempotent."""
        if self._tracker is not None:
            self._tracker.closed = True
        return True


def coordinated_slices(
    trainer: pl.Trainer,
    client: Callable[[], CoordinatorClient | None],
    *,
    idle: Idle,
    ranks: int,
    timeout: float,
    check: Callable[[], None],
) -> CoordinatedSlices | None:
    """Have a worker take its slices from the coordinator, if its data module is one of slices.

    Args:
        trainer: Before the setup of its data.
        client: See :class:`CoordinatedSlices`.
        idle: See :class:`CoordinatedSlices`.
        ranks: Of the worker.
        timeout: See :class:`CoordinatedSlices`.
        check: See :class:`CoordinatedSlices`.

    Raises:
        UnsupportedError: If several ranks train together as one worker: they need equally many batches.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    if not isinstance(data, SliceDataModule):
        return None
    if ranks > 1:
        raise UnsupportedError(
            "A SliceDataModule takes slices from the coordinator for workers of one process. Leave inner out and start "
            "one Trainer(devices=1) for each device, or use data loaders, whose samples are split among a worker's "
            "processes."
        )
    slices = CoordinatedSlices(data, client, idle=idle, timeout=timeout, check=check)
    data.teardown(TrainerFn.FITTING)  # of a failed fit, after which Lightning does not
    data.bind_tracker(slices)
    return slices


class _CoordinatorTracker(RemoteTracker):
    """Its calls wait for the network, so that they are for the plan's thread.

    Attributes:
        closed: Whether nothing is to be asked any more.
    """

    def __init__(self, client: CoordinatorClient, *, timeout: float, check: Callable[[], None]) -> None:
        self.closed = False
        self._client = client
        self._timeout = timeout
        self._check = check

    def join(self, message: JoinTracker) -> Joined:
        # The coordinator knows this worker by the name that it gave itself.
        return super().join(msgspec.structs.replace(message, worker=self._client.worker))

    def _ask(self, message: Call, kinds: tuple[type[_T], ...]) -> _T:
        future = self._client.start(self._client.request("POST", SLICES_PATH, body=encode(message).encode()))
        waited = 0.0
        while True:
            try:
                answer: HttpAnswer = future.result(_LOOK_S)
                break
            except (FutureTimeoutError, TimeoutError):
                waited += _LOOK_S
                self._check()
                if waited >= self._timeout or self.closed:
                    future.cancel()
                    raise SchedulerTimeoutError(
                        f"The coordinator gave no answer about slices for {waited:.0f} s. Raise the strategy's timeout "
                        "if it may be away for longer."
                    ) from None
        if answer.status != 200:
            raise CoordinatorError(f"The coordinator hands out no slices to this worker: {answer.words}")
        reply = decode(answer.body)
        if not isinstance(reply, kinds):
            raise CoordinatorError(f"The coordinator answers {type(reply).__name__} to {type(message).__name__}.")
        return reply
