"""``architecture="ps"``: gradients are averaged by parameter servers instead of among the workers.

Everything else of a step stays as it is: buckets, priorities, credit, gates and the launch order that rank 0 decides.
What changes is what a part's start puts on the wire, see ``collectives/push_pull.py``. Workers are Lightning's world;
servers are known to this group alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from lightning_bytescheduler.checks import require_architecture, require_whole
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.placed_parts import PlacedParts
from lightning_bytescheduler.collectives.push_pull import PushPull
from lightning_bytescheduler.collectives.server_meeting import ServersFound, meet_servers
from lightning_bytescheduler.exceptions import OptionError, ServerFailedError, UnsupportedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.scheduler.placement import PLACEMENTS, chosen_placement

__all__ = ["JoinedServers", "ServerOptions"]

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Who averages gradients.

    Attributes:
        architecture: ``"allreduce"``: the workers among themselves. ``"ps"``: parameter servers.
        servers: How many of them run on machines of their own.
        placement: Which server has which part: one of ``scheduler.placement.PLACEMENTS``.
    """

    architecture: str = "allreduce"
    servers: int = 0
    placement: str = PLACEMENTS[0]

    @classmethod
    def resolve(
        cls, architecture: str, servers: int, placement: str | None = None, *, compression: object = None
    ) -> ServerOptions:
        """Check what was given; where no placement was, ``BYTEPS_ENABLE_MIXED_MODE`` counts.

        Raises:
            OptionError: If a value is not allowed, or does not fit the others.
        """
        require_architecture(architecture)
        require_whole("servers", servers, 0)
        if servers and architecture != "ps":
            raise OptionError("servers", servers, "left out unless architecture='ps'")
        if architecture == "ps" and compression is not None:
            raise OptionError(
                "compression", compression, "left out with architecture='ps', whose servers add up plain gradients"
            )
        if architecture != "ps":
            if placement is not None:
                raise OptionError("placement", placement, "left out unless architecture='ps'")
            return cls()
        return cls(architecture=architecture, servers=servers, placement=chosen_placement(placement, os.environ))

    @property
    def used(self) -> bool:
        """Whether there are parameter servers."""
        return self.architecture == "ps"

    def join(
        self,
        groups: SchedulerGroups,
        board: FaultBoard,
        device: torch.device,
        *,
        timeout: timedelta | None,
        say: Callable[[str], object],
    ) -> JoinedServers:
        """Connect to the servers; every worker calls this at the same point of a fit.

        Args:
            groups: The scheduler's, among workers.
            board: Asked whether waiting is in vain.
            device: Where gradients live.
            timeout: Of the wait for servers, and of each message; half an hour if ``None``.
            say: Told what the user should know, on rank 0.

        Raises:
            UnsupportedError: If gradients are not on a CPU.
            SchedulerTimeoutError: If too few servers have come in time.
            RanksDifferError: If a server has another version.
            ServerFailedError: If one has died.
        """
        if device.type != "cpu":
            raise UnsupportedError(
                f"architecture='ps' is for gradients on a CPU so far, and these are on {device.type}. Use "
                "architecture='allreduce'."
            )
        servers, timeout = min(self.servers, groups.world_size), timeout or _TIMEOUT
        if servers < self.servers and groups.rank == 0:
            say(f"bytescheduler: servers={self.servers} counts as {servers}, as no more than one a worker is of use.")

        def failure() -> BaseException | None:
            return board.diagnose(RuntimeError("c10d: the store is gone")) if board.hopeless else None

        found, group = meet_servers(groups, servers, timeout=timeout, failure=failure, say=say)
        placed = PlacedParts(self.placement, workers=groups.world_size, servers=servers)
        push_pull = PushPull(group, workers=groups.world_size, servers=servers, shares=placed.shares)
        return JoinedServers(push_pull, found, placed)


class JoinedServers:
    """A worker's connection to the servers of one fit.

    Args:
        push_pull: What a part's start does.
        found: Who the servers are.
        placed: What says which server has which part.
    """

    def __init__(self, push_pull: PushPull, found: ServersFound, placed: PlacedParts) -> None:
        self.push_pull = push_pull
        self.placed = placed
        self._found = found

    def find_gone(self) -> ServerFailedError | None:
        """The server that has died, if one has. For any thread; may wait for half a second."""
        return self._found.find_gone()

    def leave(self, *, idle: bool) -> None:
        """Say goodbye; see :meth:`PushPull.close`."""
        try:
            self.push_pull.close(idle=idle)
        finally:
            self._found.close()
