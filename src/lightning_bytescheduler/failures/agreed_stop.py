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

_LOOK_S = 0.25

_Place = tuple[int, ...]  # batches to train on that were begun, and others since


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
        self._world_size = world_size
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
            cause = self._wait(lambda: not self._stopping or self._last is not None, failure, timeout)
            if self._stopping and self._last is None:
                raise cause or SchedulerTimeoutError(
                    "A rank was asked to stop, and not all ranks have said in time which batch they are in."
                )
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
        with self._changed:
            self._stopped = True
            self._wait(lambda: self._all_stopped, failure, timeout)
            return self._all_stopped

    def _wait(
        self, is_over: Callable[[], bool], failure: Callable[[], BaseException | None], timeout: float
    ) -> BaseException | None:
        """Wait, under the condition, until it is over, time is up or there is a failure, which is returned."""
        deadline = time.monotonic() + timeout
        while not is_over():
            self._changed.release()
            try:
                cause = failure()
            finally:
                self._changed.acquire()
            if cause is not None or time.monotonic() >= deadline:
                return cause
            self._changed.wait(_LOOK_S)
        return None

    def look(self) -> None:
        """For the watcher's thread: tell the others, and learn from them. Talks to the store without a lock."""
        if self._last is None:
            if self.asked:
                self._store.set("asked", str(self._rank))
            elif not self._stopping and not self._store.check(["asked"]):
                return
            with self._changed:
                self._stopping = True  # from here on, no further batch is begun
            places = self._told_by_all("begun", " ".join(map(str, self._begun)))
            with self._changed:
                self._last = max((tuple(map(int, place.split())) for place in places), default=None)
                self._changed.notify_all()
        elif self._stopped and not self._all_stopped:
            told = self._told_by_all("stopped", "")
            with self._changed:
                self._all_stopped = bool(told)
                self._changed.notify_all()

    def _told_by_all(self, what: str, own: str) -> list[bytes]:
        """Tell the others, and return what each has told, once all have; nothing before."""
        self._store.set(f"{what}/{self._rank}", own)
        keys = [f"{what}/{rank}" for rank in range(self._world_size)]
        return [self._store.get(key) for key in keys] if self._store.check(keys) else []
