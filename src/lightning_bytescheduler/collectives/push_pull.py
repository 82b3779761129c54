"""Push and pull: a worker sends a part of its gradient to one server and receives the sum of all workers' parts.

A server is a separate process on a spare machine (``summing_server.py``), or one of the workers (*colocated*), which
then sums what the others send it. Each part goes to one server (:class:`PlacedParts`). Parts are launched in one order
on all workers (``launch_order.py``), so all choose alike without an agreement, whatever sizes a tuner tries.

*Who gets how much.* With ``n`` workers, ``k`` *spare* servers can run on separate machines, and one colocated server
with each worker. A byte on a spare server crosses only links of workers. A byte on a colocated server also crosses the
link of that server's own worker. All links are busy equally long if the spare servers together take the share
``2k(n-1) / (n^2 + kn - 2k)`` of the bytes and the colocated ones the rest, each equally much (BytePS: Jiang et al., "A
Unified Architecture for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020, section
4.1). With ``k = n`` the spare servers take everything; with ``k = 0`` there are only colocated ones.

The mean is formed as in ``operations.py``: each worker scales by 1/n, and the sum is formed in the order of ranks. So
two workers get DDP's bits, and more get the same bits in each run, wherever a part was summed.

A worker announces a part to its server with a *header* at launch; the part follows in its turn (``summing_server.py``).
The receive of the sum is posted before the push, into the same memory. That is safe, as a server answers only when it
has all of the push. A colocated server takes its own worker's parts from memory.

Why no rank waits forever: a server, colocated or not, posts a receive for every announced part, whatever its own worker
has launched. So each push arrives. Take the oldest part that has not ended everywhere: each worker has credit to launch
it, as all older ones have ended, and sends it to its server before anything younger. So it is summed. Its sum is
received where it was launched, so servers never wait for a worker, either. Sums of one server end in launch order. Sums
of two servers need not, so a separate thread waits for each server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from lightning_bytescheduler.checks import require_one_of
from lightning_bytescheduler.collectives.groups import abandon
from lightning_bytescheduler.collectives.operations import PATIENCE, Coming, Pull, StartedOperation, scale
from lightning_bytescheduler.collectives.summing_server import (
    CLOSING,
    DTYPES,
    HEADER_TAG,
    SendingTurns,
    SummingServer,
    turns_by_need,
)
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.scheduler.threads import WorkThread

__all__ = ["NodePushPull", "PlacedParts", "PushPull"]

_CLOSE = timedelta(seconds=5)
_THREADS_S = 2.0  # waits end at once in a group without connections

PLACEMENTS = ("balanced", "mixed")
"""Allowed placements; the first is the default."""

MIXED_MODE_VARIABLE = "BYTEPS_ENABLE_MIXED_MODE"

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node."""

_NODES_SHOWN = 4
_WORD = (1 << 64) - 1
_MIXED_BOUND = 101  # BytePS's: a key's hash is taken modulo this, and smaller results go to spare servers


@dataclass(frozen=True, slots=True)
class Placement:
    """The bytes that each server has received.

    Servers 0 to k-1 are the spare ones; k to k+n-1 are colocated with workers 0 to n-1.

    Attributes:
        how: One of ``PLACEMENTS``.
        workers: n.
        spare_servers: k, at most n.
        bytes_per_server: Bytes by number of the server.
        nodes: The ranks of each node, if one of them pushes the node's sum; then nodes are the workers, and the bytes
            are those of this rank's share.
    """

    how: str
    workers: int
    spare_servers: int
    bytes_per_server: tuple[int, ...]
    nodes: Nodes = ()

    def __str__(self) -> str:
        total, names = sum(self.bytes_per_server) or 1, [f"spare server {k}" for k in range(self.spare_servers)]
        names += [f"server of {'node' if self.nodes else 'worker'} {n}" for n in range(self.workers)]
        weights = server_weights(self.workers, self.spare_servers)
        rows = [
            f"{name:<20} {has:>14,} bytes  {has / total:6.1%} of {weight:6.1%}"
            for name, has, weight in zip(names, self.bytes_per_server, weights, strict=True)
            if has or weight
        ]
        return "\n".join([f"placement {self.how!r}: {len(rows)} servers", *rows])

    @property
    def grouping(self) -> str:
        """The grouping of ranks by node in words; empty without one."""
        if not self.nodes:
            return ""
        shown = [f"{', '.join(map(str, ranks))}" for ranks in self.nodes[:_NODES_SHOWN]]
        more = len(self.nodes) - len(shown)
        ranks = "; ".join([*shown, f"and {more} nodes more"] if more else shown)
        return f"gradients are added up on each node before one of its ranks pushes the sum: ranks {ranks}"


