"""Everything one ``fit`` needs on one rank, put together and taken apart in one place.

Threads, all named ``bytescheduler-*`` and stopped by :meth:`SchedulerRuntime.close` within a bound: the core's
dispatcher, the transport's completion thread, the fault board's watcher and, on ranks above 0, the follower of rank 0's
launch order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.all_reduce import AllReduceTransport
from lightning_bytescheduler.collectives.faults import FaultBoard
from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.launch_order import DecidingOrder, FollowingOrder
from lightning_bytescheduler.collectives.link_probe import probe_link
from lightning_bytescheduler.exceptions import ByteSchedulerError, RankFailedError
from lightning_bytescheduler.gradients.engine import GradientEngine
from lightning_bytescheduler.gradients.statistics import SchedulerStatistics
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.scheduler.task import SubCommTask
from lightning_bytescheduler.scheduler.timeline import COMMUNICATION, QUEUE, Timeline
from lightning_bytescheduler.tuning.link import LinkEstimate, SchedulerSizes, default_sizes

__all__ = ["AgreedSizes", "SchedulerRuntime", "agree_on_sizes"]

log = logging.getLogger(__name__)

_STOP_S = 5.0
_DEFAULT_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class AgreedSizes:
    """Sizes that hold on every rank, and a number that names this fit on the rendezvous store."""

    sizes: SchedulerSizes
    link: LinkEstimate | None
    instance: int


def agree_on_sizes(
    groups: SchedulerGroups, options: SchedulerOptions, parameters: Iterable[nn.Parameter], device: torch.device
) -> AgreedSizes:
    """Settle partition, credit and bucket size; rank 0's options count, as its environment may differ from others'.

    Probes the link unless rank 0 has both sizes fixed.
    """
    groups.warm_up(device)
    message = torch.tensor([options.partition_size or 0, options.credit or 0, time.time_ns() // 1000])
    dist.broadcast(message, src=0, group=groups.control)
    partition, credit, instance = message.tolist()
    link = None
    trainable = [p for p in parameters if p.requires_grad]
    count = sum(p.numel() for p in trainable)
    width = max((p.element_size() for p in trainable), default=4)
    if partition and credit:
        bucket = max(partition * width, min(count * width // 64, 25 * 1024 * 1024))
        sizes = SchedulerSizes(partition_size=min(partition, credit), credit=credit, bucket_bytes=bucket)
    else:
        link = probe_link(groups.data, device)
        sizes = default_sizes(parameters=count, bytes_per_parameter=width, link=link)
        if credit:
            sizes = SchedulerSizes(
                partition_size=min(sizes.partition_size, credit), credit=credit, bucket_bytes=sizes.bucket_bytes
            )
        elif partition:
            sizes = SchedulerSizes(
                partition_size=partition,
                credit=max(sizes.credit, 2 * partition),
                bucket_bytes=max(sizes.bucket_bytes, min(partition * width, 25 * 1024 * 1024)),
            )
    return AgreedSizes(sizes=sizes, link=link, instance=instance)


class SchedulerRuntime:
    """One rank's scheduler during one fit.

    Args:
        groups: The scheduler's process groups.
        agreed: From :func:`agree_on_sizes`.
        options: This rank's options.
        parameters: What DDP reduces.
        device: Where gradients live.
        timeout: Longest wait for one bucket; ``None`` for half an hour.
    """

    def __init__(
        self,
        *,
        groups: SchedulerGroups,
        agreed: AgreedSizes,
        options: SchedulerOptions,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        timeout: timedelta | None,
    ) -> None:
        self.statistics = SchedulerStatistics()
        self._groups = groups
        self._closed = False
        self._busy_until = 0.0
        parameters = list(parameters)
        self._wire_bytes_per_element = (
            2 * (groups.world_size - 1) / groups.world_size * max(p.element_size() for p in parameters)
        )
        self._timeline = None if options.timeline is None else Timeline(options.timeline, rank=groups.rank)
        self._board = FaultBoard.open(
            instance=agreed.instance, rank=groups.rank, world_size=groups.world_size, on_fault=self._abort
        )
        self._order = (
            DecidingOrder(groups.control) if groups.rank == 0 else FollowingOrder(groups.control, self._on_error)
        )
        self._core = ByteCore(
            partition_size=agreed.sizes.partition_size,
            credit=agreed.sizes.credit,
            order=self._order,
            observer=self._observe,
            debug=options.debug,
        )
        self._transport = AllReduceTransport(groups.data, self._on_error)
        if isinstance(self._order, FollowingOrder):
            self._order.start(self._core.update_order)
        self.engine = GradientEngine(
            core=self._core,
            transport=self._transport,
            parameters=parameters,
            device=device,
            cross_barrier=options.cross_barrier,
            timeout=_DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds(),
            statistics=self.statistics,
            timeline=self._timeline,
        )

    @property
    def core(self) -> ByteCore:
        """The scheduler core; its credit and partition size may be changed on rank 0 at any time."""
        return self._core

    def explain(self, error: BaseException) -> BaseException:
        """Return the failure of another rank that ``error`` is a consequence of, or ``error`` itself."""
        if isinstance(error, RankFailedError):
            return error
        cause = self._core.abort_cause
        if cause is not None:
            return cause
        return self._board.diagnose(error) if _is_communication_error(error) else error

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails with ``error``, and stop sending."""
        if not isinstance(error, RankFailedError):
            self._board.publish(error)
        self._core.abort(error)

    def close(self, *, failed: bool) -> None:
        """Stop every thread and leave the groups; bounded, never raises, idempotent.

        Args:
            failed: Whether training ended with an error: then nothing is waited for.
        """
        if self._closed:
            return
        self._closed = True
        steps = [
            self.engine.close,
            lambda: self._core.shutdown(timeout=_STOP_S, drain=not failed),
            lambda: self._close_order(failed),
            lambda: self._transport.stop(_STOP_S),
            self._board.close,
        ]
        if self._timeline is not None:
            steps.append(self._timeline.close)
        steps.append(self._groups.destroy)
        for step in steps:
            try:
                step()
            except Exception as error:
                if not failed:
                    log.warning("While the scheduler was shut down: %s", error)

    def _close_order(self, failed: bool) -> None:
        if isinstance(self._order, DecidingOrder):
            if not failed:
                self._order.close()
                self._order.wait_sent(_STOP_S)
        elif failed or not self._order.wait_closed(_STOP_S):
            self._order.stop(_STOP_S)

    def _abort(self, error: BaseException) -> None:
        self._core.abort(error)

    def _on_error(self, error: BaseException) -> BaseException:
        """A collective failed, on one of the scheduler's threads: find out why, and let everybody here know."""
        cause = self._core.abort_cause or self._board.diagnose(error)
        if isinstance(cause, RankFailedError):
            log.error("[rank %d] %s", self._groups.rank, cause)
        self._core.abort(cause)
        return cause

    def _observe(self, sub: SubCommTask) -> None:
        """Called by the core with each sub-task that ended."""
        wire_bytes = sub.size * self._wire_bytes_per_element
        statistics = self.statistics
        statistics.sub_tasks += 1
        statistics.bytes_sent += wire_bytes
        statistics.communication_s += max(0.0, sub.finished_at - max(sub.started_at, self._busy_until))
        self._busy_until = max(self._busy_until, sub.finished_at)
        if self._timeline is not None:
            step, bucket = sub.parent.key
            args = {
                "bytes": wire_bytes,
                "priority": sub.priority,
                "step": step,
                "task": bucket,
                "partition": sub.index,
            }
            self._timeline.overlapping(sub.parent.name, QUEUE, sub.ready_at, sub.started_at, lane="QUEUE", args=args)
            self._timeline.overlapping(
                sub.parent.name, COMMUNICATION, sub.started_at, sub.finished_at, lane="COMMUNICATION", args=args
            )


def _is_communication_error(error: BaseException) -> bool:
    if isinstance(error, ByteSchedulerError):
        return False
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL", "Connection closed"))
