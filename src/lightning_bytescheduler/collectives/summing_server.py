"""A parameter server: adds up what workers push, and sends each of them the sum.

For each worker two threads: one takes headers and posts receives for what they announce, at once, so that a link is
never idle for want of a receive; the other waits for what was posted, and adds it up. One more sends sums, to one
worker after the other (``sending_turns.py``). Adding releases the interpreter's lock. Parts are added in the order of
ranks, whoever comes first, so a sum has the same bits in each run; what comes early waits. What is held at once is what
workers have under way: their credit, times their number at most.

A worker that is a server besides has one of these in its process. Its own parts never travel: see :meth:`push_own`.

A part that does not match what another worker has announced under the same number is refused: the server ends, and says
which worker it was. So does it when a worker dies. It then breaks all connections, but lives on for a few seconds:
workers find that they cannot go on, that no server has died, and look for the worker that has.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.sending_turns import SendingTurns
from lightning_bytescheduler.exceptions import RankFailedError, UnsupportedError
from lightning_bytescheduler.failures.messages import brief
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns

__all__ = ["CLOSING", "DTYPES", "HEADER_TAG", "HEADER_WORDS", "OwnSum", "SummingServer", "abandon"]

HEADER_TAG = 0  # operations are numbered from 1
HEADER_WORDS = 3  # int64: number of the operation, elements, index of the type
CLOSING = -1  # in place of a number: nothing more comes from this worker
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_HEADERS_AHEAD = 16
_LARGEST = 2**34  # elements; no gradient is larger
_GOODBYES_S = 5.0


class _Sum:
    """One operation's: what has come of it."""

    __slots__ = ("added", "early", "elements", "first", "kind", "lock", "total")

    def __init__(self, elements: int, kind: int, first: int) -> None:
        self.elements = elements
        self.kind = kind
        self.first = first  # the worker that has announced it first
        self.total: torch.Tensor | None = None
        self.added = 0
        self.early: dict[int, torch.Tensor] = {}
        self.lock = threading.Lock()


