"""What the gradients of one fit travel with on one rank: groups, launch order, core, route and parameter servers.

It is opened and closed by the fit. It also says why something fails: an error of a collective mostly follows from
another rank's or server's failure, which the fault board names.

With parameter servers the rest of a step is unchanged: buckets, priorities, credit, gates and the launch order that
rank 0 decides. Only the messages of a part differ (``collectives/push_pull.py``). Workers are Lightning's world;
servers are members of this group alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.checks import require_known, require_one_of, require_whole
from lightning_bytescheduler.collectives.device_streams import PayloadCopies
from lightning_bytescheduler.collectives.groups import (
    SchedulerGroups,
    create_overtaking,
    leave,
    probe_link,
    probe_start_up,
)
from lightning_bytescheduler.collectives.launch_order import order_of
from lightning_bytescheduler.collectives.operations import shards_over
from lightning_bytescheduler.collectives.push_pull import PLACEMENTS, chosen_placement
from lightning_bytescheduler.collectives.route import AllReduce, OnDevice, Served, Sharded
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.collectives.server_meeting import JoinedServers, agree_on_nodes, join_servers
from lightning_bytescheduler.ddp.compression_rules import CompressionRules
from lightning_bytescheduler.ddp.fit_report import Record
from lightning_bytescheduler.exceptions import (
    ByteSchedulerError,
    OptionError,
    RankFailedError,
    SchedulerTimeoutError,
    UnsupportedError,
)
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.lightning_api import DDPStrategy, rank_zero_info
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.scheduler.threads import InterpreterTurns
from lightning_bytescheduler.timeline.timeline import Timeline
from lightning_bytescheduler.tuning.sizes import LinkEstimate, SchedulerSizes, default_sizes

log = logging.getLogger(__name__)

__all__ = ["STOP_S", "AgreedSizes", "ServerOptions", "Wire", "agree_on_sizes"]

_FAR_S = 0.01  # start-up time of an empty all-reduce above which a link counts as far
_LEAST_BUCKET_BYTES = 128 * 1024  # for buckets that are not cut
_DDPS_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class AgreedSizes:
    """Sizes that hold on every rank, and the link they were chosen for.

    Attributes:
        link: The measured link; ``None`` if it was not measured.
        far: Whether latency is so high that gradients go straight to their targets instead of around a ring.
    """

    sizes: SchedulerSizes
    link: LinkEstimate | None
    far: bool = False


def agree_on_sizes(
    groups: SchedulerGroups,
    options: SchedulerOptions,
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    *,
    in_shards: bool = False,
    ratio: float = 1.0,
    architecture: str = "allreduce",
) -> AgreedSizes:
    """Agree on partition size, credit and bucket size. Rank 0's options count.

    Probes the link, unless rank 0 has fixed both sizes. With both sizes fixed and ``mode="auto"``, only the start-up
    time is measured.

    Args:
        groups: The scheduler's groups.
        options: This rank's options.
        parameters: All parameters of the model.
        device: Where gradients live.
        in_shards: Whether this rank expects gradients to be reduced in shards; rank 0's expectation counts.
        ratio: How many times fewer bytes travel because of compression. Above 1, partitions become larger by twice this
            factor, as each part also costs the codecs time. Must be the same on all ranks.
        architecture: Who averages gradients; must be the same on all ranks.
    """
    busy_processor, device = device.type == "cpu", groups.wire_device(device)
    groups.warm_up(device)
    trainable = [p for p in parameters if p.requires_grad]
    count = sum(p.numel() for p in trainable)
    width = max((p.element_size() for p in trainable), default=4)
    partition, credit = options.partition_size or 0, options.credit or 0
    own = options.policy.own_partition_size(count)
    if own is not None:
        partition = credit = partition or own
    message = torch.tensor([partition, credit, int(in_shards), _chooses(options), count * width], device="cpu")
    dist.broadcast(message, src=0, group=groups.control)
    partition, credit, in_shards, chooses, largest = message.tolist()
    link, far = None, False
    goes_straight = architecture == "allreduce" and device.type == "cpu" and shards_over(groups.data, device)
    if partition and credit:
        if goes_straight and chooses:
            far = probe_start_up(groups.data, device) > _FAR_S
        least = partition * width if partition < count or options.partition_size else _LEAST_BUCKET_BYTES
        bucket = max(least, min(count * width // 64, _DDPS_BUCKET_BYTES))
        sizes = SchedulerSizes(partition_size=min(partition, credit), credit=credit, bucket_bytes=bucket)
    else:
        link = probe_link(groups.data, device, largest=largest)
        if goes_straight and link.alpha > _FAR_S:  # two messages instead of a ring
            link, far = LinkEstimate(alpha=link.alpha / (groups.world_size - 1), beta=link.beta), True
        travels = max(round(width / ratio), 1)  # bytes per parameter
        sizes = default_sizes(
            parameters=count,
            bytes_per_parameter=travels,
            link=link,
            busy_processor=busy_processor,
            in_shards=bool(in_shards),
            architecture=architecture,
            far=far,
        )
        if ratio > 1:  # each partition costs codecs time, so larger ones are faster
            larger, bucket = 2 * sizes.partition_size, sizes.bucket_bytes * width // travels
            sizes = replace(
                sizes, partition_size=larger, credit=2 * sizes.credit, bucket_bytes=max(bucket, larger * width)
            )
        if credit:
            sizes = replace(sizes, partition_size=min(sizes.partition_size, credit), credit=credit)
        elif partition:
            bucket = max(sizes.bucket_bytes, min(partition * width, _DDPS_BUCKET_BYTES))
            sizes = SchedulerSizes(
                partition_size=partition, credit=max(sizes.credit, 2 * partition), bucket_bytes=bucket
            )
    return AgreedSizes(sizes=sizes, link=link, far=far)


def _chooses(options: SchedulerOptions) -> bool:
    """Whether the start-up time still decides something when both sizes are given."""
    return options.mode == "auto"


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
                "With compression each rank adds up a share of the gradients. Leave servers out: 'int8' alone sends "
                "about 4 times fewer bytes, where servers save half at most.",
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
        return {"servers": self.spare, "placement": self.placement, "group": self.group}

    def join(
        self, groups: SchedulerGroups, board: FaultBoard, strategy: DDPStrategy, *, timeout: timedelta | None
    ) -> JoinedServers | None:
        """Connect to the servers, if there are any; every worker calls this at the same point of a fit.

        Args:
            groups: The scheduler's groups of workers.
            board: Says whether waiting is in vain.
            strategy: Knows the place of this rank and the device of its gradients.
            timeout: Longest wait for servers, and for each message; half an hour if ``None``.

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

        place = strategy.node_rank, strategy.local_rank, strategy.num_processes
        try:
            return join_servers(
                groups,
                self.spare,
                agree_on_nodes(groups, place) if self.group == "node" else (),
                placement=self.placement,
                timeout=timeout or _TIMEOUT,
                failure=board.no_hope,
                say=rank_zero_info,
            )
        except RuntimeError as error:  # a rank has died while all connect
            if not is_communication_error(error):
                raise
            raise board.diagnose(error) from error


