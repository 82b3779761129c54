"""Starts collectives on parts of gradient buffers and tells the sub-tasks when they have ended."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import CompletionThread
from lightning_bytescheduler.collectives.operations import Operation, StartedOperation
from lightning_bytescheduler.scheduler.task import SubCommTask

__all__ = ["GradientTransport", "ReadyMark"]


class ReadyMark:
    """The moment a buffer's contents exist: at once on a CPU, when the recorded stream gets there on a GPU."""

    __slots__ = ("event",)

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))


class GradientTransport:
    """Launches collectives, one at a time (the core's launching lock), so ranks that launch in one order match.

    Args:
        group: The scheduler's data group.
        on_error: See :class:`CompletionThread`.
    """

    def __init__(self, group: dist.ProcessGroup, on_error: Callable[[BaseException], BaseException]) -> None:
        self.group = group
        self._completion = CompletionThread(on_error, group)
        self._stream: torch.cuda.Stream | None = None
        self._started = 0

    def send(
        self, part: torch.Tensor, sub_task: SubCommTask, operation: Operation, ready: ReadyMark | None = None
    ) -> None:
        """Start ``operation`` on ``part``.

        Args:
            part: What is sent and received, in place.
            sub_task: Told when the result is there.
            operation: Of :mod:`~lightning_bytescheduler.collectives.operations`.
            ready: When the part's contents exist; left out if they exist, or came from this transport.
        """
        self._started += 1
        if part.device.type != "cuda":
            self._completion.watch(operation(self.group, part, self._started), sub_task)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(part.device)
        with torch.cuda.stream(self._stream):
            if ready is not None and ready.event is not None:
                self._stream.wait_event(ready.event)
            started = operation(self.group, part, self._started)
            following: StartedOperation | None = started
            while following is not None:
                for work in following.works:
                    work.wait()  # NCCL: makes this stream wait, not the host
                following = None if following.finish is None else following.finish()
            finished = torch.cuda.Event()
            finished.record(self._stream)
        self._completion.watch(StartedOperation(started.works), sub_task, finished)

    def stop(self, timeout: float) -> bool:
        """End the completion thread within ``timeout`` seconds; returns whether it ended."""
        return self._completion.stop(timeout)