class OwnSum:
    """The sum of what this process has pushed itself, as something to wait for."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def end(self, failure: BaseException | None = None) -> None:
        """The sum is there, or will never be."""
        self._failure = failure
        self._ended.set()

    def wait(self) -> bool:
        """As of ``torch.distributed.Work``; ends when the server does, at the latest."""
        self._ended.wait()
        if self._failure is not None:
            raise self._failure.__cause__ or self._failure  # what gloo said tells more, and is looked into
        return True


class SummingServer:
    """Serves one fit.

    Args:
        group: Workers 0 to n-1, then the servers; gloo, and used by nothing else.
        workers: n.
        own: The worker that this process is, if it is one.
    """

    def __init__(self, group: dist.ProcessGroup, *, workers: int, own: int | None = None) -> None:
        self._group = group
        self._workers = workers
        self._own = own
        self._own_sums: dict[int, tuple[torch.Tensor, OwnSum]] = {}
        others = [rank for rank in range(workers) if rank != own]
        # Servers begin with another worker each: a server's position says which.
        turns = sorted(others, key=lambda rank: (rank - group.rank()) % workers)
        self._lock = threading.Lock()  # of the sums under way; nothing is called with it held
        self._sums: dict[int, _Sum] = {}
        self._pushed: list[queue.SimpleQueue[tuple[int, _Sum, torch.Tensor, dist.Work] | None]] = [
            queue.SimpleQueue() for _ in range(workers)
        ]
        self._replies = SendingTurns(group, turns, name="sums-sent", on_error=self._sending_failed)
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._adding = len(others)
        self._threads = [
            threading.Thread(
                target=partial(self._guarded, work, rank), name=f"bytescheduler-{name}-{rank}", daemon=True
            )
            for rank in others
            for name, work in (("headers", self._take_headers), ("sums", self._add_pushes))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def under_way(self) -> int:
        """Sums that lack a worker's push."""
        return len(self._sums)

    def wait(self, gone: Callable[[], bool]) -> None:
        """Wait until all workers have said that nothing more comes.

        Args:
            gone: Whether the rendezvous store is gone, and the run with it.

        Raises:
            RankFailedError: If a worker has died.
            UnsupportedError: If a worker has pushed what does not fit what another one has.
        """
        while not self._over.wait(0.2):
            # Rank 0 may have ended in order while others still say goodbye; if it has died, its connection has, too.
            if gone() and not self._over.wait(_GOODBYES_S):
                self._fail(RankFailedError(0, "the rendezvous store of the training is gone"))
        if self._failure is not None:
            abandon(self._group)
            raise self._failure
        for thread in self._threads:
            thread.join(5.0)

    def push_own(self, number: int, part: torch.Tensor) -> OwnSum:
        """Add ``part`` of the worker that this process is; its sum is put in its place.

        Raises:
            UnsupportedError: If another worker's push of that number is of another kind.
        """
        own = OwnSum()
        with self._lock:
            if self._failure is None:
                self._own_sums[number] = part, own
        if self._failure is not None:
            own.end(self._failure)
            return own
        rank = -1 if self._own is None else self._own
        summed = self._sum_of(rank, number, part.numel(), DTYPES.index(part.dtype))
        self._add(rank, number, summed, part.clone())
        return own

    def finish(self, timeout: float) -> bool:
        """Of a worker: wait until all others have said that nothing more comes; returns whether they all have."""
        return self._over.wait(timeout) and self._failure is None

    def stop(self, timeout: float) -> None:
        """Of a worker: send nothing more, and end all threads, once the group is idle or its connections are broken."""
        self._fail(RuntimeError("the fit has ended"))
        deadline = time.monotonic() + timeout
        self._replies.stop(timeout)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _sending_failed(self, error: BaseException) -> None:
        failed = RankFailedError(None, f"a sum could not be sent to it; {brief(error)}")
        failed.__cause__ = error
        self._fail(failed)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._failure = error
            own, self._own_sums = self._own_sums, {}
            self._over.set()
        self._replies.stop()
        for _, waiting in own.values():
            waiting.end(error)

    def _guarded(self, work: Callable[[int], None], rank: int | None) -> None:
        prefer_short_turns()
        try:
            work(-1 if rank is None else rank)
        except RuntimeError as error:
            failed = RankFailedError(rank, f"its connection to this parameter server has ended; {brief(error)}")
            failed.__cause__ = error
            self._fail(failed)
        except BaseException as error:
            self._fail(error)

    def _take_headers(self, rank: int) -> None:
        try:
            self._take_announced(rank)
        finally:
            self._pushed[rank].put(None)  # who adds up waits for nothing else

    def _take_announced(self, rank: int) -> None:
        coming: deque[tuple[torch.Tensor, dist.Work]] = deque()
        while True:
            # Gloo sends a message only when it has heard of the receive, so some are posted ahead of their headers.
            while len(coming) < _HEADERS_AHEAD:
                header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
                coming.append((header, self._group.recv([header], rank, HEADER_TAG)))
            header, announced = coming.popleft()
            announced.wait()
            number, elements, kind = header.tolist()
            if number == CLOSING:
                return
            summed = self._sum_of(rank, number, elements, kind)
            part = torch.empty(elements, dtype=DTYPES[kind])
            self._pushed[rank].put((number, summed, part, self._group.recv([part], rank, number)))

    def _sum_of(self, rank: int, number: int, elements: int, kind: int) -> _Sum:
        if not (number > 0 and 0 < elements <= _LARGEST and 0 <= kind < len(DTYPES)):
            raise UnsupportedError(
                f"Rank {rank} has announced operation {number} of {elements} elements of type {kind}."
            )
        with self._lock:
            summed = self._sums.setdefault(number, _Sum(elements, kind, rank))
        if (summed.elements, summed.kind) != (elements, kind):
            raise UnsupportedError(
                f"Rank {rank} pushes {elements} elements of {DTYPES[kind]} as operation {number}, but rank "
                f"{summed.first} pushes {summed.elements} of {DTYPES[summed.kind]}. All ranks need the same model."
            )
        return summed

    def _add_pushes(self, rank: int) -> None:
        while (pushed := self._pushed[rank].get()) is not None:
            number, summed, part, work = pushed
            work.wait()
            self._add(rank, number, summed, part)
        with self._lock:
            self._adding -= 1
            last = not self._adding
        if last:
            self._replies.close()
            self._over.set()

    def _add(self, rank: int, number: int, summed: _Sum, part: torch.Tensor) -> None:
        with summed.lock:
            summed.early[rank] = part
            while summed.added in summed.early:
                part = summed.early.pop(summed.added)
                summed.total = part if summed.total is None else summed.total.add_(part)
                summed.added += 1
            complete = summed.added == self._workers
        if not complete or summed.total is None:
            return
        with self._lock:
            del self._sums[number]
            here = self._own_sums.pop(number, None)
        for worker in range(self._workers):
            if worker != self._own:
                self._replies.put(summed.total, worker, number)
        if here is not None:
            here[0].copy_(summed.total)
            here[1].end()


def abandon(group: dist.ProcessGroup) -> None:
    """Break a group's connections, and keep it: gloo would wait for what is under way when the group ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    with suppress(RuntimeError):
        break_connections(group)
