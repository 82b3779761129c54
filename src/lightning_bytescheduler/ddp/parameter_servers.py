"""``servers``: gradients are averaged by parameter servers instead of among the workers.

Everything else of a step stays as it is: buckets, priorities, credit, gates and the launch order that rank 0 decides.
What changes is what a part's start puts on the wire, see ``collectives/push_pull.py``. Workers are Lightning's world;
servers are known to this group alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightning_bytescheduler.checks import require_known, require_one_of, require_whole
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.node_push_pull import NodePushPull, PlacedParts, RankOnNode, agree_on_nodes
from lightning_bytescheduler.collectives.push_pull import PushPull
from lightning_bytescheduler.collectives.server_meeting import ServersFound, meet_servers
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.encoded_pieces import (
    LeftQuestion,
    described,
    left_in,
    require_known_to_servers,
    room_for_answer,
)
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError, ServerFailedError, UnsupportedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import brief, is_communication_error, is_timeout
from lightning_bytescheduler.scheduler.placement import PLACEMENTS, chosen_placement

__all__ = ["JoinedServers", "ServerOptions"]

_TIMEOUT = timedelta(minutes=30)
_WAITED = "Of the servers,"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Who averages gradients.

    Attributes:
        spare: How many parameter servers run on machines of their own; ``None`` where there are none at all, and the
            workers average among themselves.
        placement: Which server has which part: one of ``scheduler.placement.PLACEMENTS``.
        compressed: Whether gradients are, so that servers keep what is left of their sums.
        group: Of which ranks one sum is pushed: ``None`` for of each, or ``"node"``.
    """

    spare: int | None = None
    placement: str = PLACEMENTS[0]
    compressed: bool = False
    group: str | None = None

    @classmethod
    def resolve(
        cls, servers: int | Mapping[str, int | str] | None, rules: CompressionRules | None = None
    ) -> ServerOptions:
        """Check what was given; where no placement was, ``BYTEPS_ENABLE_MIXED_MODE`` counts.

        Args:
            servers: The option: ``spare``, or a mapping with ``spare`` (0 if left out), ``placement`` and ``group``.
            rules: What is compressed, if anything is.

        Raises:
            OptionError: If a value is not allowed, or does not fit the others.
        """
        if servers is None:
            return cls()
        given: Mapping[str, Any] = servers if isinstance(servers, Mapping) else {"spare": servers}
        require_known(given, ("spare", "placement", "group"), of="servers")
        spare, group = require_whole("servers", given.get("spare", 0), 0), given.get("group")
        if group is not None:
            require_one_of("group", group, ("node",))
        if rules is not None:
            _require_served(rules, spare, group)
        placement = chosen_placement(given.get("placement"), os.environ)
        return cls(spare=spare, placement=placement, compressed=rules is not None, group=group)

    @property
    def used(self) -> bool:
        """Whether there are parameter servers."""
        return self.spare is not None

    @property
    def architecture(self) -> str:
        """One of ``checks.ARCHITECTURES``."""
        return "ps" if self.used else "allreduce"

    @property
    def facts(self) -> dict[str, object]:
        """What has to be the same on all ranks."""
        return {
            "servers": self.spare,
            "placement": self.placement,
            "group": self.group,
        }

    def join(
        self,
        groups: SchedulerGroups,
        board: FaultBoard,
        place: RankOnNode,
        *,
        timeout: timedelta | None,
        say: Callable[[str], object],
    ) -> JoinedServers | None:
        """Connect to the servers, if there are any; every worker calls this at the same point of a fit.

        Args:
            groups: The scheduler's, among workers.
            board: Asked whether waiting is in vain.
            place: Of this rank, and of its gradients.
            timeout: Of the wait for servers, and of each message; half an hour if ``None``.
            say: Told what the user should know, on rank 0.

        Raises:
            UnsupportedError: If gradients are neither on a CPU nor on a GPU, or ranks on nodes cannot be grouped.
            SchedulerTimeoutError: If too few servers have come in time.
            RanksDifferError: If a server has another version.
            ServerFailedError: If one has died.
        """
        if self.spare is None:
            return None
        device = place.root_device
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"Parameter servers are for gradients on a CPU or a CUDA GPU, and these are on {device.type}. Leave "
                "servers out."
            )
        timeout = timeout or _TIMEOUT

        def failure() -> BaseException | None:
            return board.diagnose(RuntimeError("c10d: the store is gone")) if board.hopeless else None

        try:
            layout = agree_on_nodes(groups, place) if self.group == "node" else None
            if layout is not None and layout.local_size == 1:
                layout = None  # a rank pushes for itself
            pushers = groups.world_size if layout is None else len(layout.nodes)
            servers, each = min(self.spare, pushers), "worker" if layout is None else "node"
            if servers < self.spare and groups.rank == 0:
                more = f"as no more than one a {each} is of use"
                say(f"bytescheduler: servers={self.spare} counts as {servers}, {more}.")
            found, group, local = meet_servers(
                groups, servers, timeout=timeout, failure=failure, say=say, layout=layout
            )
        except RuntimeError as error:  # a rank has died while all connected
            if not is_communication_error(error):
                raise
            raise board.diagnose(error) from error
        nodes = () if layout is None else layout.nodes
        placed = PlacedParts(self.placement, workers=pushers, servers=servers, kept=self.compressed, nodes=nodes)
        if local is None:
            made: Callable[..., PushPull] = partial(PushPull, group)
        else:
            made = partial(NodePushPull, group, local)
        rail = () if layout is None else layout.rails[layout.local_rank]
        push_pull = made(workers=pushers, servers=servers, shares=placed.shares, ranks=rail, timeout=timeout)
        return JoinedServers(push_pull, found, placed)


def _require_served(rules: CompressionRules, servers: int, group: str | None) -> None:
    if group is not None:
        hint = "A node's sum travels as it is: leave compression out, or group, and each rank pushes for itself."
        raise OptionError("group", group, "left out of servers where gradients are compressed", hint)
    if rules.auto or rules.whole_matrices:
        raise OptionError(
            "compression",
            rules.spec,
            "a compressor of gradients as they are cut, such as 'int8', with servers",
            "'auto' and 'powersgd' are for all-reduce: leave servers out.",
        )
    require_known_to_servers(rules.by_pattern, servers)


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

    def left(self, name: str, size: int, loss_scale: float) -> torch.Tensor | None:
        """What spare servers have left to send of a parameter; see ``residuals.LeftElsewhere``.

        Raises:
            RuntimeError: If a connection has ended.
        """
        question = described(LeftQuestion(name=name, size=size))
        answers = self.push_pull.ask(question, partial(room_for_answer, size))
        left = [one for answer in answers if (one := left_in(answer, loss_scale)) is not None]
        return torch.stack(left).sum(0) if left else None

    def explain_timeout(self, error: BaseException) -> BaseException:
        """Say which server stands still, or what servers wait for, where ``error`` says that the time was up."""
        timed_out = isinstance(error, SchedulerTimeoutError) or (is_communication_error(error) and is_timeout(error))
        if not timed_out or _WAITED in str(error):
            return error
        silent = self._found.find_silent()
        if silent is not None:
            silent.__cause__ = error
            return silent
        where = self._found.whereabouts()
        if not where:
            return error
        explained = SchedulerTimeoutError(f"{brief(error)} {_WAITED} {where}.")
        explained.__cause__ = error
        return explained

    def leave(self, *, idle: bool) -> None:
        """Say goodbye; see :meth:`PushPull.close`."""
        try:
            self.push_pull.close(idle=idle)
        finally:
            self._found.close()
