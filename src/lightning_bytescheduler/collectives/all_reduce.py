"""All-reduce of a sub-task's part of a flat gradient buffer, in place.

The mean is formed as DDP's reducer forms it: scaled by 1/n before the sum, by multiplication, so that two ranks get
DDP's bits (DESIGN 3, "Mechanism").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import CompletionThread
from lightning_bytescheduler.scheduler.task import SubCommTask

__all__ = ["AllReduceTransport", "ReadyMark"]


class ReadyMark:
    """The moment a buffer's contents exist: at once on a CPU, when the recorded stream gets there on a GPU."""

    __slots__ = ("event",)

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))


class AllReduceTransport:
    """Launches all-reduces; called by the dispatcher thread alone, so ranks that dispatch in one order match.

    Args:
        group: The scheduler's data group.
        on_error: See :class:`CompletionThread`.
    """

    def __init__(self, group: dist.ProcessGroup, on_error: Callable[[BaseException], BaseException]) -> None:
        self._group = group
        self._scale = 1.0 / group.size()
        self._completion = CompletionThread(on_error)
        self._stream: torch.cuda.Stream | None = None

    def send(self, buffer: torch.Tensor, sub_task: SubCommTask, ready: ReadyMark) -> None:
        """Start averaging ``buffer[offset : offset + size]`` over all ranks.

        Args:
            buffer: The task's flat tensor.
            sub_task: Names offset and size; told when the result is there.
            ready: When the buffer's contents exist.
        """
        part = buffer[sub_task.offset : sub_task.offset + sub_task.size]
        if ready.event is None:
            part.mul_(self._scale)
            work = self._group.allreduce([part])
            self._completion.watch(work, sub_task)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready.event)
            part.mul_(self._scale)
            work = self._group.allreduce([part])
            work.wait()  # NCCL: makes this stream wait, not the host
            finished = torch.cuda.Event()
            finished.record(self._stream)
        self._completion.watch(work, sub_task, finished)

    def stop(self, timeout: float) -> bool:
        """End the completion thread within ``timeout`` seconds; returns whether it ended."""
        return self._completion.stop(timeout)
