"""Sends pseudo-gradients through the priority and credit scheduler, beside the training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.completion import CompletionThread
from lightning_bytescheduler.diloco import WireFormat
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.outer_loop.weighted_mean import WeightedMean
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["Exchange", "UpdateExchange"]

_NUMBERS_PER_PART = 2  # one for what goes to a shard's owner, one for what comes back: seeds differ


class Exchange:
    """An update that is on its way.

    Args:
        task: What the scheduler sends.
        mean: What it is filled with.
    """

    def __init__(self, task: CommTask, mean: WeightedMean) -> None:
        self._task = task
        self._mean = mean

    def done(self) -> bool:
        """Whether everybody's update has arrived, or something has failed."""
        return self._task.done()

    def wait(self, timeout: float) -> tuple[Tensor, int]:
        """Wait for all workers' updates.

        Args:
            timeout: Longest wait in seconds.

        Returns:
            The weighted mean, flat, and the sum of the weights.

        Raises:
            SchedulerTimeoutError: If it is not there in time.
            BaseException: What the exchange has failed with.
        """
        self._task.wait(timeout)
        return self._mean.result, self._mean.total


class UpdateExchange:
    """One worker's end of the exchange; every worker starts the same exchanges in the same order.

    Threads: a dispatcher and a completion thread, both ended by :meth:`stop` within a bound.

    Args:
        group: Over all workers; gloo, used by this object alone.
        wire: What travels.
        partition_size: Largest part that is sent at once, in parameters.
        credit: What may be in flight at once, in parameters.
        on_error: Called with what a message failed with, on the completion thread; returns the error to raise.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        wire: WireFormat,
        partition_size: int,
        credit: int,
        on_error: Callable[[BaseException], BaseException],
    ) -> None:
        self._group = group
        self._wire = wire
        self._core = ByteCore(partition_size=partition_size, credit=credit, name="bytescheduler-outer")
        self._completion = CompletionThread(on_error, group)
        self._started = 0
        self._numbers = 0

    @property
    def in_flight(self) -> int:
        """What was sent and has not arrived, in parameters."""
        return self._core.in_flight

    @property
    def abort_cause(self) -> BaseException | None:
        """Why nothing is exchanged any more, or ``None``."""
        return self._core.abort_cause

    def start(
        self, name: str, update: Tensor, *, weight: int, on_end: Callable[[BaseException | None], None]
    ) -> Exchange:
        """Begin to exchange an update; returns at once. For one thread.

        Args:
            name: Shown in logs.
            update: Flat, fp32, on the CPU. Not to be changed before the exchange has ended.
            weight: Of this worker's update.
            on_end: Called once it has ended, with the error if it has failed, on another thread.
        """
        mean = WeightedMean(
            group=self._group, update=update, result=torch.empty_like(update), weight=weight, wire=self._wire
        )
        self._started += 1
        first = self._numbers

        def launch(sub: SubCommTask) -> None:
            number = first + _NUMBERS_PER_PART * sub.index
            self._completion.watch(mean.start(sub.offset, sub.size, number), sub)

        task = CommTask(
            name,
            update.numel(),
            launch=launch,
            key=(self._started, 0),
            wire_bytes=self._wire.payload_bytes(update.numel()) / update.numel(),
            on_end=lambda task: on_end(task.error),
        )
        self._core.enqueue(task)
        self._numbers += _NUMBERS_PER_PART * len(task.sub_tasks)
        task.notify_ready()
        return Exchange(task, mean)

    def abort(self, cause: BaseException) -> None:
        """Fail everything that is under way, and whatever is started later."""
        self._core.abort(cause)

    def stop(self, timeout: float) -> bool:
        """End both threads; returns whether nothing was under way and they ended within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        idle = not self._core.in_flight
        try:
            self._core.shutdown(timeout=timeout, drain=False)
        except (SchedulerTimeoutError, RuntimeError):
            idle = False
        return self._completion.stop(max(0.1, deadline - time.monotonic())) and idle