def spare_share(workers: int, servers: int) -> float:
    """Return the share of all bytes for ``servers`` spare servers together, with ``workers`` workers.

    ``2k(n-1) / (n^2 + kn - 2k)``: 0.6 for n = 4, k = 2, and 1 for k = n. More spare servers than workers count as n.
    """
    n, k = workers, servers
    if k >= n:
        return 1.0
    return 2 * k * (n - 1) / (n * n + k * n - 2 * k)


def server_weights(workers: int, servers: int) -> tuple[float, ...]:
    """Return each server's share of all bytes, spare ones first; they sum to 1. See :func:`spare_share`."""
    share, spare = spare_share(workers, servers), min(servers, workers)
    return (*(share / spare for _ in range(spare)), *((1 - share) / workers for _ in range(workers)))


def mixed_server(tensor: int, part: int, workers: int, servers: int) -> int:
    """Return the server of a part by BytePS's mixed mode, whose hashes approximate :func:`server_weights`."""
    spare = min(servers, workers)
    bound = max(_MIXED_BOUND, spare + workers)
    chosen = _djb2((tensor << 16) + part) % bound
    if chosen < spare_share(workers, spare) * bound:
        return _djb2(chosen) % spare
    return spare + _djb2(chosen) % workers


def chosen_placement(how: str | None, environ: Mapping[str, str]) -> str:
    """Return the chosen placement: the option, otherwise BytePS's variable, otherwise the default.

    Args:
        how: The option ``placement``; ``None`` if left out.
        environ: Environment variables; ``BYTEPS_ENABLE_MIXED_MODE=1`` means ``"mixed"``, as in BytePS.

    Raises:
        OptionError: If the option or the variable has a value that is not allowed.
    """
    if how is not None:
        return require_one_of("placement", how, PLACEMENTS)
    switch = environ.get(MIXED_MODE_VARIABLE, "").strip()
    if switch not in ("", "0", "1"):
        raise OptionError(MIXED_MODE_VARIABLE, switch, "0 or 1")
    return "mixed" if switch == "1" else PLACEMENTS[0]


def _djb2(key: int) -> int:
    """Return Bernstein's hash of the key's decimal digits: 33 times the value so far, plus the next character."""
    value = 5381
    for character in str(key).encode():
        value = value * 33 + character & _WORD
    return value


class PlacedParts:
    """Assigns parts to servers in one fit, and counts each server's bytes.

    By default a part goes to the server that is least full with it: by bytes, relative to the server's share. BytePS's
    mixed mode chooses by the numbers of bucket and part, so a part keeps its server while sizes stay the same.

    Args:
        nodes: The ranks of each node, if one of them pushes for all; the nodes are then the workers.
    """

    def __init__(self, how: str = PLACEMENTS[0], *, workers: int, servers: int, nodes: Nodes = ()) -> None:
        self.weights = server_weights(workers, servers)
        self.bytes_per_server = [0] * len(self.weights)
        self._made = how, workers, servers
        self._nodes = nodes
        self._usable = [server for server, weight in enumerate(self.weights) if weight]
        self._place: Callable[[int, int], int] | None = None
        if how == "mixed":
            self._place = cache(lambda tensor, part: mixed_server(tensor, part, workers, servers))
        self._part = 0, 0

    @property
    def so_far(self) -> Placement:
        """Bytes that this worker has pushed to each server, over all steps."""
        return Placement(*self._made, tuple(self.bytes_per_server), self._nodes)

    def expect(self, tensor: int, part: int) -> None:
        """Set which part is placed next: bucket and part number, the same on all ranks."""
        self._part = tensor, part

    def next(self, nbytes: int) -> int:
        """Return the server of the next part; the same on all ranks that ask for the same parts in the same order."""
        held, weights = self.bytes_per_server, self.weights
        if self._place is None:
            server = min(self._usable, key=lambda one: ((held[one] + nbytes) / weights[one], one))
        else:
            server = self._place(*self._part)
        held[server] += nbytes
        return server


