"""``placement``: which server has which part of a gradient, and a table of what each has had.

By default parts go by bytes: each to the server that is least full, measured by its share. BytePS's hashes go by the
number of the bucket and of the part, so that a part is at one server for as long as sizes stay.
"""

from __future__ import annotations

from lightning_bytescheduler.collectives.push_pull import ByteShares
from lightning_bytescheduler.scheduler.placement import PLACEMENTS, Placement, server_of_part, weights_of

__all__ = ["PlacedParts"]


class _HashedShares(ByteShares):
    """Gives each part to the server that a hash of its numbers names."""

    def __init__(self, how: str, workers: int, servers: int) -> None:
        super().__init__(weights_of(how, workers, servers))
        self._how = how
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
            server = self._known[self._part] = server_of_part(self._how, *self._part, *self._machines)
        self.bytes_per_server[server] += nbytes
        return server


class PlacedParts:
    """Places the parts of one fit.

    Args:
        how: One of ``scheduler.placement.PLACEMENTS``.
        workers: n.
        servers: k, no more than n.

    Attributes:
        shares: For :class:`PushPull`.
    """

    def __init__(self, how: str, *, workers: int, servers: int) -> None:
        self._how = how
        self._workers = workers
        self._servers = servers
        by_bytes = how == PLACEMENTS[0]
        self.shares = (
            ByteShares(weights_of(how, workers, servers)) if by_bytes else _HashedShares(how, workers, servers)
        )

    @property
    def so_far(self) -> Placement:
        """Bytes that this worker has pushed to each server, all steps together."""
        return Placement(self._how, self._workers, self._servers, {}, tuple(self.shares.bytes_per_server))
