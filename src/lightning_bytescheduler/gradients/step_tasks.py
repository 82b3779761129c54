"""Makes the communication tasks of one step, and says when their data exists."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from lightning_bytescheduler.collectives.operations import Operation, exchange
from lightning_bytescheduler.collectives.transport import GradientTransport, ReadyMark
from lightning_bytescheduler.gradients.profiling import profiled
from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["StepTasks"]


class StepTasks:
    """Makes the tasks of one step.

    Args:
        core: Sends what becomes ready.
        transport: What a sub-task's start does.
        step: Of the backward pass, the same on all ranks.
        device: Where gradients live.
    """

    def __init__(self, core: ByteCore, transport: GradientTransport, step: int, device: torch.device) -> None:
        self.core = core
        self.step = step
        self.device = device
        self.world_size = transport.group.size()
        self._transport = transport

    def enqueue(
        self,
        name: str,
        buffer: torch.Tensor,
        operation: Operation,
        *,
        index: int,
        priority: int,
        wire_share: float,
        ready: ReadyMark | None = None,
        cut_like: CommTask | None = None,
        on_end: Callable[[CommTask], None] | None = None,
        joinable: bool = False,
    ) -> CommTask:
        """Hand a task over.

        Args:
            name: Of the task.
            buffer: What is sent.
            operation: What is done to each part.
            index: Within the step.
            priority: See :class:`CommTask`.
            wire_share: What each rank sends per byte of ``buffer``.
            ready: When the contents of ``buffer`` exist, if they do not yet.
            cut_like: See :meth:`ByteCore.enqueue`.
            on_end: See :class:`CommTask`. Of a joinable task on a GPU: called when the current stream waits for the
                result, or when the task has failed before.
            joinable: Whether the result may be used by streams that wait for it, see :meth:`GradientTransport.join`.
        """
        streams = self._transport.streams if joinable else None
        task = CommTask(
            name,
            buffer.numel(),
            launch=partial(self._send, buffer, operation, ready),
            priority=priority,
            key=(self.step, index),
            wire_bytes=wire_share * buffer.element_size(),
            on_end=on_end if streams is None else streams.forget,
        )
        if streams is not None:
            streams.expect(task, None if on_end is None else partial(on_end, task))
        try:
            self.core.enqueue(task, cut_like=cut_like)
        except BaseException:
            if streams is not None:
                streams.forget(task)
            raise
        return task

    def notify_ready(self, task: CommTask, ready: ReadyMark) -> None:
        """Say that a task's data exists, as soon as it does."""
        streams = self._transport.streams
        if streams is None:
            task.notify_ready()
        else:
            streams.when_ready(ready, task.notify_ready)

    def enqueue_exchange(self, rows: torch.Tensor, *, index: int, priority: int) -> CommTask:
        """Hand over the exchange of the rows of ``rows``, a single message, which exist when the task is ready."""
        task = CommTask(
            "gradient norms",
            1,
            launch=lambda sub_task: self._transport.send(rows, sub_task, exchange),
            priority=priority,
            key=(self.step, index),
            wire_bytes=float(rows[0].numel() * rows.element_size() * (self.world_size - 1)),
        )
        self.core.enqueue(task)
        return task

    def aside(self) -> AbstractContextManager[object]:
        """See :meth:`GradientTransport.aside`."""
        return self._transport.aside()

    def _send(self, buffer: torch.Tensor, operation: Operation, ready: ReadyMark | None, sub_task: SubCommTask) -> None:
        with profiled(f"bytescheduler::start {sub_task.name}"):
            part = buffer[sub_task.offset : sub_task.offset + sub_task.size]
            self._transport.send(part, sub_task, operation, ready)