class PushPull:
    """A worker's side; :meth:`reduce` is an :data:`~lightning_bytescheduler.collectives.operations.Averaging`.

    Args:
        group: Workers 0 to n-1, then the spare servers; gloo, used by the route only.
    """

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
        here = any(shares.weights[servers:])
        self._colocated = SummingServer(group, ranks, own=self._rank) if here else None
        spare = [workers + server for server in range(servers)]
        colocated = [rank for rank in range(workers) if rank != self._rank] if self._colocated is not None else []
        # Each worker begins with a different server and goes round in the same direction.
        self._receivers = [*_from(self._rank, spare), *_from(self._rank, colocated)]
        needs = [shares.weights[rank - workers if rank >= workers else servers + rank] for rank in self._receivers]
        turns = turns_by_need(self._receivers, needs)
        self._pushes = SendingTurns(group, turns, name="pushes", on_error=lambda _: abandon(group))

    @property
    def wire_share(self) -> float:
        """Mean bytes that a rank sends over the network per byte of a gradient."""
        n, spare = self._workers, sum(self.shares.weights[: self._servers])
        return (spare * n + (1 - spare) * 2 * (n - 1)) / self._averaged

    def reduce(self, group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float) -> StartedOperation:
        """Average ``part`` over all workers, in place, with this worker's weight ``factor``.

        Args:
            group: Not used; the servers' group has other ranks.
            part: Part of a gradient, on a CPU.
            number: Number of the operation, the same on all workers.
            factor: This worker's weight in the mean.

        Raises:
            UnsupportedError: If servers cannot sum the type of ``part``.
        """
        if part.dtype not in DTYPES:
            raise UnsupportedError(f"Parameter servers do not add up gradients of {part.dtype}. Leave servers out.")
        scale(part, factor)
        return self.start(part, number)

    def start(self, part: torch.Tensor, number: int) -> StartedOperation:
        """Begin to sum ``part``, which is already scaled; called in launch order."""
        rank = self.next_server(part.nbytes)
        return StartedOperation([self.push(part, number, rank)], messages=True, lane=rank, group=self.group)

    def push(self, part: torch.Tensor, number: int, server: int) -> Coming | Pull:
        """Push ``part`` to ``server``; the result ends when the sum is in place."""
        if server == self._rank and self._colocated is not None:
            return self._colocated.push_own(number, part)
        pull = Pull(self.group.recv([part], server, number), self._timeout)
        header = torch.tensor([number, part.numel(), DTYPES.index(part.dtype)])
        self._pushes.put(part, server, number, self.group.send([header], server, HEADER_TAG))
        return pull

    def next_server(self, nbytes: int) -> int:
        """Return the server of the next part, as a rank in the group; see :meth:`PlacedParts.next`."""
        owner = self.shares.next(nbytes)
        return self._workers + owner if owner < self._servers else owner - self._servers

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
            except RuntimeError:  # a server is gone, but nothing in this fit depends on it
                idle = False
            # Others may still wait for sums from here.
            idle = idle and (self._colocated is None or self._colocated.finish(_CLOSE.total_seconds()))
        if not idle:
            abandon(self.group)
        self._pushes.stop(_THREADS_S)
        if self._colocated is not None:
            self._colocated.stop(_THREADS_S)


