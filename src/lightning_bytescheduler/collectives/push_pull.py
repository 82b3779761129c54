"""Push and pull: a worker sends its part of a gradient to one server, and takes the sum of all workers' from there.

A server is a process of its own on a spare machine (``summing_server.py``), or one of the workers (*colocated*), which
then adds up what the others send it. Each part goes to one server. Which one follows from the bytes that went to each
server before: parts are launched in one order on all workers (``launch_order.py``), so all come to the same answer, and
nothing has to be agreed on or named, whatever sizes a tuner tries. Spare servers together take the share
``2k(n-1) / (n^2 + kn - 2k)`` of the bytes (BytePS: Jiang et al., OSDI 2020, section 4.1), colocated ones the rest.

The mean is formed as in ``operations.py``: scaled by 1/n by each worker before the sum, and added in the order of
ranks. So two workers get DDP's bits, and more get the same bits in each run, wherever a part was summed.

A worker announces a part to a spare server with a *header* ahead of it. The receive of the sum is posted with the push:
into the same memory, as a server answers when it has all of the push. A colocated server knows what comes, as it sends
the same itself.

Why nobody waits forever is said in ``completion.py``: a colocated sum is an operation with a second half. A spare
server waits for nothing but pushes, and takes them as they come.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.operations import StartedOperation, scale
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.placement import server_weights

__all__ = ["CLOSING", "DTYPES", "HEADER_TAG", "HEADER_WORDS", "ByteShares", "PushPull", "abandon"]

HEADER_TAG = 0  # operations are numbered from 1
HEADER_WORDS = 3  # int64: number of the operation, elements, index of the type
CLOSING = -1  # in place of a number: nothing more comes from this worker
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_CLOSE = timedelta(seconds=5)


class ByteShares:
    """Gives each part to the server that is least full with it, each measured by its share.

    Args:
        weights: From ``scheduler.placement.server_weights``.

    Attributes:
        bytes_per_server: What went to each so far.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.bytes_per_server = [0] * len(weights)
        self._weights = weights
        self._usable = [server for server, weight in enumerate(weights) if weight]

    def expect(self, tensor: int, part: int) -> None:
        """Say which part is placed next, by numbers that are the same on all ranks; for those who go by them."""

    def next(self, nbytes: int) -> int:
        """The server of the next part; the same on all ranks that ask for the same parts in the same order."""
        held, weights = self.bytes_per_server, self._weights
        server = min(self._usable, key=lambda server: ((held[server] + nbytes) / weights[server], server))
        held[server] += nbytes
        return server


class PushPull:
    """A worker's side; :meth:`reduce` is an :data:`~lightning_bytescheduler.collectives.operations.Averaging`.

    Args:
        group: Workers 0 to n-1, then the spare servers; gloo, and used by the transport alone.
        workers: n.
        servers: k, no more than n.
        shares: Says which server has a part next; by bytes when left out.

    Attributes:
        group: As given.
        shares: What went where.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, workers: int, servers: int, shares: ByteShares | None = None
    ) -> None:
        self.group = group
        self.shares = ByteShares(server_weights(workers, servers)) if shares is None else shares
        self._workers = workers
        self._servers = servers
        self._rank = group.rank()

    @property
    def wire_share(self) -> float:
        """What a worker sends per byte of a gradient, on average."""
        n, weights = self._workers, self.shares._weights
        spare = sum(weights[: self._servers])
        return spare + (1 - spare) * 2 * (n - 1) / n

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
            raise UnsupportedError(
                f"Parameter servers do not add up gradients of {part.dtype}. Use architecture='allreduce'."
            )
        if factor is None:
            part.mul_(1.0 / self._workers)
        else:
            scale(part, factor)
        owner = self.shares.next(part.numel() * part.element_size())
        if owner < self._servers:
            return self._at_server(part, number, self._workers + owner)
        return self._at_worker(part, number, owner - self._servers)

    def close(self, *, idle: bool) -> None:
        """Tell the servers that no more comes from here, and leave the group; bounded.

        Args:
            idle: Whether everything has arrived. If not, connections are broken, which tells the servers as well.
        """
        if idle:
            header = torch.tensor([CLOSING, 0, 0])
            try:  # with a server that has gone, beginning to send fails as well
                works = [self.group.send([header], self._workers + k, HEADER_TAG) for k in range(self._servers)]
                for work in works:
                    work.wait(_CLOSE)
            except RuntimeError:  # a server is gone; nothing of this fit depends on it any more
                idle = False
        if not idle:
            abandon(self.group)

    def _at_server(self, part: torch.Tensor, number: int, server: int) -> StartedOperation:
        group = self.group
        header = torch.tensor([number, part.numel(), DTYPES.index(part.dtype)])
        pull = group.recv([part], server, number)
        return StartedOperation(
            [group.send([header], server, HEADER_TAG), group.send([part], server, number), pull], messages=True
        )

    def _at_worker(self, part: torch.Tensor, number: int, owner: int) -> StartedOperation:
        group = self.group
        if self._rank != owner:
            pull = group.recv([part], owner, number)
            return StartedOperation([group.send([part], owner, number), pull], messages=True)
        others = [rank for rank in range(self._workers) if rank != owner]
        received = {rank: torch.empty_like(part) for rank in others}
        works = [group.recv([received[rank]], rank, number) for rank in others]

        def add_up() -> StartedOperation:
            # In the order of ranks, as a spare server does: the bits do not depend on where a part is summed.
            if owner:
                total = received[0]
                for rank in range(1, self._workers):
                    total.add_(part if rank == owner else received[rank])
                part.copy_(total)
            else:
                for rank in others:
                    part.add_(received[rank])
            return StartedOperation([group.send([part], rank, number) for rank in others], messages=True, closing=True)

        return StartedOperation(works, add_up, messages=True)


def abandon(group: dist.ProcessGroup) -> None:
    """Break a group's connections, and keep it: gloo would wait for what is under way when the group ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    with suppress(RuntimeError):
        break_connections(group)
