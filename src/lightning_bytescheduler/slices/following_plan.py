"""The plan of a rank that is not the first of its worker: takes its part of each batch that the first rank has made.

The tracker does not know of it. What it trains on counts with the first rank's steps, which are its own too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.slices.batches import ReadReport, SliceBatch
from lightning_bytescheduler.slices.plan_thread import Idle
from lightning_bytescheduler.slices.worker_ranks import GOES_ON, WAITS, CorruptSlices, Part, PassOver, WorkerRanks, read

__all__ = ["FollowingPlan"]

_LOOK_S = 1.0
_PATIENCE = 3.0  # times the timeout: the first rank may wait that long for several answers of the tracker


class FollowingPlan:
    """A ``BatchPlan`` of parts. For the training thread; what is posted comes on a thread of the ranks.

    Args:
        ranks: The way to the first rank.
        batch_size: Samples of this rank's parts.
        idle: Told what the first rank's is told, at the same moments.

    Attributes:
        batch_size: As given; the first rank's counts.
        epoch: The epoch of the data that is trained on.
    """

    def __init__(self, ranks: WorkerRanks, *, batch_size: int, idle: Idle | None = None) -> None:
        self.batch_size = batch_size
        self.epoch = 0
        self._ranks = ranks
        self._idle = idle
        self._changed = threading.Condition()
        # What follows changes under it.
        self._parts: deque[Part | PassOver] = deque()
        self._error: BaseException | None = None
        ranks.listen(self._heed, self._fail)

    def __iter__(self) -> Iterator[SliceBatch]:
        number = self._begin()
        if number is None:
            return
        while isinstance(part := self._next(number), Part):
            self.epoch = part.epoch
            yield part.batch

    def _begin(self) -> int | None:
        """Do as the first rank does until there is a batch; returns the number of the pass, unless it is given up."""
        while True:
            said = self._ranks.tell()
            if said == WAITS:
                if self._idle is not None and self._idle.waits():
                    return None
            elif said == GOES_ON:
                if self._idle is not None:
                    self._idle.goes_on()
            else:
                return int(said)

    def _next(self, number: int) -> Part | PassOver:
        limit = _PATIENCE * self._ranks.timeout
        deadline = time.monotonic() + limit
        with self._changed:
            while True:
                while self._parts and self._parts[0].number < number:  # of a pass that was given up
                    self._parts.popleft()
                if self._parts:
                    return self._parts.popleft()
                self._ranks.check()
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SchedulerTimeoutError(
                        f"The worker's first rank made no batch for {limit:.0f} s. Raise the strategy's timeout if the "
                        "coordinator may be away for longer."
                    )
                self._changed.wait(min(left, _LOOK_S))

    def _heed(self, text: str) -> None:
        letter = read(text)
        if not isinstance(letter, CorruptSlices):
            with self._changed:
                self._parts.append(letter)
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def received(self, report: ReadReport) -> None:
        """Tell the first rank what is corrupt."""
        if report.corrupt:
            self._ranks.post(0, msgspec.json.encode(CorruptSlices(dict(report.corrupt))).decode())

    def trained(self) -> None:
        """The first rank reports the step."""

    def keep_alive(self) -> None:
        """The first rank renews the lease."""

    def settle(self) -> None:
        """The first rank knows where the worker is."""

    def leave(self) -> None:
        """Nothing is held here."""

    def stop(self) -> bool:
        """There is no thread here."""
        return True
