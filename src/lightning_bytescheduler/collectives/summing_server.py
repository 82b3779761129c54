"""A parameter server: sums what workers push, and sends each of them the sum.

There are two threads for each worker. One takes headers and posts receives for the announced parts at once, so that a
link never idles for lack of a receive. The other waits for these parts and sums them. One more thread sends sums, to
one worker after the other. Summing releases the GIL. Parts are summed in the order of ranks, so a sum has the same bits
in each run; early parts wait. The memory in use is at most what workers have in flight: their credit times their
number.

A worker that is also a server has a :class:`SummingServer` in its process. Its own parts are not sent: see
:meth:`SummingServer.push_own`.

A part that does not match another worker's part of the same number is refused: the server ends and names the worker. It
also ends when a worker dies, and breaks all connections. It leaves in order, so workers look for the dead worker.

*Turns.* Messages to several ranks leave one by one (:class:`SendingTurns`), so that two senders rarely meet at one
receiver. If a worker sends to all servers at once, it shares its link among them, as all workers do, and all parts
arrive late together. In turns that begin at a different receiver on each rank, as in a Latin square, each message has
its sender's and its receiver's link to itself. The first parts can be summed, and travel back, while others follow.

Messages are matched by number, so ranks need not agree on this order. No rank waits forever, as receivers post a
receive without waiting: a server does so for every announced part, a worker before it pushes its own part.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import abandon
from lightning_bytescheduler.collectives.operations import PATIENCE, Coming
from lightning_bytescheduler.exceptions import RankFailedError, UnsupportedError
from lightning_bytescheduler.failures.messages import brief
from lightning_bytescheduler.scheduler.threads import start_thread

HEADER_TAG = 0  # operations are numbered from 1
HEADER_WORDS = 3  # int64: number of the operation, elements, index of the type
CLOSING = -1  # in place of a number: nothing more comes from this worker
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_HEADERS_AHEAD = 16
_LARGEST = 2**34  # elements; no gradient is larger
_GOODBYES_S = 5.0
_LOOK_EVERY_S = 0.2
_NONE = -1  # in place of a worker

_MOST_TURNS = 8  # of one receiver, per turn of another
_AHEAD = 2  # messages handed to gloo at once: the next begins without a wake-up when one has left


def turns_by_need(receivers: Sequence[int], needs: Sequence[float]) -> list[int]:
    """Return an order of turns in which each receiver occurs in proportion to its need, evenly spread.

    With equal turns, receivers with small needs would be done early, and the links to the others would then carry the
    rest alone.
    """
    least = min((need for need in needs if need > 0), default=1.0)
    alike: dict[int, list[int]] = {}  # receivers by number of turns
    for receiver, need in zip(receivers, needs, strict=True):
        alike.setdefault(min(max(round(need / least), 1), _MOST_TURNS), []).append(receiver)
    turns = []
    for count, ranks in alike.items():
        of_these = ranks * count
        turns += [((position + 0.5) / len(of_these), rank) for position, rank in enumerate(of_these)]
    return [rank for _, rank in sorted(turns, key=lambda turn: turn[0])]


class SendingTurns:
    """Sends messages on a separate thread, ``bytescheduler-<name>``, until :meth:`close` or :meth:`stop`.

    Args:
        on_error: Called on the thread once with a message's error; nothing is sent after that.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        receivers: Sequence[int],
        *,
        name: str,
        on_error: Callable[[BaseException], object],
    ) -> None:
        self._group = group
        self._waiting: dict[int, deque[tuple[torch.Tensor, int, dist.Work | None]]] = {}
        self._waiting.update((rank, deque()) for rank in receivers)
        self._turns = list(receivers)
        self._next = 0
        self._on_error = on_error
        self._work = threading.Condition()
        self._closed = False
        self._thread = start_thread(name, self._run)

    def put(self, message: torch.Tensor, receiver: int, number: int, header: dist.Work | None = None) -> None:
        """Send ``message`` as ``number`` in the receiver's turn; its header has been sent.

        Messages to one receiver leave in the order of these calls.
        """
        with self._work:
            self._waiting[receiver].append((message, number, header))
            self._work.notify()

    def close(self) -> None:
        """Send all waiting messages and end the thread; each ends with its group's timeout at the latest."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def stop(self, timeout: float = 0.0) -> bool:
        """Drop waiting messages, and end the thread after those in flight; returns whether it ended in time.

        Args:
            timeout: In seconds; to end messages in flight sooner, break the group's connections.
        """
        with self._work:
            self._closed = True
            for waiting in self._waiting.values():
                waiting.clear()
            self._work.notify()
        if timeout:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        under_way: deque[tuple[dist.Work, dist.Work | None]] = deque()
        try:
            while True:
                taken = self._take(wait=not under_way)
                if taken is None and not under_way:
                    return
                if taken is not None:
                    receiver, message, number, header = taken
                    under_way.append((self._group.send([message], receiver, number), header))
                if taken is None or len(under_way) >= _AHEAD:
                    for work in under_way.popleft():
                        if work is not None:
                            work.wait(PATIENCE)
        except BaseException as error:
            self.stop()
            self._on_error(error)

    def _take(self, *, wait: bool) -> tuple[int, torch.Tensor, int, dist.Work | None] | None:
        """Return the next message of the next receiver that has one; ``None`` if there is none, or the thread ends."""
        with self._work:
            while True:
                for distance in range(len(self._turns)):
                    position = (self._next + distance) % len(self._turns)
                    receiver = self._turns[position]
                    if self._waiting[receiver]:
                        self._next = position + 1
                        return (receiver, *self._waiting[receiver].popleft())
                if self._closed or not wait:
                    return None
                self._work.wait()


class _Sum:
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
        group: Workers 0 to n-1, then the servers; gloo, without other use.
        own: The worker in this process, if any.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], *, own: int = _NONE) -> None:
        self._ranks = ranks
        self._group = group
        self._workers = workers = len(ranks)
        self._own = own
        self._own_sums: dict[int, tuple[torch.Tensor, Coming]] = {}  # by number: where the sum goes, and its waiter
        others = [rank for rank in range(workers) if rank != own]
        # Each server begins with a different worker, given by its position.
        turns = sorted(others, key=lambda rank: (rank - group.rank()) % workers)
        self._lock = threading.Lock()  # guards the sums in progress; nothing is called with it held
        self._sums: dict[int, _Sum] = {}
        self._pushed: list[queue.SimpleQueue[tuple[int, _Sum, torch.Tensor, dist.Work] | None]] = [
            queue.SimpleQueue() for _ in range(workers)
        ]
        lost = partial(self._lost, None, "a sum could not be sent to it")
        self._replies = SendingTurns(group, turns, name="sums-sent", on_error=lost)
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._adding = len(others)
        if not others:
            self._over.set()
        self._threads = [
            start_thread(f"{name}-{rank}", partial(self._guarded, work, rank))
            for rank in others
            for name, work in (("headers", self._take_headers), ("sums", self._add_pushes))
        ]

    def push_own(self, number: int, here: torch.Tensor) -> Coming:
        """Add a part of the worker in this process.

        Args:
            number: Number of the operation.
            here: The part, which the sum replaces.

        Raises:
            UnsupportedError: If another worker's push of that number is of another kind.
        """
        own = Coming()
        with self._lock:
            if self._failure is None:
                self._own_sums[number] = here, own
        if self._failure is not None:
            own.end(self._failure)
            return own
        summed = self._sum_of(self._own, number, here.numel(), DTYPES.index(here.dtype))
        self._add(self._own, number, summed, here.clone())
        return own

    def finish(self, timeout: float) -> bool:
        """Wait, on a worker, until all others have said that nothing more comes; returns whether they all have."""
        return self._over.wait(timeout) and self._failure is None

    def stop(self, timeout: float) -> None:
        """Stop sending and end all threads, on a worker; the group has to be idle, or its connections broken."""
        self._fail(RuntimeError("the fit has ended"))
        deadline = time.monotonic() + timeout
        self._replies.stop(timeout)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _lost(self, rank: int | None, what: str, error: BaseException) -> None:
        failed = RankFailedError(rank, f"{what}; {brief(error)}")
        failed.__cause__ = error
        self._fail(failed)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._failure = error
            own = [one for _, one in self._own_sums.values()]
            self._own_sums = {}
            self._over.set()
        self._replies.stop()
        for waiting in own:
            waiting.end(error)

    def _guarded(self, work: Callable[[int], None], rank: int) -> None:
        try:
            work(rank)
        except RuntimeError as error:
            self._lost(self._ranks[rank], "its connection to this parameter server has ended", error)
        except BaseException as error:
            self._fail(error)
        finally:  # end the summing thread, to which this means an end in order unless a failure is recorded first
            self._pushed[rank].put(None)

    def _take_headers(self, rank: int) -> None:
        coming: deque[tuple[torch.Tensor, dist.Work]] = deque()
        while True:
            # Gloo sends a message only when it knows of its receive, so some are posted ahead.
            while len(coming) < _HEADERS_AHEAD:
                header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
                coming.append((header, self._group.recv([header], rank, HEADER_TAG)))
            header, announced = coming.popleft()
            announced.wait(PATIENCE)
            number, elements, kind = header.tolist()
            if number == CLOSING:
                return
            self._pushed[rank].put(self._announced(rank, number, elements, kind))

    def _announced(self, rank: int, number: int, elements: int, kind: int) -> tuple[int, _Sum, torch.Tensor, dist.Work]:
        if not (number > 0 and 0 < elements <= _LARGEST and 0 <= kind < len(DTYPES)):
            raise UnsupportedError(
                f"Rank {self._ranks[rank]} has announced operation {number} of {elements} elements of type {kind}."
            )
        summed = self._sum_of(rank, number, elements, kind)
        part = torch.empty(elements, dtype=DTYPES[kind])
        return number, summed, part, self._group.recv([part], rank, number)

    def _sum_of(self, rank: int, number: int, elements: int, kind: int) -> _Sum:
        with self._lock:
            summed = self._sums.setdefault(number, _Sum(elements, kind, rank))
        if (summed.elements, summed.kind) != (elements, kind):
            raise UnsupportedError(
                f"Rank {self._ranks[rank]} pushes {_in_words(elements, kind)} as operation {number}, but rank "
                f"{self._ranks[summed.first]} pushes {_in_words(summed.elements, summed.kind)}. All ranks "
                "need the same model."
            )
        return summed

    def _add_pushes(self, rank: int) -> None:
        while (pushed := self._pushed[rank].get()) is not None:
            number, summed, part, work = pushed
            work.wait(PATIENCE)
            self._add(rank, number, summed, part)
        with self._lock:
            self._adding -= 1
            last = not self._adding
        if last:
            self._replies.close()
            self._over.set()

    def _add(self, rank: int, number: int, summed: _Sum, part: torch.Tensor) -> None:
        """Record what ``rank`` has pushed, and reply if it is the last."""
        with summed.lock:
            summed.early[rank] = part
            while (following := summed.early.pop(summed.added, None)) is not None:
                summed.total = following if summed.total is None else summed.total.add_(following)
                summed.added += 1
            total = summed.total if summed.added == self._workers else None
        if total is None:
            return
        with self._lock:
            del self._sums[number]
            here, own = self._own_sums.pop(number, (None, None))
        for worker in range(self._workers):
            if worker != self._own:
                self._replies.put(total, worker, number)
        if here is not None:
            here.copy_(total)
        if own is not None:
            own.end()


def await_goodbyes(servers: Sequence[SummingServer], gone: Callable[[], bool]) -> None:
    """Wait until all workers have said that nothing more comes; if one server fails, all end.

    Args:
        servers: This process's servers: one for each group of workers that pushes separately, see
            ``push_pull.py``.
        gone: Whether the rendezvous store is gone, and the run with it.

    Raises:
        RankFailedError: If a worker has died.
        UnsupportedError: If a worker's push does not fit another worker's.
    """

    def failure() -> BaseException | None:
        return next((server._failure for server in servers if server._failure is not None), None)

    for server in servers:
        while not server._over.wait(_LOOK_EVERY_S):
            cause = failure()
            # Rank 0 may have ended in order while others still say goodbye. If it has died, its connection has, too.
            if cause is None and gone() and not server._over.wait(_GOODBYES_S):
                cause = RankFailedError(0, "the rendezvous store of the training is gone")
            if cause is not None:
                server._fail(cause)
    cause = failure()
    if cause is not None:
        for server in servers:
            abandon(server._group)
        raise cause
    for thread in [thread for server in servers for thread in server._threads]:
        thread.join(_GOODBYES_S)


def _in_words(elements: int, kind: int) -> str:
    return f"{elements} elements of {DTYPES[kind]}"
