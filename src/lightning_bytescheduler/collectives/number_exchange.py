"""Exchanges a few numbers of each rank during training; only ranks that need the numbers wait for them.

*Numbers of all ranks* (:class:`NumberExchange`). One thread, named ``bytescheduler-counts``, owned by the exchange,
waits for posted numbers in order and notifies callers. It blocks inside ``Work.wait`` without the GIL, in slices, so
that it ends when it is stopped or a rank has failed.

Why messages match: only the training thread posts, on a group without other use, in one order on all ranks. So the n-th
message of a rank meets the n-th of every other. The group is gloo's, as reading numbers from a GPU's memory would wait
for all work queued there.

Lock order: posted numbers have their own lock, held only to read and to record; callbacks are called without it.

*Numbers that rank 0 changes during training* (:class:`AgreedValues`), and that every rank uses from the same step on.
Every rank calls `before_step` for each step, in order, on one thread. At some of these calls, the exchanges, rank 0
posts its next values and the others their part of the message, without waiting. At the next exchange every rank applies
the values posted at the last one. The message has usually arrived by then, so ranks wait only for a rank that is a
whole interval behind.

Why ranks agree:

* Exchanges are at the same steps on every rank. The first two are fixed: the first step and the next one. Each message
  also has the number of steps from the exchange at which it is read to the next one. So by induction all ranks know the
  step of the next exchange from a message that all of them have read.
* Values posted at one exchange take effect at the next one, in the same call on every rank. Rank 0 also applies the
  values of the message, not its newest ones.
* All ranks get the numbers of all, and use rank 0's values and the least of each observation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import wait_in_slices
from lightning_bytescheduler.collectives.groups import leave
from lightning_bytescheduler.collectives.operations import ends_within
from lightning_bytescheduler.scheduler.threads import WorkThread, short_turns

_LOOK_EVERY_S = 0.2
_ARRIVAL_S = 1.0


class PostedNumbers:
    """The numbers that all ranks have posted at one point, once they are known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: list[list[int]] | None = None
        self._known = threading.Event()
        self._told: list[Callable[[], None]] = []

    @property
    def known(self) -> bool:
        """Whether all ranks' numbers have arrived."""
        return self._rows is not None

    @property
    def rows(self) -> list[list[int]]:
        """Each rank's numbers.

        Raises:
            RuntimeError: If they have not arrived.
        """
        if self._rows is None:
            raise RuntimeError("The numbers of all ranks were read before they had arrived.")
        return self._rows

    def when_known(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the numbers are known: now, or later on the exchange's thread."""
        with self._lock:
            if self._rows is None:
                self._told.append(then)
                return
        then()

    def wait(self, failure: Callable[[], BaseException | None]) -> None:
        """Wait until the numbers are known.

        Args:
            failure: Called regularly; returns the reason if they will not come.

        Raises:
            BaseException: The result of ``failure``.
        """
        while not self._known.wait(_LOOK_EVERY_S):
            cause = failure()
            if cause is not None:
                raise cause

    def arrive(self, rows: list[list[int]]) -> None:
        """Set the numbers and notify callers."""
        with self._lock:
            self._rows = rows
            told, self._told = self._told, []
        self._known.set()
        for then in told:
            then()


class NumberExchange:
    """One rank's end of the exchange; every rank must construct it at the same point.

    Args:
        timeout: Longest time of one exchange, and to connect; the backend's default if ``None``.
        on_error: Called on the thread with the error that ends the exchange.
        failure: Called at the end; returns the reason if the last numbers will not come.
    """

    def __init__(
        self,
        *,
        timeout: timedelta | None = None,
        on_error: Callable[[BaseException], None],
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        with short_turns():  # for gloo's threads
            self._group: dist.ProcessGroup | None = dist.new_group(timeout=timeout, backend="gloo")
        self._on_error = on_error
        self._failure = failure
        self._stopping = threading.Event()
        self._last: dist.Work | None = None
        self._thread = WorkThread("counts")

    def post(self, numbers: Sequence[int]) -> PostedNumbers:
        """Post ``numbers`` to all ranks and return theirs, without waiting. Called in one order on all ranks.

        Raises:
            RuntimeError: If the exchange is closed, or a connection broke.
        """
        if self._group is None:
            raise RuntimeError("Numbers were posted to an exchange that is closed.")
        rows = list(torch.zeros(self._group.size(), len(numbers), dtype=torch.int64).unbind())
        posted, self._last = PostedNumbers(), self._group.allgather([rows], [torch.tensor(numbers, dtype=torch.int64)])
        self._thread.put(partial(self._await, self._last, rows, posted), self._on_error)
        return posted

    def close(self, timeout: float) -> None:
        """End the thread and leave the group, within ``timeout`` seconds; idempotent."""
        group, self._group = self._group, None
        if group is None:
            return
        last = self._last
        ends_within(last, min(_ARRIVAL_S, timeout), self._failure)
        self._stopping.set()
        self._thread.stop(timeout, drop=True)
        leave(group, idle=last is None or last.is_completed())

    def _await(self, work: dist.Work, rows: list[torch.Tensor], posted: PostedNumbers) -> None:
        if wait_in_slices(work, self._stopping):
            posted.arrive([row.tolist() for row in rows])


class AgreedValues:
    """One rank's end of the exchange of rank 0's values; every rank must construct it at the same point.

    Args:
        timeout: Longest wait for another rank; the backend's default if ``None``.
        failure: Called while waiting for another rank; returns the reason if it will not come.
    """

    def __init__(
        self,
        count: int,
        *,
        timeout: timedelta | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._count = count
        self._failure = failure
        self._errors: list[BaseException] = []
        self._exchange = NumberExchange(timeout=timeout, on_error=self._errors.append, failure=failure)
        self._posted: PostedNumbers | None = None
        self._step = 0
        self._next_exchange = 0
        self._closed = False

    def before_step(
        self, step: int, wanted: Sequence[int] | None = None, *, interval: int = 1, seen: Sequence[int] = ()
    ) -> list[int] | None:
        """Take part in an exchange, if there is one before this step.

        Args:
            step: Number of the step that begins. Repeated calls for a step do nothing.
            wanted: Rank 0's values; ignored on other ranks.
            interval: Rank 0's number of steps between exchanges, 1 or more, from the one at which this is read.
            seen: This rank's observations, as many on all ranks.

        Returns:
            The values to apply now, on all ranks, and after them the least of each observation; ``None`` if there is no
            exchange, or this is the first one.

        Raises:
            RuntimeError: If another rank is gone.
            BaseException: The result of ``failure``.
        """
        if step <= self._step or self._closed:
            return None
        self._step = step
        if step < self._next_exchange:
            return None
        agreed, apart = None, 1
        if self._posted is not None:
            self._posted.wait(lambda: self._errors[0] if self._errors else self._failure())
            rows, first = self._posted.rows, 1 + self._count
            least = [min(numbers) for numbers in zip(*rows, strict=True)]
            apart, *agreed = rows[0][:first] + least[first:]
        self._next_exchange = step + apart
        said = [interval, *wanted] if wanted else [interval] + [0] * self._count
        self._posted = self._exchange.post([*said, *seen])
        return agreed

    def close(self) -> None:
        """Leave the group, within two seconds; idempotent. After a failure the last message may never come."""
        self._closed = True
        self._exchange.close(_ARRIVAL_S)
