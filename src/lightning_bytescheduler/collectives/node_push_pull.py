"""Push and pull of sums that the ranks of a node have formed before: the group ``"node"``, as in BytePS.

Of each part one rank of a node is the *pusher*. The others send it what they have, it adds that up in the order of the
node's ranks, pushes the sum, and sends them what it pulls. So a part leaves a machine once, however many ranks are on
it. Pushers of a part have the same number on each node, and take turns: each rank pushes its share. Ranks of one number
are a *rail* (``node_layout.py``): among them and the servers things are as in ``push_pull.py``, with nodes in place of
workers. On all ranks the same parts are launched in the same order, so they come to the same pusher. Turns are by
bytes; by the part's number where the pusher keeps what encoding the sum has left of it.

The stages of a part, each with a queue and a thread of its own, so that one part is added up here while another is
pushed and a third one pulled; what does not apply is left out:

* *local reduce*: on ``bytescheduler-local-reduce``, in the order in which parts come there;
* *push*, *pull* and *sum*, see ``push_pull.py``;
* *local broadcast*: begun where the pull is waited for, and waited for on ``bytescheduler-local-broadcast``, with the
  next pull under way; on the other ranks by one thread for each pusher, ``bytescheduler-pulls-from-N``.

Values are scaled by 1/n before the first sum, as in ``operations.py``. So two ranks of one node, or two nodes of one
rank, get DDP's bits; more get the sum of nodes' sums, ``(a + b) + (c + d)``, the same in each run and with any number
of servers, where :class:`PushPull` has ``((a + b) + c) + d``.

Why nobody waits forever: take the oldest part that has not ended on all ranks. Each rank has credit to launch it, and
does: all older ones have ended. A launch posts all sends and receives that this rank has to post for a part at once, or
the codec thread does soon, which waits for nobody. So what ranks of a node send for it arrives, whatever younger parts
are under way. Where it is added up, what comes before it has been launched there, with credit that all ranks have or
will have: what has ended on one rank waits for no stage on any. So it is added up, too, and pushed. What
``push_pull.py`` says of pushes holds for it from there. What is pulled is sent to ranks that have posted a receive for
it, at their launch.

``placement``: which server has which part of a gradient, and a table of what each has had.

By default parts go by bytes: each to the server that is least full, measured by its share. BytePS's mixed mode goes by
the number of the bucket and of the part, so that a part is at one server for as long as sizes stay.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.node_links import NodeLinks
from lightning_bytescheduler.collectives.operations import Pull, StartedOperation
from lightning_bytescheduler.collectives.push_pull import ByteShares, PushPull, Way
from lightning_bytescheduler.collectives.summing_server import OwnSum
from lightning_bytescheduler.scheduler.placement import Nodes, Placement, mixed_server, server_weights
from lightning_bytescheduler.scheduler.task import NodePassage

__all__ = ["NodePushPull", "PlacedParts"]


class NodePushPull(PushPull):
    """One rank's side; see the module.

    Args:
        group: Of this rank's rail: its rank on each node, then the spare servers; gloo.
        local: The ranks of this node, more than one; gloo. Both are used by nothing else.
        workers: Nodes.
        servers: k, no more than that.
        shares: Says which server has a part of this rail next; by bytes when left out.
        pushers: Says which rank of the node pushes a part next; by bytes when left out.
        ranks: Those of the rail, as errors name them.
        timeout: Longest wait for a sum.
    """

    node: NodeLinks

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: dist.ProcessGroup,
        *,
        workers: int,
        servers: int,
        shares: ByteShares | None = None,
        pushers: ByteShares | None = None,
        ranks: Sequence[int] = (),
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(group, workers=workers, servers=servers, shares=shares, ranks=ranks, timeout=timeout)
        self.node = NodeLinks(local, timeout)
        size = self.node.size
        self._pushers = ByteShares((1.0 / size,) * size) if pushers is None else pushers
        self._ranks_in_all = workers * size

    @property
    def wire_share(self) -> float:
        """What a rank sends over the network per byte of a gradient, on average."""
        return super().wire_share / self.node.size

    @property
    def ranks_in_all(self) -> int:
        """See :class:`PushPull`."""
        return self._ranks_in_all

    def expect(self, tensor: int, part: int) -> None:
        """See :class:`PushPull`."""
        super().expect(tensor, part)
        self._pushers.expect(tensor, part)

    def way(self, nbytes: int) -> Way:
        """See :class:`PushPull`."""
        pusher = self._pushers.next(nbytes)
        return super().way(nbytes) if pusher == self.node.rank else Way(pusher=pusher)

    def start(self, part: torch.Tensor, number: int) -> StartedOperation:
        """See :class:`PushPull`."""
        way = self.way(part.nbytes)
        if way.pusher is not None:
            passage = NodePassage(pusher=way.pusher, moved=part.nbytes)
            return self.node.give(way.pusher, number, part, part, passage)
        away = not self.adds_up(way.server)
        passage = NodePassage(
            server=way.server,
            pushed=part.nbytes * away,
            pulled=part.nbytes * away,
            moved=part.nbytes * len(self.node.others),
        )

        def add_up_and_push(arriving: Iterator[torch.Tensor]) -> OwnSum | Pull:
            before: torch.Tensor | None = None
            for rank, one in zip(self.node.others, arriving, strict=True):
                if rank > self.node.rank:
                    _add(part, before)
                    before = one
                else:
                    before = one if before is None else before.add_(one)
            _add(part, before)
            passage.reduced = time.perf_counter()
            return self.push(part, number, way.server, passage)

        pushed = self.node.take(number, [torch.empty_like(part) for _ in self.node.others], add_up_and_push)
        hand_on = partial(self._hand_on, part, number, passage)
        return StartedOperation([pushed], hand_on, messages=True, lane=way.server, passage=passage)

    def _hand_on(self, part: torch.Tensor, number: int, passage: NodePassage) -> StartedOperation:
        passage.came = time.perf_counter()
        return self.node.hand_on(number, part)

    def close(self, *, idle: bool) -> None:
        """See :class:`PushPull`. Where all is idle, nobody on this node waits for anything from here."""
        if not idle:
            self.node.abandon()
        super().close(idle=idle)
        self.node.stop()


def _add(part: torch.Tensor, before: torch.Tensor | None) -> None:
    """Add what ranks before have to ``part``: the sum of two has the same bits in either order."""
    if before is not None:
        part.add_(before)


_BY_PART, _BY_TENSOR = 0.6180339887498949, 0.7548776662466927


class _MixedShares(ByteShares):
    """Gives each part to the server that BytePS's mixed mode names."""

    def __init__(self, workers: int, servers: int) -> None:
        super().__init__(server_weights(workers, servers))
        self._machines = workers, servers
        self._part = 0, 0
        self._known: dict[tuple[int, int], int] = {}  # at most one entry for each part that there is

    def expect(self, tensor: int, part: int) -> None:
        """See :class:`ByteShares`."""
        self._part = tensor, part

    def next(self, nbytes: int) -> int:
        """The server of the part that was said to come."""
        server = self._known.get(self._part)
        if server is None:
            server = self._known[self._part] = mixed_server(*self._part, *self._machines)
        self.bytes_per_server[server] += nbytes
        return server


