"""A parameter server: adds up what workers push, and sends each of them the sum.

For each worker two threads: one takes headers and posts receives for what they announce, at once, so that a link is
never idle for want of a receive; the other waits for what was posted, and adds it up. One more sends sums, to one
worker after the other (``sending_turns.py``). Adding releases the interpreter's lock. Parts are added in the order of
ranks, whoever comes first, so a sum has the same bits in each run; what comes early waits. What is held at once is what
workers have under way: their credit, times their number at most.

A worker that is a server besides has one of these in its process. Its own parts never travel: see :meth:`push_own`.

What travels encoded says itself what it is: see :class:`SumsOfEncoded`, which can add that up. Where a worker is a
server besides, who knows what it has of its parts itself adds them up: see :meth:`SummingServer.combine`.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.sending_turns import PATIENCE, SendingTurns
from lightning_bytescheduler.exceptions import RankFailedError, UnsupportedError
from lightning_bytescheduler.failures.messages import brief
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns

HEADER_TAG = 0  # operations are numbered from 1
HEADER_WORDS = 3  # int64: number of the operation, elements, index of the type
CLOSING = -1  # in place of a number: nothing more comes from this worker
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
ENCODED = len(DTYPES)  # in place of a type: bytes, which SumsOfEncoded can read
QUESTION = ENCODED + 1  # to SumsOfEncoded, from one worker
_KINDS = QUESTION + 1
_HEADERS_AHEAD = 16
_LARGEST = 2**34  # elements; no gradient is larger
_GOODBYES_S = 5.0


OnReply = Callable[[int, int, int, float, float], object]
"""Told of (worker, number of the operation, bytes, start, end) of a sum that was sent; on the thread that sends."""


_Combine = Callable[[list[torch.Tensor]], torch.Tensor]


class SumsOfEncoded(Protocol):
    """Adds up what only it can read; on several threads, one for each sum at a time."""

    def added(self, total: Any, message: torch.Tensor) -> Any:
        """Add a worker's message, in the order of ranks, to what ranks before it have sent: ``None`` at first."""

    def reply(self, total: Any) -> torch.Tensor:
        """What all workers get, once all have sent something: flat, of uint8."""

    def answer(self, message: torch.Tensor) -> torch.Tensor:
        """The answer to a worker's question; called while no sum is under way."""


