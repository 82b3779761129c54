"""Push and pull: a worker sends its part of a gradient to one server, and takes the sum of all workers' from there.

A server is a process of its own on a spare machine (``summing_server.py``), or one of the workers (*colocated*), which
then adds up what the others send it. Each part goes to one server. Which one follows from the bytes that went to each
server before: parts are launched in one order on all workers (``launch_order.py``), so all come to the same answer, and
nothing has to be agreed on or named, whatever sizes a tuner tries. Spare servers together take the share
``2k(n-1) / (n^2 + kn - 2k)`` of the bytes (BytePS: Jiang et al., OSDI 2020, section 4.1), colocated ones the rest.

The mean is formed as in ``operations.py``: scaled by 1/n by each worker before the sum, and added in the order of
ranks. So two workers get DDP's bits, and more get the same bits in each run, wherever a part was summed.

A worker announces a part to its server with a *header* as it is launched; the part follows in its turn, see
``sending_turns.py``. The receive of the sum is posted before the push: into the same memory, as a server answers when
it has all of the push. A worker's own part of what it adds up itself never travels.

Why nobody waits forever: a server, colocated or not, posts a receive for whatever is announced to it, whatever its own
worker has launched. So each push arrives. Take the oldest part that has not ended everywhere: each worker has credit to
launch it, as all older ones have ended, and sends it before anything younger to that server. So it is summed. Its sum
is received where it was launched, so servers never wait for a worker, either. Sums of one server end in the order of
launches; those of two need not, so each has a thread that waits for them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import abandon
from lightning_bytescheduler.collectives.operations import Pull, StartedOperation, scale
from lightning_bytescheduler.collectives.sending_turns import OnSent, SendingTurns, turns_by_need
from lightning_bytescheduler.collectives.summing_server import (
    CLOSING,
    DTYPES,
    ENCODED,
    HEADER_TAG,
    QUESTION,
    Coming,
    OnReply,
    SummingServer,
)
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.scheduler.placement import PLACEMENTS, Nodes, Placement, mixed_server, server_weights
from lightning_bytescheduler.scheduler.task import Passage

__all__ = ["PlacedParts", "PushPull"]

_CLOSE = timedelta(seconds=5)
_QUESTIONS = 1 << 30  # operations have lower numbers
_BY_PART, _BY_TENSOR = 0.6180339887498949, 0.7548776662466927
_THREADS_S = 2.0  # a group without connections ends its threads' waits at once


class PlacedParts:
    """Says which server has which part in one fit, and what each has had.

    By default parts go by bytes: each to the server that is least full with it, measured by its share. BytePS's mixed
    mode goes by the number of the bucket and of the part, so that a part is at one server for as long as sizes stay.

    Args:
        how: One of ``scheduler.placement.PLACEMENTS``.
        workers: n.
        servers: k, no more than n.
        kept: Whether who adds up keeps something of a part, which counts for the bits: so that parts stay where they
            are, they are placed by their numbers alone, spread by the shares. In the order of launches one could be at
            another server in the next run.
        nodes: The ranks of each, where one of them pushes for all; these are the workers then.

    Attributes:
        weights: Of each server, from ``scheduler.placement.server_weights``.
        bytes_per_server: What went to each so far.
    """

    def __init__(
        self, how: str = PLACEMENTS[0], *, workers: int, servers: int, kept: bool = False, nodes: Nodes = ()
    ) -> None:
        self.weights = server_weights(workers, servers)
        self.bytes_per_server = [0] * len(self.weights)
        self._made = how, workers, servers
        self._nodes = nodes
        self._usable = [server for server, weight in enumerate(self.weights) if weight]
        self._place: Callable[[int, int], int] | None = _spread(self.weights) if kept else None
        if how == "mixed":
            self._place = cache(lambda tensor, part: mixed_server(tensor, part, workers, servers))
        self._part = 0, 0

    @property
    def so_far(self) -> Placement:
        """Bytes that this worker has pushed to each server, all steps together."""
        return Placement(*self._made, tuple(self.bytes_per_server), self._nodes)

    def expect(self, tensor: int, part: int) -> None:
        """Say which part is placed next, by numbers that are the same on all ranks: of the bucket, and in it."""
        self._part = tensor, part

    def next(self, nbytes: int) -> int:
        """The server of the next part; the same on all ranks that ask for the same parts in the same order."""
        held, weights = self.bytes_per_server, self.weights
        if self._place is None:
            server = min(self._usable, key=lambda one: ((held[one] + nbytes) / weights[one], one))
        else:
            server = self._place(*self._part)
        held[server] += nbytes
        return server


def _spread(weights: Sequence[float]) -> Callable[[int, int], int]:
    """Says which server has a part: multiples of an irrational number are spread more evenly than any hash."""
    edges = [*itertools.accumulate(weights)]
    last = max(server for server, weight in enumerate(weights) if weight)
    return lambda tensor, part: min(bisect.bisect(edges, (part * _BY_PART + tensor * _BY_TENSOR) % 1.0), last)


class PushPull:
    """A worker's side; :meth:`reduce` is an :data:`~lightning_bytescheduler.collectives.operations.Averaging`.

    Args:
        group: Workers 0 to n-1, then the spare servers; gloo, and used by the transport alone.
        ranks: The workers', as errors name them.
        shares: Says which server has a part next.
        timeout: Longest wait for a sum.

    Attributes:
        group: As given.
        shares: What went where.
    """

    local: dist.ProcessGroup | None = None
    """The ranks that this one pushes for besides itself, and that push for it, if there are any."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        shares: PlacedParts,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        self.group = group
        self.shares = shares
        self._timeout = timeout
        self._workers = self._averaged = workers = len(ranks)
        self._servers = servers = group.size() - workers
        self._rank = group.rank()
        self._questions = itertools.count(_QUESTIONS)
        here = any(shares.weights[servers:])
        self._colocated = SummingServer(group, ranks, own=self._rank) if here else None
        spare = [workers + server for server in range(servers)]
        colocated = [rank for rank in range(workers) if rank != self._rank] if self._colocated is not None else []
        # Each worker begins with another server, and goes round in the same direction.
        self._receivers = [*_from(self._rank, spare), *_from(self._rank, colocated)]
        needs = [shares.weights[rank - workers if rank >= workers else servers + rank] for rank in self._receivers]
        turns = turns_by_need(self._receivers, needs)
        self._pushes = SendingTurns(group, turns, name="pushes", on_error=lambda _: abandon(group))

    @property
    def wire_share(self) -> float:
        """What a rank sends over the network per byte of a gradient, on average."""
        n, spare = self._workers, sum(self.shares.weights[: self._servers])
        return (spare * n + (1 - spare) * 2 * (n - 1)) / self._averaged

    def reduce(
        self, group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float | None = None
    ) -> StartedOperation:
        """Average ``part`` over all workers, in place, this one's counting ``factor``.

        Args:
            group: Is not used: the servers' has other ranks besides.
            part: Of a gradient, on a CPU.
            number: Of the operation, the same on all workers.
            factor: What this worker's counts; as much as any other's when left out.

        Raises:
            UnsupportedError: If servers do not add up what ``part`` consists of.
        """
        if part.dtype not in DTYPES:
            raise UnsupportedError(f"Parameter servers do not add up gradients of {part.dtype}. Leave servers out.")
        if factor is None:
            part.mul_(1.0 / self._averaged)
        else:
            scale(part, factor)
        return self.start(part, number)

    def start(self, part: torch.Tensor, number: int) -> StartedOperation:
        """Begin to add up ``part``, which has been scaled; called in the order of launches."""
        rank = self.next_server(part.nbytes)
        travels = 0 if self.adds_up(rank) else part.nbytes
        passage = Passage(rank, pushed=travels, pulled=travels)
        return StartedOperation([self.push(part, number, rank, passage)], messages=True, lane=rank, passage=passage)

    def push(self, part: torch.Tensor, number: int, server: int, passage: Passage) -> Coming | Pull:
        """Push ``part`` to ``server``; what is returned ends when the sum is in its place."""
        if (own := self.adds_up(server)) is not None:
            return own.push_own(number, part)
        pull = Pull(self.group.recv([part], server, number), self._timeout)
        self._push(part, server, number, DTYPES.index(part.dtype), passage.sent)
        return pull

    def expect(self, tensor: int, part: int) -> None:
        """Say which part is started next; see :meth:`PlacedParts.expect`."""
        self.shares.expect(tensor, part)

    def next_server(self, nbytes: int) -> int:
        """Rank in the group of who has the next part, of so many bytes; see :meth:`PlacedParts.next`."""
        owner = self.shares.next(nbytes)
        return self._workers + owner if owner < self._servers else owner - self._servers

    def adds_up(self, server: int) -> SummingServer | None:
        """``server``, from :meth:`next_server`, where it is in this process; else ``None``."""
        return self._colocated if server == self._rank else None

    def exchange(self, server: int, number: int, message: torch.Tensor, reply: torch.Tensor, on_sent: OnSent) -> Pull:
        """Push what is encoded to ``server``, and pull what comes of it.

        Args:
            server: From :meth:`next_server`.
            number: Of the operation, the same on all workers.
            message: What is pushed, of uint8.
            reply: Memory for what is pulled, of uint8; what comes may be shorter.
            on_sent: Told when the push has left.
        """
        pull = Pull(self.group.recv([reply], server, number), self._timeout)
        self._push(message, server, number, ENCODED, on_sent)
        return pull

    def ask(self, question: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
        """What the spare servers answer to a question, while nothing is under way.

        Args:
            question: Of uint8.
            nbytes: Of an answer, at most.

        Raises:
            RuntimeError: If a connection has ended.
        """
        number = next(self._questions)
        answers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self._servers)]
        works = []
        for server, answer in enumerate(answers, self._workers):
            works.append(self.group.recv([answer], server, number))
            self._push(question, server, number, QUESTION)
        for work in works:
            work.wait(self._timeout)
        return answers

    def watch_replies(self, on_reply: OnReply) -> None:
        """Have each sum that leaves this process told of, where workers are servers besides."""
        if self._colocated is not None:
            self._colocated.on_reply = on_reply

    def _push(self, message: torch.Tensor, server: int, number: int, kind: int, on_sent: OnSent | None = None) -> None:
        header = torch.tensor([number, message.numel(), kind])
        self._pushes.put(message, server, number, self.group.send([header], server, HEADER_TAG), on_sent)

    def close(self, *, idle: bool) -> None:
        """Tell the servers that no more comes from here, and leave the group; bounded.

        Args:
            idle: Whether everything has arrived. If not, connections are broken, which tells the servers as well.
        """
        if idle:
            header = torch.tensor([CLOSING, 0, 0], device="cpu")
            try:
                works = [self.group.send([header], rank, HEADER_TAG) for rank in self._receivers]
                for work in works:
                    work.wait(_CLOSE)
            except RuntimeError:  # a server is gone; nothing of this fit depends on it any more
                idle = False
            # Others may still wait for sums from here.
            idle = idle and (self._colocated is None or self._colocated.finish(_CLOSE.total_seconds()))
        if not idle:
            abandon(self.group)
        self._pushes.stop(_THREADS_S)
        if self._colocated is not None:
            self._colocated.stop(_THREADS_S)


def _from(first: int, ranks: list[int]) -> list[int]:
    """The same ranks, beginning with another one."""
    first %= max(len(ranks), 1)
    return ranks[first:] + ranks[:first]
