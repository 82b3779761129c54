"""Stop all ranks before the same batch once one of them has been asked to, without a collective.

Each rank counts the batches that it begins: those it trains on, and after each of them those it does not, because a
validation may have more batches on one rank than on another. The watcher's thread sees on the store that a rank was
asked, and writes down how far its own rank has come. From then on the training thread begins no batch before it knows
what all ranks have written. It goes on as far as the furthest rank, and stops there.

Why all ranks stop before the same batch: a rank's place is taken under a lock, and moves on only up to the furthest
place. So each rank begins exactly as many training batches as the furthest rank had begun when it wrote its place.

Why no rank waits forever: the places are written by watcher threads, which wait for no training thread. A rank writes
its place even while its training thread is inside a batch, waiting for gradients that another rank's threads still
send.

A rank that has stopped waits for the others to stop, for a limited time: what it does next ends the ranks that are
still in a batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_bytescheduler.exceptions import SchedulerTimeoutError

_LOOK_S = 0.25

_Place = tuple[int, ...]  # training batches begun, and other batches since


class AgreedStop:
    """One rank's part in the agreement to stop.

    Args:
        store: Shared by the ranks, empty before.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        asked: Whether this rank was asked to stop.
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
        self._last: _Place | None = None  # where each rank stops
        self._stopped = False  # whether this rank's training thread has
        self._all_stopped = False

    def ask(self) -> None:
        """Ask all ranks to stop. Safe on any thread and in a signal handler, as it takes no lock."""
        self.asked = True

    @property
    def urgent(self) -> bool:
        """Whether a thread waits for the result of :meth:`look`."""
        if self._last is None:
            return self.asked or self._stopping
        return self._stopped and not self._all_stopped

    def begin_batch(self, failure: Callable[[], BaseException | None], timeout: float, *, trains: bool = True) -> bool:
        """Tell that the training thread is about to begin a batch; ``True`` if it has to stop instead.

        Args:
            failure: Called while it waits; returns the reason why the others will not answer, or ``None``.
            timeout: Longest wait for the others, in seconds.
            trains: Whether it trains on that batch. All ranks train on the same number of batches.

        Raises:
            SchedulerTimeoutError: If the others do not answer in time.
            BaseException: What ``failure`` returned.
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
        """Tell that the training thread has stopped, wait for the others', and return whether they have stopped too.

        Args:
            failure: Called while it waits; returns the reason why the others will not stop, or ``None``.
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
        """Tell the others, and learn from them. For the watcher's thread; talks to the store without a lock."""
        if self._last is None:
            if self.asked:
                self._store.set("asked", str(self._rank))
            elif not self._stopping and not self._store.check(["asked"]):
                return
            with self._changed:
                self._stopping = True  # no further batch is begun from here on
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
        """Tell the others, and return what each rank has told once all have; an empty list before."""
        self._store.set(f"{what}/{self._rank}", own)
        keys = [f"{what}/{rank}" for rank in range(self._world_size)]
        return [self._store.get(key) for key in keys] if self._store.check(keys) else []
