"""Starts collectives on parts of gradient buffers and tells the sub-tasks when they have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.codec import CodecThread
from lightning_bytescheduler.collectives.completion import CompletionThread, Place
from lightning_bytescheduler.collectives.device_streams import DeviceStreams, ReadyMark
from lightning_bytescheduler.collectives.operations import (
    Averaging,
    Operation,
    StartedOperation,
    all_reduce,
    all_reduce_in_shards,
)
from lightning_bytescheduler.collectives.push_pull import PushPull
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["EncodedStart", "GradientTransport", "ReadyMark"]

_GATHERS = -1  # a lane of its own

EncodedStart = Callable[[dist.ProcessGroup, SubCommTask, int], StartedOperation]
"""Encodes and starts to send on (group, sub-task, number of the operation); messages between two ranks only."""


class GradientTransport:
    """Launches collectives, one at a time (the core's launching lock), so ranks that launch in one order match.

    On a GPU an operation's result may be used, by the stream that joins it, before the host knows that it is there; see
    :mod:`~lightning_bytescheduler.collectives.device_streams`.

    Args:
        group: The scheduler's data group.
        on_error: See :class:`CompletionThread`.
        device: Where gradients live.
        push_pull: Takes the place of all-reduces, where parameter servers average gradients.
        far: Whether messages are long under way: all-reduces are of as few as can be, one after the other, then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_error: Callable[[BaseException], BaseException],
        device: torch.device | None = None,
        push_pull: PushPull | None = None,
        *,
        far: bool = False,
    ) -> None:
        self.group = group
        self._far = far
        self.push_pull = push_pull
        self.routing: RoutingGroup | None = None
        """What has collectives of others in the order; ``None`` where they need none."""
        self._started = 0
        self._on_error = on_error
        self._failing = threading.Lock()  # held while it is found out why something failed; taken first
        self._telling = threading.Lock()  # held while a sub-task's end is told; the launching lock is only tried then
        self._lanes: dict[int, CompletionThread] = {}
        self._streams: DeviceStreams | None = None
        self._completion: CompletionThread | None = None
        self._codec = CodecThread(on_error)
        if device is not None and device.type == "cuda":
            self._streams = DeviceStreams(group, device, on_error)
        elif far:
            self._lanes[_GATHERS] = gathers = CompletionThread(self._failed, group, "gathers", self._telling)
            self._completion = CompletionThread(self._failed, group, telling=self._telling, closing=gathers)
        else:
            self._completion = CompletionThread(on_error, group if push_pull is None else push_pull.group)

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
        if self.push_pull is not None:
            self.push_pull.shares.expect(sub_task.parent.key.bucket, sub_task.index)
        if self._completion is not None:
            try:
                started = operation(self.group, part, self._started)
            except RuntimeError as error:
                if self.push_pull is None or not is_communication_error(error):
                    raise
                raise self._failed(error) from error  # a connection has ended before anybody waited for it
            self._lane(started.lane, self._completion).watch(started, sub_task)
        elif self._streams is not None:
            self._streams.send(part, sub_task, operation, self._started, ready)

    def _lane(self, lane: int | None, otherwise: CompletionThread) -> CompletionThread:
        """Who waits for operations of ``lane``; called under the launching lock."""
        if lane is None:
            return otherwise
        found = self._lanes.get(lane)
        if found is None:
            group = self.group if self.push_pull is None else self.push_pull.group
            found = self._lanes[lane] = CompletionThread(self._failed, group, f"pulls-{lane}", self._telling)
        return found

    def _failed(self, error: BaseException) -> BaseException:
        """One lane after the other: the second finds out why the first has failed."""
        with self._failing:
            return self._on_error(error)

    def send_encoded(self, sub_task: SubCommTask, start: EncodedStart) -> None:
        """Have a sub-task's data encoded and sent, on a thread of its own; on a CPU.

        Args:
            sub_task: Told when the result is there.
            start: Called on the codec thread; what it returns is waited for like any operation.

        Raises:
            RuntimeError: If the data is not on a CPU.
        """
        if self._completion is None:
            raise RuntimeError("Encoded gradients travel from a CPU only.")
        self._started += 1
        place = self._completion.reserve(sub_task)
        self._codec.run(partial(self._encode, sub_task, start, self._started, place), sub_task)

    def _encode(self, sub_task: SubCommTask, start: EncodedStart, number: int, place: Place) -> None:
        started = None
        try:
            started = start(self.group, sub_task, number)
        finally:
            place.fill(started)

    @property
    def all_reduce(self) -> Averaging:
        """What averages a part over all ranks."""
        if self.push_pull is not None:
            return self.push_pull.reduce
        return all_reduce_in_shards if self._far else all_reduce

    @property
    def wire_share(self) -> float:
        """What :attr:`all_reduce` has each rank send for a byte."""
        size = self.group.size()
        return 2 * (size - 1) / size if self.push_pull is None else self.push_pull.wire_share

    @property
    def streams(self) -> DeviceStreams | None:
        """Where results are joined by streams; ``None`` on a CPU, where whoever needs a result waits for it."""
        return self._streams

    def join(self, task: CommTask, timeout: float) -> None:
        """Wait for a task's result, on the host or, where that is enough, on the current stream.

        Args:
            task: What is waited for.
            timeout: Longest wait of the host, in seconds.

        Raises:
            SchedulerTimeoutError: If it did not come in time.
            BaseException: Whatever the task failed with.
        """
        if self._streams is None:
            task.wait(timeout)
        else:
            self._streams.join(task, timeout)

    def side_stream(self) -> AbstractContextManager[object]:
        """Where numbers for the host are computed, from data that it knows to exist: see :class:`DeviceStreams`."""
        return nullcontext() if self._streams is None else self._streams.side_stream()

    def stop_encoding(self, timeout: float) -> bool:
        """End the thread that encodes, within ``timeout`` seconds; before the group is left. Returns whether it did."""
        return self._codec.stop(timeout)

    def stop(self, timeout: float) -> bool:
        """End the thread that waits for results, within ``timeout`` seconds; returns whether it ended."""
        deadline = time.monotonic() + timeout
        lanes = [lane.stop(max(0.1, deadline - time.monotonic())) for lane in list(self._lanes.values())]
        stopped = self._completion if self._streams is None else self._streams
        return (stopped is None or stopped.stop(max(0.1, deadline - time.monotonic()))) and all(lanes)