STOP_S = 5.0
"""Seconds for each part that stops."""
_MOMENT_S = 0.5


class Wire:
    """See the module.

    Args:
        timeout: Longest wait for one bucket; ``None`` for half an hour.
        servers: Parameter servers, if any; left with the groups.

    Attributes:
        core: Its credit and partition size may be changed on rank 0 at any time.
        record: Takes what is measured in the fit.
        timeout: In seconds.
    """

    def __init__(
        self,
        groups: SchedulerGroups,
        board: FaultBoard,
        agreed: AgreedSizes,
        options: SchedulerOptions,
        device: torch.device,
        *,
        timeout: timedelta | None,
        servers: JoinedServers | None = None,
    ) -> None:
        self.groups = groups
        self.board = board
        self.agreed = agreed
        path = options.timeline
        self.record = record = Record(None if path is None else Timeline(path, rank=board.rank))
        self.timeout = (timeout or _TIMEOUT).total_seconds()
        self.servers = servers
        self._overtaking = create_overtaking(groups.wire_device(device), timeout=timeout) if agreed.far else None
        self._closed_in_order = False  # no rank waits for a decision on the control group any more
        self._collectives_failed = False
        direct = agreed.far or servers is not None
        self._order = order_of(groups.control, self.on_error, direct=direct, lanes=agreed.far)
        self.core = ByteCore(
            partition_size=agreed.sizes.partition_size,
            credit=agreed.sizes.credit,
            one_at_a_time=options.policy.one_at_a_time,
            overtaking=agreed.far and not options.policy.one_at_a_time,
            order=self._order,
            observer=record.arrived,
        )
        self.route = self._chosen_route(device)
        self._order.start(self.core.update_order)
        self._routing = self.route.routing = self._ordered(device)
        self._turns = InterpreterTurns()

    def _chosen_route(self, device: torch.device) -> AllReduce:
        """Choose how the parts of this fit's gradients travel."""
        data, copies = self.groups.data, PayloadCopies(device) if self.groups.by_host else None
        if self.servers is not None:
            return Served(data, self.on_error, self.servers.push_pull, copies)
        if self.groups.wire_device(device).type == "cuda":
            return OnDevice(data, self.on_error, device)
        if self._overtaking is not None:
            return Sharded(data, self.on_error, self._overtaking, copies)
        return AllReduce(data, self.on_error, copies)

    def _ordered(self, device: torch.device) -> RoutingGroup | None:
        """Route the default group's collectives through the launch order, if groups for that exist."""
        default, groups = dist.group.WORLD, self.groups
        if groups.reports is None or default is None:
            return None
        routing = RoutingGroup(
            default,
            groups.data,
            groups.reports,
            core=self.core,
            order=self._order,
            device=device,
            on_error=self.on_error,
            timeout=self.timeout,
        )
        routing.install()
        return routing

    # ------------------------------------------------------------------ failures

    def explain(self, error: BaseException) -> BaseException:
        """Return the failure of another rank that has caused ``error``, or ``error`` itself."""
        cause = self.core.abort_cause
        # The core's error comes back unchanged or wrapped by torch; other errors are this rank's own.
        wrapped = isinstance(error, RuntimeError) and str(cause) in str(error)
        if cause is not None and (wrapped or isinstance(error, ByteSchedulerError)):
            error = cause
        if self.servers is not None and isinstance(error, SchedulerTimeoutError):
            error = self.servers.find_gone() or error
        return self.board.explain(error)

    def on_error(self, error: BaseException) -> BaseException:
        """Find and report the cause when a collective fails on one of the scheduler's threads."""
        self._collectives_failed = True
        if self.servers is not None and not self.core.abort_cause:
            found = self.servers.find_gone()
            if found is not None:
                found.__cause__ = error
                self.core.abort(found)
                self.board.publish(found)
                return found
        cause = self.core.abort_cause or self.board.explain(error)
        if is_communication_error(cause):
            ended = "or it has ended earlier without an error, as with fewer batches"
            cause = RankFailedError(None, f"which one is not known, {ended}; this broke here: {error}")
            cause.__cause__ = error
        self.core.abort(cause)
        return cause

    # ------------------------------------------------------------------ the end

    def close(
        self, *, failed: bool, idle: Callable[[], bool] = lambda: False, exchanges: Callable[[], object] = lambda: None
    ) -> None:
        """Stop every thread and leave the groups; bounded, never raises.

        Args:
            failed: Whether training ended with an error, also before it began; then nothing waits.
            idle: Returns whether nothing travels past the core.
            exchanges: Ends what else sends on the groups, before they are left.
        """
        parts: list[Callable[[], object]] = [
            lambda: None if self._routing is None else self._routing.uninstall(failed=failed, timeout=STOP_S),
            lambda: self.core.shutdown(timeout=STOP_S, drain=not failed),
            lambda: self._close_order(failed),
            lambda: self.route.stop_encoding(STOP_S),  # it sends on the group
            exchanges,
            # Before the completion thread stops: leaving a NCCL group ends its operations in flight.
            lambda: self._leave_groups(idle()),
            lambda: self.route.stop(STOP_S),
            self._turns.end,
        ]
        if self.record.timeline is not None:
            parts.append(self.record.timeline.close)
        for part in parts:
            try:
                part()
            except Exception as error:
                if not failed:
                    log.warning("While the scheduler was shut down: %s", error)

    def _close_order(self, failed: bool) -> None:
        timeout = _MOMENT_S if failed else self.timeout
        self._closed_in_order = self._order.end(timeout, lambda: self.board.hopeless and not failed)

    def _leave_groups(self, idle: bool) -> None:
        idle = idle and not (self._collectives_failed or self.core.in_flight)
        if self.servers is not None:
            self.servers.leave(idle=idle)
        said = self._routing is None or self._routing.idle
        self.groups.destroy(data_idle=idle and said, control_idle=self._closed_in_order)
        if self._overtaking is not None:
            leave(self._overtaking, idle=idle)
        if self.groups.reports is not None:
            leave(self.groups.reports, idle=said)
