"""Puts all-reduces of steps taken as DDP's on the timeline: they go past the scheduler's core, which records the rest.

Used while there is a timeline only; without one, such steps talk to the process group itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.device_streams import ReadyMark
from lightning_bytescheduler.ddp.steps import StepContext
from lightning_bytescheduler.timeline.timeline import COMMUNICATION

__all__ = ["recorded"]


def recorded(group: dist.ProcessGroup, context: StepContext, step: int) -> dist.ProcessGroup:
    """Stand in for ``group`` in one step as DDP's, and record what is reduced.

    Args:
        group: The scheduler's data group.
        context: Shared with all steps of the fit; has a timeline.
        step: Its number.
    """
    return cast("dist.ProcessGroup", _RecordedGroup(group, context, step))


class _RecordedGroup:
    def __init__(self, group: dist.ProcessGroup, context: StepContext, step: int) -> None:
        self._group = group
        self._context = context
        self._step = step
        self._wire_share = 2.0 * (group.size() - 1) / group.size()
        self._messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, buffers: list[torch.Tensor]) -> dist.Work:
        return self._recorded(self._group.allreduce, buffers)

    def allreduce_coalesced(self, buffers: list[torch.Tensor]) -> dist.Work:
        return self._recorded(self._group.allreduce_coalesced, buffers)

    def _recorded(self, reduce: Callable[[list[torch.Tensor]], dist.Work], buffers: list[torch.Tensor]) -> dist.Work:
        message = _Message(self._context, self._step, self._messages, self._wire_share, buffers)
        self._messages += 1
        message.when_reached(message.begin)
        work = reduce(buffers)
        with suppress(RuntimeError):  # a backend without futures trains all the same
            work.get_future().add_done_callback(message.done)
        return work


class _Message:
    """One all-reduce; on a GPU its moments are those at which the device comes by."""

    def __init__(
        self, context: StepContext, step: int, number: int, wire_share: float, buffers: Sequence[torch.Tensor]
    ) -> None:
        self._context = context
        self._args = {
            "bytes": wire_share * sum(buffer.numel() * buffer.element_size() for buffer in buffers),
            "step": step,
            "task": number,
            "partition": 0,
            "buckets": len(buffers),
        }
        self._began = context.clock()

    def when_reached(self, then: Callable[[], None]) -> None:
        """Call ``then`` when what was enqueued until now on the current stream is done; at once on a CPU."""
        streams = self._context.transport.streams
        if streams is None:
            then()
        else:
            streams.when_ready(ReadyMark(self._context.device), then)

    def begin(self) -> None:
        self._began = self._context.clock()

    def done(self, future: torch.futures.Future[object]) -> None:
        """Its result is there, or on a GPU is going to be where the current stream comes by; on any thread."""
        try:
            future.value()
        except Exception:  # whoever waits for it hears of that
            return
        self.when_reached(partial(self._end, self._args))

    def _end(self, args: dict[str, float]) -> None:
        timeline = self._context.timeline
        if timeline is not None:
            name = f"all-reduce {args['task']}"
            now = self._context.clock()
            timeline.overlapping(name, COMMUNICATION, self._began, now, lane="COMMUNICATION", args=args)
