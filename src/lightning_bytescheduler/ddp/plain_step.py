"""A step as with DDP: its gradients are awaited at the end of the backward pass.

DDP gets completed futures, and the hook of the last bucket waits. A future that another thread completes would take the
interpreter from the backward pass once per bucket, and DDP's wait could not be ended. On a CPU all gradients have
arrived when the last hook returns; on a GPU the current stream waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_bytescheduler.ddp.reduction import GradientBucket
from lightning_bytescheduler.ddp.steps import StepContext, TrainingStep
from lightning_bytescheduler.scheduler.task import CommTask

__all__ = ["AwaitedBuckets", "PlainStep", "ScheduledBuckets"]


class AwaitedBuckets(Protocol):
    """Averages the buckets of one backward pass, and waits for them."""

    kind: str

    def send(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> None:
        """Begin to average the buffer of the next bucket over all ranks, in place."""

    def finish(self) -> float:
        """Wait for all buckets, after the last one; returns the seconds of idle waiting, infinite if unknown.

        Raises:
            BaseException: The error of a reduction, or that of :meth:`fail`.
        """

    def fail(self, error: BaseException) -> None:
        """End with ``error`` what does not wait for the scheduler's core; for any thread."""

    @property
    def under_way(self) -> bool:
        """Whether a message outside the scheduler's core has not arrived."""


class ScheduledBuckets:
    """Buckets that the scheduler sends; see :class:`AwaitedBuckets`.

    Args:
        position_of: Returns a bucket's position in the forward pass, from its index and parameters.
    """

    kind = "synchronised"
    under_way = False

    def __init__(
        self, context: StepContext, number: int, position_of: Callable[[int, list[nn.Parameter]], int]
    ) -> None:
        self._context = context
        self._number = number
        self._position_of = position_of
        self._reduction = context.reduction(number)
        self._tasks: list[CommTask] = []

    def send(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> None:
        """See :class:`AwaitedBuckets`."""
        context, index = self._context, bucket.index()
        parameters = cast("list[nn.Parameter]", bucket.parameters())
        known = GradientBucket(index, parameters, buffer, self._position_of(index, parameters))
        self._tasks.append(self._reduction.reduce(context.on_the_wire(known, self._number)))

    def finish(self) -> float:
        """See :class:`AwaitedBuckets`."""
        context = self._context
        start = context.clock()
        for task in self._tasks:
            context.transport.join(task, context.timeout)
        return context.clock() - start

    def fail(self, error: BaseException) -> None:
        """See :class:`AwaitedBuckets`."""


class PlainStep(TrainingStep):
    """See the module, and :class:`TrainingStep`.

    Args:
        buckets: Averages the step's buckets.
        on_exposed: Called with the seconds that training has waited idle at the end; may be ``None``.
        each: Wait in the hook of each bucket, as DDP does not say which one is the last.
    """

    def __init__(
        self,
        context: StepContext,
        number: int,
        buckets: AwaitedBuckets,
        on_exposed: Callable[[float], None] | None = None,
        *,
        each: bool = False,
    ) -> None:
        super().__init__(context, number)
        self._each = each
        self.kind = buckets.kind
        self._buckets = buckets
        self._on_exposed = on_exposed

    def reduce(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`."""
        if buffer.numel():
            self._buckets.send(bucket, buffer)
        if bucket.is_last() or self._each:
            self._finish()
        return self.context.futures.completed(bucket.index(), buffer)

    def reduce_sparse(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See :class:`TrainingStep`."""
        if bucket.is_last() or self._each:
            self._finish()
        return super().reduce_sparse(bucket, buffer)

    def _finish(self) -> None:
        self.waits_from = self.waits_from or self.context.clock()
        exposed = self._buckets.finish()
        if self._on_exposed is not None:
            self._on_exposed(exposed)

    def fail(self, error: BaseException) -> None:
        """See :class:`TrainingStep`."""
        self._buckets.fail(error)

    @property
    def under_way(self) -> bool:
        """See :class:`TrainingStep`."""
        return self._buckets.under_way
