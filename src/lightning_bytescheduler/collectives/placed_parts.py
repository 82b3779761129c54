"""``placement``: which server has which part of a gradient, and a table of what each has had.

By default parts go by bytes: each to the server that is least full, measured by its share. BytePS's mixed mode goes by
the number of the bucket and of the part, so that a part is at one server for as long as sizes stay.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from lightning_bytescheduler.collectives.push_pull import ByteShares
from lightning_bytescheduler.scheduler.placement import Nodes, Placement, mixed_server, server_weights

__all__ = ["PlacedParts"]

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
