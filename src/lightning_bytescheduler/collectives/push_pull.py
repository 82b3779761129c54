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

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.operations import StartedOperation, scale
from lightning_bytescheduler.collectives.sending_turns import SendingTurns
from lightning_bytescheduler.collectives.summing_server import CLOSING, DTYPES, HEADER_TAG, SummingServer, abandon
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.scheduler.placement import server_weights

__all__ = ["ByteShares", "PushPull", "abandon"]

_CLOSE = timedelta(seconds=5)
_THREADS_S = 2.0  # a group without connections ends its threads' waits at once


class ByteShares:
    """Gives each part to the server that is least full with it, each measured by its share.

    Args:
        weights: From ``scheduler.placement.server_weights``.

    Attributes:
        weights: As given.
        bytes_per_server: What went to each so far.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.bytes_per_server = [0] * len(weights)
        self.weights = weights
        self._usable = [server for server, weight in enumerate(weights) if weight]

    def expect(self, tensor: int, part: int) -> None:
        """Say which part is placed next, by numbers that are the same on all ranks; for those who go by them."""

    def next(self, nbytes: int) -> int:
        """The server of the next part; the same on all ranks that ask for the same parts in the same order."""
        held, weights = self.bytes_per_server, self.weights
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
        self._colocated = (
            SummingServer(group, workers=workers, own=self._rank) if any(self.shares.weights[servers:]) else None
        )
        spare = [workers + server for server in range(servers)]
        colocated = [rank for rank in range(workers) if rank != self._rank] if self._colocated is not None else []
        self._receivers = spare + colocated
        self._pushes: SendingTurns | None = None
        if self._receivers:
            # Each worker begins with another server, and goes round in the same direction.
            first = self._rank % len(self._receivers)
            turns = self._receivers[first:] + self._receivers[:first]
            self._pushes = SendingTurns(group, turns, name="pushes", on_error=lambda _: abandon(group))

    @property
    def wire_share(self) -> float:
        """What a worker sends per byte of a gradient, on average."""
        n, weights = self._workers, self.shares.weights
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
        rank = self._workers + owner if owner < self._servers else owner - self._servers
        if rank == self._rank and self._colocated is not None:
            return StartedOperation([self._colocated.push_own(number, part)], messages=True, lane=rank)
        pushes = self._pushes
        if pushes is None:
            raise RuntimeError("A part was given to a server that is not there.")
        header = torch.tensor([number, part.numel(), DTYPES.index(part.dtype)])
        pull = self.group.recv([part], rank, number)
        pushes.put(part, rank, number, self.group.send([header], rank, HEADER_TAG))
        return StartedOperation([pull], messages=True, lane=rank)

    def close(self, *, idle: bool) -> None:
        """Tell the servers that no more comes from here, and leave the group; bounded.

        Args:
            idle: Whether everything has arrived. If not, connections are broken, which tells the servers as well.
        """
        if idle:
            header = torch.tensor([CLOSING, 0, 0])
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
        if self._pushes is not None:
            self._pushes.stop(_THREADS_S)
        if self._colocated is not None:
            self._colocated.stop(_THREADS_S)