class NodePushPull(PushPull):
    """Pushes sums that the ranks of a node form first: the group ``"node"``, as in BytePS.

    For each part one rank of a node is the *pusher*. The others send it their values. It sums them in the order of the
    node's ranks, pushes the sum, and sends them the pulled result. So a part leaves a machine once, however many ranks
    are on it. Pushers of a part have the same number on each node and alternate by bytes, so that each rank pushes its
    share. The ranks with one number, one on each node, are a *rail*: among them and the servers everything is as in
    :class:`PushPull`, with nodes in place of workers. All ranks launch the same parts in the same order, so they choose
    the same pusher.

    Each stage of a part has its own queue and thread, so that one part is summed while another is pushed and a third
    one pulled:

    * *local reduce*: on ``bytescheduler-local-reduce``, in order of launch;
    * *push*, *pull* and *sum*, as in :class:`PushPull`;
    * *local broadcast*: begun by the thread that waits for the pull, and awaited as a second half
      (``completion.py``), during the next pull; on the other ranks by one thread for each pusher,
      ``bytescheduler-pulls-from-N``.

    Values are scaled by 1/n before the first sum, as in :class:`PushPull`. So two ranks of one node, or two nodes of
    one rank, get DDP's bits. More ranks get the sum of nodes' sums, ``(a + b) + (c + d)``, the same in each run and
    with any number of servers, where that class has ``((a + b) + c) + d``.

    Why no rank waits forever: take the oldest part that has not ended on all ranks. Each rank has credit to launch it
    and does, as all older ones have ended. A launch posts all of this rank's sends and receives for a part at once, so
    the values of the node's ranks arrive, whatever younger parts are in flight. Everything before this part on the
    summing thread has been launched, with credit that all ranks have or will have: a part that has ended on one rank
    needs no further stage elsewhere. So this part is summed and pushed, and the module's argument holds from there. The
    result goes to ranks that posted their receive at launch.

    Args:
        group: Group of this rank's rail: its rank on each node, then the spare servers; gloo.
        local: The ranks of this node, more than one; gloo. Both groups have no other use.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: dist.ProcessGroup,
        ranks: Sequence[int],
        shares: PlacedParts,
        timeout: timedelta,
    ) -> None:
        super().__init__(group, ranks, shares, timeout)
        self.local = local
        self._own = local.rank()
        self._others = [rank for rank in range(local.size()) if rank != self._own]
        self._pushers = PlacedParts(workers=local.size(), servers=0)
        self._averaged *= local.size()
        # After an error it begins nothing more. A waiter for a part finds the cause and stops the scheduler, which
        # breaks the connections. If they were broken here, other threads would fail first, with a less specific error.
        self._local_reduce = WorkThread("local-reduce")

    def start(self, part: torch.Tensor, number: int) -> StartedOperation:
        """See :class:`PushPull`."""
        pusher = self._pushers.next(part.nbytes)
        return self._push_for_all(part, number) if pusher == self._own else self._give(part, number, pusher)

    def _give(self, part: torch.Tensor, number: int, pusher: int) -> StartedOperation:
        """Send this rank's part to its pusher; ends when the result is in place."""
        # The receive is posted first, as the pusher answers once it has this rank's values.
        back = Pull(self.local.recv([part], pusher, number), self._timeout)
        sent = self.local.send([part], pusher, number)

        def left() -> None:
            sent.wait(PATIENCE)  # a message is kept until it has left

        self._local_reduce.put(left, lambda error: None)
        return StartedOperation([back], messages=True, lane=f"from-{pusher}", group=self.local)

    def _push_for_all(self, part: torch.Tensor, number: int) -> StartedOperation:
        """Sum the node's values of a part, push the sum, and send the result to the node's ranks."""
        server = self.next_server(part.nbytes)
        rooms = {rank: torch.empty_like(part) for rank in self._others}
        works = {rank: self.local.recv([room], rank, number) for rank, room in rooms.items()}
        pushed = Coming()

        def add_up_and_push() -> None:
            total: torch.Tensor | None = None
            for rank in range(self.local.size()):
                if rank in works:
                    works[rank].wait(PATIENCE)
                value = rooms.get(rank, part)
                if total is None:
                    total = value
                else:  # the sum of two has the same bits in either order
                    total = part.add_(total) if rank == self._own else total.add_(value)
            pushed.end(then=self.push(part, number, server))

        def hand_on() -> StartedOperation:
            sent = [Pull(self.local.send([part], rank, number), self._timeout) for rank in self._others]
            return StartedOperation(sent, messages=True, closing=True, group=self.local)

        self._local_reduce.put(add_up_and_push, pushed.end)
        return StartedOperation([pushed], hand_on, messages=True, lane=server, group=self.group)

    def close(self, *, idle: bool) -> None:
        """See :class:`PushPull`. If all is idle, no rank of this node waits for this one."""
        if not idle:
            abandon(self.local)
        super().close(idle=idle)
        self._local_reduce.stop(_THREADS_S)


def _from(first: int, ranks: list[int]) -> list[int]:
    first %= max(len(ranks), 1)
    return ranks[first:] + ranks[:first]
