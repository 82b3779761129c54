"""``servers``: parameter servers average gradients instead of the workers.

The rest of a step is unchanged: buckets, priorities, credit, gates and the launch order that rank 0 decides. Only the
messages of a part differ (``collectives/push_pull.py``). Workers are Lightning's world; servers are members of this
group alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_bytescheduler.checks import require_known, require_one_of, require_whole
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.node_push_pull import agree_on_nodes, each_alone
from lightning_bytescheduler.collectives.server_meeting import JoinedServers, join_servers
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.lightning_api import DDPStrategy
from lightning_bytescheduler.scheduler.placement import PLACEMENTS, chosen_placement

__all__ = ["ServerOptions"]

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Who averages gradients.

    Attributes:
        spare: Number of parameter servers on separate machines; ``None`` without servers, where workers use all-reduce.
        group: ``"node"`` if the ranks of a node push one sum; ``None`` if each rank pushes.
    """

    spare: int | None = None
    placement: str = PLACEMENTS[0]
    group: str | None = None

    @classmethod
    def resolve(
        cls, servers: int | Mapping[str, int | str] | None, rules: CompressionRules | None = None
    ) -> ServerOptions:
        """Check the option ``servers``. Without a placement, ``BYTEPS_ENABLE_MIXED_MODE`` decides.

        Args:
            servers: ``spare``, or a mapping with ``spare`` (0 if left out), ``placement`` and ``group``.
            rules: The rules of compression, if any.

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
            raise OptionError(
                "compression",
                rules.spec,
                "left out with servers, which add up gradients as they are",
                "With compression the ranks add up, each a share. Leave servers out: 'int8' alone sends about 4 times "
                "fewer bytes, where servers save half at most.",
            )
        placement = chosen_placement(given.get("placement"), os.environ)
        return cls(spare=spare, placement=placement, group=group)

    @property
    def used(self) -> bool:
        """Whether there are parameter servers."""
        return self.spare is not None

    @property
    def facts(self) -> dict[str, object]:
        """The facts that have to be the same on all ranks."""
        return {
            "servers": self.spare,
            "placement": self.placement,
            "group": self.group,
        }

    def join(
        self,
        groups: SchedulerGroups,
        board: FaultBoard,
        strategy: DDPStrategy,
        *,
        timeout: timedelta | None,
        say: Callable[[str], object],
    ) -> JoinedServers | None:
        """Connect to the servers, if there are any; every worker calls this at the same point of a fit.

        Args:
            groups: The scheduler's groups of workers.
            board: Says whether waiting is in vain.
            strategy: Knows the place of this rank and the device of its gradients.
            timeout: Longest wait for servers, and for each message; half an hour if ``None``.
            say: Called on rank 0 with messages for the user.

        Raises:
            UnsupportedError: If gradients are neither on a CPU nor on a GPU, or ranks on nodes cannot be grouped.
            SchedulerTimeoutError: If too few servers have come in time.
            RanksDifferError: If a server has another version.
            ServerFailedError: If one has died.
        """
        if self.spare is None:
            return None
        device = strategy.root_device
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"Parameter servers are for gradients on a CPU or a CUDA GPU, and these are on {device.type}. Leave "
                "servers out."
            )

        def failure() -> BaseException | None:
            return board.diagnose(RuntimeError("c10d: the store is gone")) if board.hopeless else None

        place = strategy.node_rank, strategy.local_rank, strategy.num_processes
        try:
            return join_servers(
                groups,
                self.spare,
                agree_on_nodes(groups, place) if self.group == "node" else each_alone(groups),
                placement=self.placement,
                timeout=timeout or _TIMEOUT,
                failure=failure,
                say=say,
            )
        except RuntimeError as error:  # a rank has died while all connect
            if not is_communication_error(error):
                raise
            raise board.diagnose(error) from error
