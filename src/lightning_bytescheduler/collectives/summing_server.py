"""A parameter server: adds up what workers push, and sends each of them the sum.

For each worker two threads: one takes headers and posts receives for what they announce, at once, so that a link is
never idle for want of a receive; the other waits for what was posted, and adds it up. One more lets go of what was
sent. Adding releases the interpreter's lock. Parts are added in the order of ranks, whoever comes first, so a sum has
the same bits in each run; what comes early waits. What is held at once is what workers have under way: their credit,
times their number at most.

A part that does not match what another worker has announced under the same number is refused: the server ends, and says
which worker it was. So does it when a worker dies. It then breaks all connections, but lives on for a few seconds:
workers find that they cannot go on, that no server has died, and look for the worker that has.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.push_pull import CLOSING, DTYPES, HEADER_TAG, HEADER_WORDS, abandon
from lightning_bytescheduler.exceptions import RankFailedError, UnsupportedError
from lightning_bytescheduler.failures.messages import brief
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns

__all__ = ["SummingServer"]

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


class SummingServer:
    """Serves one fit.

    Args:
        group: Workers 0 to n-1, then the servers; gloo, and used by nothing else.
        workers: n.
    """

    def __init__(self, group: dist.ProcessGroup, *, workers: int) -> None:
        self._group = group
        self._workers = workers
        self._lock = threading.Lock()  # of the sums under way; nothing is called with it held
        self._sums: dict[int, _Sum] = {}
        self._pushed: list[queue.SimpleQueue[tuple[int, _Sum, torch.Tensor, dist.Work] | None]] = [
            queue.SimpleQueue() for _ in range(workers)
        ]
        self._sent: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._adding = workers
        self._threads = [
            threading.Thread(
                target=partial(self._guarded, work, rank), name=f"bytescheduler-{name}-{rank}", daemon=True
            )
            for rank in range(workers)
            for name, work in (("headers", self._take_headers), ("sums", self._add_pushes))
        ]
        self._threads.append(
            threading.Thread(target=partial(self._guarded, self._let_go, None), name="bytescheduler-sent", daemon=True)
        )
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

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._failure = error
            self._over.set()

    def _guarded(self, work: Callable[[int], None], rank: int | None) -> None:
        prefer_short_turns()
        try:
            work(-1 if rank is None else rank)
        except RuntimeError as error:
            self._fail(RankFailedError(rank, f"its connection to this parameter server has ended; {brief(error)}"))
        except BaseException as error:
            self._fail(error)

    def _take_headers(self, rank: int) -> None:
        while True:
            header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
            self._group.recv([header], rank, HEADER_TAG).wait()
            number, elements, kind = header.tolist()
            if number == CLOSING:
                self._pushed[rank].put(None)
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
            with summed.lock:
                summed.early[rank] = part
                while summed.added in summed.early:
                    part = summed.early.pop(summed.added)
                    summed.total = part if summed.total is None else summed.total.add_(part)
                    summed.added += 1
                complete = summed.added == self._workers
            if complete and summed.total is not None:
                with self._lock:
                    del self._sums[number]
                for worker in range(self._workers):
                    self._sent.put(self._group.send([summed.total], worker, number))
        with self._lock:
            self._adding -= 1
            last = not self._adding
        if last:
            self._sent.put(None)

    def _let_go(self, _: int) -> None:
        while (work := self._sent.get()) is not None:
            work.wait()
        self._over.set()
