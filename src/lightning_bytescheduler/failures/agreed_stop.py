"""Ranks that stop before the same batch once one of them has been asked to, without a collective.

Each rank counts the batches it begins. The watcher's thread sees on the store that somebody was asked, and writes down
how many batches its rank has begun; from then on the training thread begins no further one before it knows what all
ranks have written. It goes on as far as the rank that was furthest, and stops there.

Why all stop before the same batch: a rank's number is taken under a lock, and counts up only if it is below the largest
one. So each rank begins exactly as many batches as the one that was furthest when it wrote its number. Why nobody waits
for good: what is waited for is written by threads that wait for no training thread, so also by a rank whose training
thread is inside a batch, and waits there for gradients that another rank's threads still send.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_bytescheduler.exceptions import SchedulerTimeoutError

__all__ = ["AgreedStop"]

_LOOK_S = 0.25


class AgreedStop:
    """One rank's part in it.

    Args:
        store: Shared by the ranks, empty before.
        rank: This one.
        world_size: Number of ranks.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"begun/{r}" for r in range(world_size)]
        self._asked = False
        self._told = False
        self._changed = threading.Condition()
        # What follows changes under the condition.
        self._begun = 0
        self._stopping = False
        self._last: int | None = None  # how many batches each rank begins

    def ask(self) -> None:
        """Stop all ranks. For any thread, and for a signal's handler: takes no lock."""
        self._asked = True

    @property
    def urgent(self) -> bool:
        """Whether somebody waits for :meth:`look`."""
        return (self._asked or self._stopping) and self._last is None

    def begin_batch(self, failure: Callable[[], BaseException | None], timeout: float) -> bool:
        """The training thread is about to begin a batch; ``True`` if it has to stop instead.

        Args:
            failure: Asked while it waits: why the others will not answer, if they will not.
            timeout: Longest wait for the others, in seconds.

        Raises:
            SchedulerTimeoutError: If they do not answer in time.
            BaseException: What ``failure`` says.
        """
        with self._changed:
            if self._stopping and self._last is None:
                self._await_others(failure, time.monotonic() + timeout)
            if self._last is not None and self._begun >= self._last:
                return True
            self._begun += 1
            return False

    def _await_others(self, failure: Callable[[], BaseException | None], deadline: float) -> None:
        while self._last is None:
            self._changed.release()
            try:
                cause = failure()
            finally:
                self._changed.acquire()
            if cause is not None:
                raise cause
            if time.monotonic() >= deadline:
                raise SchedulerTimeoutError(
                    "A rank was asked to stop, and not all ranks have said in time which batch they are in."
                )
            if self._last is None:
                self._changed.wait(_LOOK_S)

    def look(self) -> None:
        """For the watcher's thread: tell the others, and learn from them. Talks to the store without a lock."""
        if self._last is not None:
            return
        if self._asked and not self._told:
            self._store.set("asked", str(self._rank))
            self._told = True
        if not self._stopping:
            if not self._store.check(["asked"]):
                return
            with self._changed:
                self._stopping = True
                begun = self._begun
            self._store.set(f"begun/{self._rank}", str(begun))
        if self._store.check(self._keys):
            last = max(int(self._store.get(key)) for key in self._keys)
            with self._changed:
                self._last = last
                self._changed.notify_all()