class _Sum:
    """One operation's: what has come of it."""

    __slots__ = ("added", "early", "elements", "first", "kind", "lock", "since", "total")

    def __init__(self, elements: int, kind: int, first: int) -> None:
        self.elements = elements
        self.kind = kind
        self.first = first  # the worker that has announced it first
        self.total: Any = None  # a tensor, or what adds up what is encoded
        self.added = 0
        self.early: dict[int, torch.Tensor] = {}
        self.lock = threading.Lock()
        self.since = time.monotonic()


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
        ranks: The workers', as errors and :attr:`waits_for` name them; 0 to n-1 when left out.
        encoded: Adds up what travels encoded; :meth:`combine` does, where the process is a worker.

    Attributes:
        on_reply: Told of each sum that has left; may be set at any time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        workers: int,
        own: int | None = None,
        ranks: Sequence[int] = (),
        encoded: SumsOfEncoded | None = None,
    ) -> None:
        self._ranks = ranks or range(workers)
        self._encoded = encoded
        self.on_reply: OnReply | None = None
        self._group = group
        self._workers = workers
        self._own = own
        # By number: what is made of all pushes here, or where their sum goes; and who waits for that.
        self._own_sums: dict[int, tuple[_Combine | torch.Tensor, OwnSum]] = {}
        others = [rank for rank in range(workers) if rank != own]
        # Servers begin with another worker each: a server's position says which.
        turns = sorted(others, key=lambda rank: (rank - group.rank()) % workers)
        self._lock = threading.Lock()  # of the sums under way; nothing is called with it held
        self._sums: dict[int, _Sum] = {}
        self._pushed: list[queue.SimpleQueue[tuple[int, _Sum | None, torch.Tensor, dist.Work] | None]] = [
            queue.SimpleQueue() for _ in range(workers)
        ]
        self._replies = SendingTurns(group, turns, name="sums-sent", on_error=self._sending_failed)
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._adding = len(others)
        if not others:
            self._over.set()
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

    @property
    def waits_for(self) -> tuple[tuple[int, ...], float]:
        """Workers whose push is missing from the oldest sum under way, and for how many seconds it has been that."""
        with self._lock:
            oldest = min(self._sums.values(), key=lambda summed: summed.since, default=None)
        if oldest is None:
            return (), 0.0
        with oldest.lock:
            lacks = [self._ranks[one] for one in range(oldest.added, self._workers) if one not in oldest.early]
        return tuple(lacks), time.monotonic() - oldest.since

    @property
    def failure(self) -> BaseException | None:
        """Why it has ended, if not in order."""
        return self._failure

    def wait(self, gone: Callable[[], bool], elsewhere: Callable[[], BaseException | None] = lambda: None) -> None:
        """Wait until all workers have said that nothing more comes.

        Args:
            gone: Whether the rendezvous store is gone, and the run with it.
            elsewhere: Why this one has to end, too, if it has.

        Raises:
            RankFailedError: If a worker has died.
            UnsupportedError: If a worker has pushed what does not fit what another one has.
        """
        while not self._over.wait(0.2):
            # Rank 0 may have ended in order while others still say goodbye; if it has died, its connection has, too.
            if gone() and not self._over.wait(_GOODBYES_S):
                self._fail(RankFailedError(0, "the rendezvous store of the training is gone"))
            cause = elsewhere()
            if cause is not None:
                self._fail(cause)
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
        return self._push_own(number, part.numel(), DTYPES.index(part.dtype), part, part.clone())

    def combine(self, number: int, combine: _Combine) -> OwnSum:
        """Have a part that travels encoded added up, of the worker that this process is.

        Args:
            number: Of the operation.
            combine: Called once, on any thread, with what the other workers have pushed, the next one's first; returns
                what they get.
        """
        return self._push_own(number, 1, ENCODED, combine, torch.empty(0, dtype=torch.uint8))

    def _push_own(
        self, number: int, elements: int, kind: int, here: _Combine | torch.Tensor, part: torch.Tensor
    ) -> OwnSum:
        own, rank = OwnSum(), -1 if self._own is None else self._own
        with self._lock:
            if self._failure is None:
                self._own_sums[number] = here, own
        if self._failure is not None:
            own.end(self._failure)
            return own
        self._add(rank, number, self._sum_of(rank, number, elements, kind), part)
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
            own = [one for _, one in self._own_sums.values()]
            self._own_sums = {}
            self._over.set()
        self._replies.stop()
        for waiting in own:
            waiting.end(error)

    def _guarded(self, work: Callable[[int], None], rank: int | None) -> None:
        prefer_short_turns()
        try:
            work(-1 if rank is None else rank)
        except RuntimeError as error:
            name = None if rank is None else self._ranks[rank]
            failed = RankFailedError(name, f"its connection to this parameter server has ended; {brief(error)}")
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
            announced.wait(PATIENCE)
            number, elements, kind = header.tolist()
            if number == CLOSING:
                return
            summed = None if kind == QUESTION else self._sum_of(rank, number, elements, kind)
            if summed is None and not 0 < elements <= _LARGEST:
                raise UnsupportedError(f"Rank {self._ranks[rank]} has announced a question of {elements} bytes.")
            if self._encoded is None and (summed is None or (kind == ENCODED and self._own is None)):
                raise UnsupportedError(
                    f"Rank {self._ranks[rank]} pushes compressed gradients, and this server adds up no such."
                )
            part = torch.empty(elements, dtype=DTYPES[kind] if kind < ENCODED else torch.uint8)
            self._pushed[rank].put((number, summed, part, self._group.recv([part], rank, number)))

    def _sum_of(self, rank: int, number: int, elements: int, kind: int) -> _Sum:
        if not (number > 0 and 0 < elements <= _LARGEST and 0 <= kind < _KINDS):
            raise UnsupportedError(
                f"Rank {self._ranks[rank]} has announced operation {number} of {elements} elements of type {kind}."
            )
        if kind == ENCODED:
            elements = 0  # bytes may be as many as each rank's need
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
            if summed is None and self._encoded is not None:
                self._replies.put(self._encoded.answer(part), rank, number)
            elif summed is not None:
                self._add(rank, number, summed, part)
        with self._lock:
            self._adding -= 1
            last = not self._adding
        if last:
            self._replies.close()
            self._over.set()

    def _add(self, rank: int, number: int, summed: _Sum, part: torch.Tensor) -> None:
        """Note what ``rank`` has pushed, and reply where it is the last."""
        with summed.lock:
            summed.early[rank] = part
            while summed.added in summed.early and self._adds(summed):
                self._add_next(number, summed)
            complete = summed.added + len(summed.early) == self._workers
        if not complete:
            return
        with self._lock:
            del self._sums[number]
            here, own = self._own_sums.pop(number, (None, None))
        if self._encoded is not None and summed.kind == ENCODED:
            self._reply(self._encoded.reply(summed.total), number)
        elif summed.total is not None:
            self._reply(summed.total, number)
            if isinstance(here, torch.Tensor):
                here.copy_(summed.total)
        elif here is not None and not isinstance(here, torch.Tensor) and self._own is not None:
            others = [(self._own + distance) % self._workers for distance in range(1, self._workers)]
            self._reply(here([summed.early[other] for other in others]), number)
        if own is not None:
            own.end()

    def _adds(self, summed: _Sum) -> bool:
        """Whether pushes are added up here as they come, and not by the worker that this process is."""
        return summed.kind != ENCODED or self._encoded is not None

    def _add_next(self, number: int, summed: _Sum) -> None:
        part = summed.early.pop(summed.added)
        if summed.kind == ENCODED and self._encoded is not None:
            try:
                summed.total = self._encoded.added(summed.total, part)
            except (ValueError, RuntimeError) as error:
                worker = self._ranks[summed.added]
                raise UnsupportedError(
                    f"What rank {worker} pushes as operation {number} cannot be added up: {brief(error)}"
                ) from error
        else:
            summed.total = part if summed.total is None else summed.total.add_(part)
        summed.added += 1

    def _reply(self, message: torch.Tensor, number: int) -> None:
        """Send a sum to all other workers."""
        told = self.on_reply
        for worker in range(self._workers):
            if worker != self._own:
                on_sent = None if told is None else partial(told, worker, number, message.nbytes)
                self._replies.put(message, worker, number, on_sent=on_sent)