class _KeptShares(ByteShares):
    """Places a part by its numbers alone, spread by the shares: a server keeps some of it, and counts for the bits.

    In the order of launches it could be at another server in the next run. Multiples of an irrational number are spread
    more evenly than any hash.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        super().__init__(weights)
        self._edges = [*itertools.accumulate(weights)]
        self._last = max(server for server, weight in enumerate(weights) if weight)
        self._part = 0, 0

    def expect(self, tensor: int, part: int) -> None:
        """See :class:`ByteShares`."""
        self._part = tensor, part

    def next(self, nbytes: int) -> int:
        """The server of the part that was said to come."""
        tensor, part = self._part
        server = min(bisect.bisect(self._edges, (part * _BY_PART + tensor * _BY_TENSOR) % 1.0), self._last)
        self.bytes_per_server[server] += nbytes
        return server


class _TurnsByNumber(ByteShares):
    """Gives parts to the ranks of a node in turns, by the part's numbers alone: a rank keeps some of what it pushes."""

    def __init__(self, ranks: int) -> None:
        super().__init__((1.0 / ranks,) * ranks)
        self._part = 0, 0

    def expect(self, tensor: int, part: int) -> None:
        """See :class:`ByteShares`."""
        self._part = tensor, part

    def next(self, nbytes: int) -> int:
        """Who pushes the part that was said to come."""
        rank = sum(self._part) % len(self.weights)
        self.bytes_per_server[rank] += nbytes
        return rank


class PlacedParts:
    """Places the parts of one fit.

    Args:
        how: One of ``scheduler.placement.PLACEMENTS``.
        workers: n.
        servers: k, no more than n.
        kept: Whether who pushes and who adds up keeps something of a part, so that parts stay where they are.
        nodes: The ranks of each, where one of them pushes for all; these are the workers then.

    Attributes:
        shares: For :class:`PushPull`.
        pushers: For :class:`~lightning_bytescheduler.collectives.node_push_pull.NodePushPull`; ``None`` for by bytes.
    """

    def __init__(self, how: str, *, workers: int, servers: int, kept: bool = False, nodes: Nodes = ()) -> None:
        self._how = how
        self._workers = workers
        self._servers = servers
        self._nodes = nodes
        self.pushers = _TurnsByNumber(len(nodes[0])) if kept and nodes else None
        weights = server_weights(workers, servers)
        if how == "mixed":
            self.shares: ByteShares = _MixedShares(workers, servers)
        else:
            self.shares = _KeptShares(weights) if kept else ByteShares(weights)

    @property
    def so_far(self) -> Placement:
        """Bytes that this worker has pushed to each server, all steps together."""
        return Placement(self._how, self._workers, self._servers, tuple(self.shares.bytes_per_server), self._nodes)
