"""Builds and stops everything that one ``fit`` needs on one rank.

All threads are named ``bytescheduler-*``, and :meth:`SchedulerRuntime.stop` stops them within a bound: the core's
dispatcher, the transport's thread, the codec thread if gradients are compressed and, on ranks above 0, the follower of
rank 0's launch order. The fault board, with its watcher, exists before and after a runtime.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.collectives.groups import SchedulerGroups, create_overtaking, leave
from lightning_bytescheduler.collectives.launch_order import DecidingOrder, FollowingOrder
from lightning_bytescheduler.collectives.number_exchange import NumberExchange
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.collectives.server_meeting import JoinedServers
from lightning_bytescheduler.collectives.transport import GradientTransport
from lightning_bytescheduler.ddp.agreed_sizes import AgreedSizes
from lightning_bytescheduler.ddp.compressed_reduction import GradientCompression
from lightning_bytescheduler.ddp.device_time import DeviceTime
from lightning_bytescheduler.ddp.engine import GradientEngine
from lightning_bytescheduler.ddp.entry_points import watch_entry_points
from lightning_bytescheduler.ddp.reduction import position_of
from lightning_bytescheduler.ddp.sample_weights import NUMBERS, SampleCounter, SampleWeights
from lightning_bytescheduler.ddp.statistics import SchedulerStatistics
from lightning_bytescheduler.ddp.steps import StepContext
from lightning_bytescheduler.exceptions import (
    ByteSchedulerError,
    RankFailedError,
    SchedulerClosedError,
    ServerFailedError,
)
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.options import SchedulerOptions
from lightning_bytescheduler.scheduler.task import SubCommTask
from lightning_bytescheduler.scheduler.threads import InterpreterTurns
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, QUEUE, REPLY, Timeline

__all__ = ["SchedulerRuntime"]

log = logging.getLogger(__name__)


_STOP_S = 5.0
_LANDING_S = 1.5
_LOOK_S = 0.005  # seconds between two looks at this rank's progress
_MOMENT_S = 0.5
_SERVER_TOLD_S = 12.0  # seconds until another rank has found a dead or silent server and has told all
_DEFAULT_TIMEOUT_S = 1800.0


class SchedulerRuntime:
    """One rank's scheduler during one fit.

    Args:
        timeout: Longest wait for one bucket; ``None`` for half an hour.
        compression: Makes the compression from counters and timeline; ``None`` for none.
        counter: Counts a batch's samples, if ranks are weighted by them; the groups then include one for counts.
        servers: Parameter servers, if any; left when the runtime stops.

    Attributes:
        core: Its credit and partition size may be changed on rank 0 at any time.
        layers: Decides how many layers are compressed; ``None`` unless that varies.
        lost_weights: Why the weights are not those of a whole number of steps, after a failure.
        weights: This rank's weights; ``None`` if all ranks have equal weights.
    """

    def __init__(
        self,
        *,
        groups: SchedulerGroups,
        board: FaultBoard,
        agreed: AgreedSizes,
        options: SchedulerOptions,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        timeout: timedelta | None,
        compression: Callable[[SchedulerStatistics, Timeline | None], GradientCompression] | None = None,
        counter: SampleCounter | None = None,
        servers: JoinedServers | None = None,
    ) -> None:
        self.statistics = SchedulerStatistics()
        self.agreed = agreed
        self.group = groups.data
        self.architecture = "allreduce" if servers is None else "ps"
        self._groups = groups
        self._overtaking = create_overtaking(groups.wire_device(device), timeout=timeout) if agreed.far else None
        self._servers = servers
        self._board = board
        self._timeout = _DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
        self._stopped = False
        self._process = os.getpid()
        self._closed_in_order = False  # of the control group: no rank waits for another decision
        self._collectives_failed = False
        self.lost_weights: SchedulerClosedError | None = None
        self._busy_until = 0.0
        parameters = list(parameters)
        self._compression: GradientCompression | None = None
        self._timeline = None if options.timeline is None else Timeline(options.timeline, rank=board.rank)
        direct = agreed.far or servers is not None
        self._order = (
            DecidingOrder(groups.control, self._on_error, direct=direct, lanes=agreed.far)
            if groups.rank == 0
            else FollowingOrder(groups.control, self._on_error, direct=direct)
        )
        self.core = ByteCore(
            partition_size=agreed.sizes.partition_size,
            credit=agreed.sizes.credit,
            one_at_a_time=options.policy.one_at_a_time,
            overtaking=agreed.far and not options.policy.one_at_a_time,
            order=self._order,
            observer=self._observe,
            debug=options.debug,
        )
        if compression is not None:
            self._compression = compression(self.statistics, self._timeline)
        self.layers = None if self._compression is None else self._compression.layers
        self._transport = GradientTransport(
            groups.data,
            self._on_error,
            device,
            None if servers is None else servers.push_pull,
            self._overtaking,
            by_host=groups.by_host,
            payloads=None if self._compression is None or not groups.by_host else self._compression.work_on(device),
        )
        self.wire_device = self._transport.wire_device
        if servers is not None and self._timeline is not None:
            servers.push_pull.watch_replies(self._observe_reply)
        if isinstance(self._order, FollowingOrder):
            self._order.start(self.core.update_order)
        self._exchange: NumberExchange | None = None
        self.weights: SampleWeights | None = None
        if counter is not None and groups.counts is not None:
            self._exchange = NumberExchange(
                groups.counts, NUMBERS, on_error=self._counts_failed, failure=lambda: self.core.abort_cause
            )
            device_time = DeviceTime(device) if device.type == "cuda" else None
            self.weights = SampleWeights(
                counter,
                self._exchange,
                parameters=parameters,
                exposed=lambda: self.statistics.exposed_s,
                device_time=device_time,
            )
            if device_time is not None:
                self._transport.measure_waits(device_time.waiting)
        context = StepContext(
            core=self.core,
            transport=self._transport,
            parameters=parameters,
            device=device,
            timeout=self._timeout,
            statistics=self.statistics,
            timeline=self._timeline,
            compression=self._compression,
            weights=self.weights,
            sparse=groups.sparse,
        )
        self.engine = GradientEngine(context, by_first_use=options.policy.by_first_use)
        self._routing = self._transport.routing = self._route(device)
        self._turns = InterpreterTurns()
        self._leave_entry_points = watch_entry_points(self.engine)
        board.watch(self)
        # Teardown is skipped if another callback's on_exception raises, and a thread inside torch would abort the
        # process when the interpreter ends.
        atexit.register(self.stop, failed=True)

    def _route(self, device: torch.device) -> RoutingGroup | None:
        """Route the default group's collectives through the launch order, if groups for that exist."""
        default, groups = dist.group.WORLD, self._groups
        if groups.reports is None or default is None:
            return None
        routing = RoutingGroup(
            default,
            groups.data,
            groups.reports,
            core=self.core,
            order=self._order,
            device=device,
            failure=self.failure,
            on_error=self._on_error,
            timeout=self._timeout,
        )
        routing.install()
        return routing

    # Called by the fault board (Watched), on its own thread.

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        """Stop after the gradients of ``step`` steps have arrived, so that all ranks end with the same weights."""
        self._await_arrival(step)
        self.core.abort(fault)
        self.engine.fail_merged(fault)

    def own_failure(self) -> BaseException | None:
        """Return what has stopped the scheduler, from any thread."""
        return self.core.abort_cause

    def failure(self) -> BaseException | None:
        """Return why waiting is in vain, if so."""
        return self.core.abort_cause or self._board.fault

    def phase(self) -> str:
        """Return what this rank is doing, in words."""
        return self.engine.phase

    def steps_handed_over(self) -> int:
        """Return how many backward passes have ended."""
        return self.engine.steps_handed_over

    # Called by the strategy.

    def explain(self, error: BaseException) -> BaseException:
        """Return the failure of another rank that has caused ``error``, or ``error`` itself."""
        cause = self.core.abort_cause
        # The core's error comes back unchanged or wrapped by torch; other errors are this rank's own.
        wrapped = isinstance(error, RuntimeError) and str(cause) in str(error)
        if cause is not None and (wrapped or isinstance(error, ByteSchedulerError)):
            error = cause
        if self._servers is not None:
            error = self._servers.explain_timeout(error)
        return self._explained_by_board(error)

    def fail(self, error: BaseException) -> None:
        """Stop for good, because of this rank's failure or another's.

        Updates whose gradients have arrived are applied first.
        """
        self._await_landing()
        self.core.abort(error)
        self.engine.fail_merged(error)
        self.stop(failed=True)
        try:
            applied, lost = self.engine.land_what_arrived()
        except Exception as not_settled:
            self.lost_weights = SchedulerClosedError(f"The last updates could not be applied: {not_settled}.")
            return
        if lost:
            self.lost_weights = SchedulerClosedError(
                f"{lost} of {applied + lost} parameters lack the update of the last step, as gradients did not arrive."
            )
            self.lost_weights.__cause__ = error

    def stop(self, *, failed: bool) -> None:
        """Stop every thread and leave the groups; bounded, never raises, idempotent.

        Args:
            failed: Whether training ended with an error; then it does not wait.
        """
        if self._stopped or os.getpid() != self._process:  # a forked child must not stop its parent's threads
            return
        self._stopped = True
        self._board.unwatch(self)
        steps: list[Callable[[], object]] = [
            lambda: None if self._routing is None else self._routing.uninstall(failed=failed, timeout=_STOP_S),
            lambda: self.core.shutdown(timeout=_STOP_S, drain=not failed),
            lambda: self._close_order(failed),
            lambda: self._transport.stop_encoding(_STOP_S),  # it sends on the group
            lambda: None if self._exchange is None else self._exchange.close(_STOP_S),
            # Before the completion thread stops: leaving a NCCL group ends its operations in flight.
            self._leave_groups,
            lambda: self._transport.stop(_STOP_S),
            lambda: None if failed or self._compression is None else self._compression.leave_device(),
            lambda: None if self.layers is None else self.layers.close(),
            self._turns.end,
        ]
        if self._timeline is not None:
            steps.append(self._timeline.close)
        for step in steps:
            try:
                step()
            except Exception as error:
                if not failed:
                    log.warning("While the scheduler was shut down: %s", error)
        atexit.unregister(self.stop)

    def close(self, *, failed: bool) -> None:
        """Stop, and make every parameter plain again; see :meth:`stop`."""
        self.stop(failed=failed)
        self.engine.close()
        self._leave_entry_points()

    def _close_order(self, failed: bool) -> None:
        timeout = _MOMENT_S if failed else self._timeout
        self._closed_in_order = self._order.end(timeout, lambda: self._board.hopeless and not failed)

    def _leave_groups(self) -> None:
        idle = not (self._collectives_failed or self.core.in_flight or self.engine.merged_under_way)
        if self._servers is not None:
            self._servers.leave(idle=idle)
        said = self._routing is None or self._routing.idle
        self._groups.destroy(data_idle=idle and said, control_idle=self._closed_in_order)
        if self._overtaking is not None:
            leave(self._overtaking, idle=idle)
        if self._groups.reports is not None:
            leave(self._groups.reports, idle=said)

    def _await_landing(self) -> None:
        """Give the updates of this rank's last step a moment to arrive."""
        deadline = time.monotonic() + _LANDING_S
        with suppress(Exception):
            for task in self.engine.context.step.due_tasks():
                task.wait(max(0.0, deadline - time.monotonic()))

    def _await_arrival(self, step: int | None) -> None:
        """Give gradients of the first ``step`` steps a moment to be sent here and arrive.

        This rank may be behind: the failed rank has sent all that this rank needs to reach that step.
        """
        if step is None:
            return
        deadline = time.monotonic() + _LANDING_S
        while self.engine.steps_handed_over < step and time.monotonic() < deadline and not self._stopped:
            time.sleep(_LOOK_S)
        with suppress(Exception):
            for task in self.engine.context.step.arriving_tasks():
                if task.key.step <= step:
                    task.wait(max(0.0, deadline - time.monotonic()))

    def _counts_failed(self, error: BaseException) -> None:
        self.engine.fail_merged(self._on_error(error))

    def _on_error(self, error: BaseException) -> BaseException:
        """Find and report the cause when a collective fails on one of the scheduler's threads."""
        self._collectives_failed = True
        if self._servers is not None and not self.core.abort_cause:
            found = self._servers.find_gone() or self._servers.explain_timeout(error)
            if isinstance(found, ServerFailedError):
                found.__cause__ = error
                self.core.abort(found)
                self._board.publish(found)
                return found
            error = found
        cause = self.core.abort_cause or self._explained_by_board(error)
        if is_communication_error(cause):
            cause = RankFailedError(None, f"it could not be told which; here that broke: {error}")
            cause.__cause__ = error
        self.core.abort(cause)
        return cause

    def _explained_by_board(self, error: BaseException) -> BaseException:
        if self._servers is None:
            return self._board.explain(error)
        # A rank that timed out has closed its connections, and looks for a silent server before it reports.
        return self._board.explain(error, timeout=_SERVER_TOLD_S)

    def _observe(self, sub: SubCommTask) -> None:
        plain_bytes = sub.size * sub.parent.wire_bytes
        wire_bytes = plain_bytes if sub.encoded_bytes is None else sub.encoded_bytes
        statistics = self.statistics
        statistics.sub_tasks += 1
        statistics.bytes_sent += wire_bytes
        statistics.bytes_uncompressed += plain_bytes
        if sub.encoded_bytes is not None:
            statistics.bytes_compressed += plain_bytes
        statistics.communication_s += max(0.0, sub.finished_at - max(sub.started_at, self._busy_until))
        self._busy_until = max(self._busy_until, sub.finished_at)
        if self._timeline is not None:
            args = {
                "bytes": wire_bytes,
                "priority": position_of(sub.parent),
                "step": sub.parent.key.step,
                "task": sub.parent.key.bucket,
                "partition": sub.index,
            }
            if sub.encoded_bytes is not None:
                args["uncompressed_bytes"] = plain_bytes
            self._timeline.overlapping(sub.parent.name, QUEUE, sub.ready_at, sub.started_at, lane="QUEUE", args=args)
            self._timeline.overlapping(
                sub.parent.name, COMMUNICATION, sub.started_at, sub.finished_at, lane="COMMUNICATION", args=args
            )
            if sub.passage is not None:
                for stage, start, end, nbytes in sub.passage.stages(sub.finished_at):
                    told = {**args, **sub.passage.where, "bytes": nbytes}
                    self._timeline.overlapping(sub.parent.name, stage, start, end, lane=stage.upper(), args=told)

    def _observe_reply(self, worker: int, number: int, nbytes: int, start: float, end: float) -> None:
        """Record a sum that was sent; called on the thread that sends it."""
        if self._timeline is not None:
            args = {"bytes": nbytes, "operation": number}
            self._timeline.span(f"to rank {worker}", REPLY, start, end, lane="REPLY", args=args)