class RailServers:
    """One server for several groups of workers, each of which pushes by itself: see ``node_push_pull.py``.

    Args:
        groups: As of :class:`SummingServer`.
        rails: The workers of each.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], rails: Sequence[Sequence[int]]) -> None:
        self._groups = groups
        self._servers = [
            SummingServer(group, workers=len(rail), ranks=rail) for group, rail in zip(groups, rails, strict=True)
        ]

    @property
    def waits_for(self) -> tuple[tuple[int, ...], float]:
        """See :class:`SummingServer`; of all groups."""
        return max((server.waits_for for server in self._servers), key=lambda waits: waits[1])

    def wait(self, gone: Callable[[], bool]) -> None:
        """See :class:`SummingServer`. Where one group has failed, the others' connections are broken, too."""
        try:
            for server in self._servers:
                server.wait(gone, self._failure)
        except BaseException:
            for group in self._groups:
                abandon(group)
            raise

    def _failure(self) -> BaseException | None:
        return next((server.failure for server in self._servers if server.failure is not None), None)


def _in_words(elements: int, kind: int) -> str:
    return "something encoded" if kind >= ENCODED else f"{elements} elements of {DTYPES[kind]}"


def abandon(group: dist.ProcessGroup) -> None:
    """Break a group's connections, and keep it: gloo would wait for what is under way when the group ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    with suppress(RuntimeError):
        break_connections(group)
