"""Ranks that stop before the same batch once one of them has been asked to, without a collective.

Each rank counts the batches it begins: those it trains on, and after each of them those it does not, as a validation
may have more on one rank than on another. The watcher's thread sees on the store that somebody was asked, and writes
down how far its rank has come; from then on the training thread begins no further batch before it knows what all ranks
have written. It goes on as far as the rank that was furthest, and stops there.

Why all stop before the same batch: a rank's place is taken under a lock, and moves on only up to the furthest one. So
each rank begins exactly as many batches to train on as the one that was furthest when it wrote its place. Why nobody
waits for good: what is waited for is written by threads that wait for no training thread, so also by a rank whose
training thread is inside a batch, and waits there for gradients that another rank's threads still send.

Who has stopped waits for the others to do so, within a bound: what it does next ends those that are still in a batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_bytescheduler.exceptions import SchedulerTimeoutError

__all__ = ["AgreedStop"]

_LOOK_S = 0.25

_Place = tuple[int, int]  # batches to train on that were begun, and others since


class AgreedStop:
    """One rank's part in it.

    Args:
        store: Shared by the ranks, empty before.
        rank: This one.
        world_size: Number of ranks.

    Attributes:
        asked: Whether this rank was.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"begun/{r}" for r in range(world_size)]
        self._stopped_keys = [f"stopped/{r}" for r in range(world_size)]
        self.asked = False
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._begun: _Place = (0, 0)
        self._stopping = False
        self._last: _Place | None = None  # how far each rank goes
        self._stopped = False  # this rank's training thread
        self._all_stopped = False

    def ask(self) -> None:
        """Stop all ranks. For any thread, and for a signal's handler: takes no lock."""
        self.asked = True

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for :meth:`look`."""
        if self._last is None:
            return self.asked or self._stopping
        return self._stopped and not self._all_stopped

    def begin_batch(self, failure: Callable[[], BaseException | None], timeout: float, *, trains: bool = True) -> bool:
        """The training thread is about to begin a batch; ``True`` if it has to stop instead.

        Args:
            failure: Asked while it waits: why the others will not answer, if they will not.
            timeout: Longest wait for the others, in seconds.
            trains: Whether it trains on that batch, as all ranks do on as many.

        Raises:
            SchedulerTimeoutError: If they do not answer in time.
            BaseException: What ``failure`` says.
        """
        with self._changed:
            if self._stopping and self._last is None:
                self._await_others(failure, time.monotonic() + timeout)
            trained, others = self._begun
            following = (trained + 1, 0) if trains else (trained, others + 1)
            if self._last is not None and following > self._last:
                return True
            self._begun = following
            return False

    def await_stopped(self, failure: Callable[[], BaseException | None], timeout: float) -> bool:
        """The training thread has stopped: wait for those of the others, and return whether they have, too.

        Args:
            failure: Asked while it waits: why they will not, if they will not.
            timeout: Longest wait, in seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._stopped = True
            while not self._all_stopped and time.monotonic() < deadline:
                self._changed.wait(_LOOK_S)
                if self._unlocked(failure) is not None:
                    break
            return self._all_stopped

    def _unlocked(self, failure: Callable[[], BaseException | None]) -> BaseException | None:
        self._changed.release()
        try:
            return failure()
        finally:
            self._changed.acquire()

    def _await_others(self, failure: Callable[[], BaseException | None], deadline: float) -> None:
        while self._last is None:
            cause = self._unlocked(failure)
            if self._last is not None:
                return
            if cause is not None:
                raise cause
            if time.monotonic() >= deadline:
                raise SchedulerTimeoutError(
                    "A rank was asked to stop, and not all ranks have said in time which batch they are in."
                )
            self._changed.wait(_LOOK_S)

    def look(self) -> None:
        """For the watcher's thread: tell the others, and learn from them. Talks to the store without a lock."""
        if self._last is not None:
            self._look_for_stopped()
            return
        if not self._stopping:
            if self.asked:
                self._store.set("asked", str(self._rank))
            elif not self._store.check(["asked"]):
                return
            with self._changed:
                self._stopping = True
                begun = self._begun
            self._store.set(f"begun/{self._rank}", " ".join(map(str, begun)))
        if self._store.check(self._keys):
            last = max(_place(self._store.get(key)) for key in self._keys)
            with self._changed:
                self._last = last
                self._changed.notify_all()

    def _look_for_stopped(self) -> None:
        if not self._stopped or self._all_stopped:
            return
        self._store.set(f"stopped/{self._rank}", "")
        if self._store.check(self._stopped_keys):
            with self._changed:
                self._all_stopped = True
                self._changed.notify_all()


def _place(told: bytes) -> _Place:
    trained, others = map(int, told.split())
    return trained, others
