"""Starts collectives on parts of gradient buffers, and notifies the sub-tasks when they have ended.

It also has the codec thread, ``bytescheduler-codec``, which encodes so that neither the training nor a launch waits.
The transport owns it and starts it with the first sub-task to encode. It works in the order of launches and holds no
lock. The completion thread, which decodes, follows the same order. All its work ends by itself: arithmetic on one
partition, and messages that are begun without waiting. So :meth:`GradientTransport.stop_encoding` waits for one
partition at most.

Why no rank waits forever: encoded data travels as messages between two ranks, with the number of the operation, which
is given at launch, in one order on all ranks. So it does not matter when a message begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import CompletionThread, Place, naming
from lightning_bytescheduler.collectives.device_streams import DeviceStreams, ReadyMark
from lightning_bytescheduler.collectives.host_copies import HostCopies, PayloadCopies
from lightning_bytescheduler.collectives.operations import (
    Averaging,
    Operation,
    StartedOperation,
    all_reduce,
    all_reduce_in_shards,
    ending_with,
    profiled,
)
from lightning_bytescheduler.collectives.push_pull import PushPull
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.scheduler.threads import WorkThread

__all__ = ["EncodedStart", "GradientTransport", "ReadyMark"]


_BROADCASTS = "local-broadcast"  # waits for messages to the other ranks of a node
_GATHERS = -1  # of the first lane; -2 for the second

EncodedStart = Callable[[dist.ProcessGroup, SubCommTask, int], StartedOperation]
"""Encodes and starts sends on (group, sub-task, number of the operation); only messages between two ranks."""


class GradientTransport:
    """Launches collectives, one at a time (the core's launching lock), so ranks that launch in one order match.

    On a GPU a stream that joins an operation may use its result before the host knows that it has ended; see
    :mod:`~lightning_bytescheduler.collectives.device_streams`.

    Args:
        push_pull: Replaces all-reduces, if parameter servers average gradients.
        overtaking: The second lane's group, with high latency. All-reduces then use as few sequential messages as
            possible.
        by_host: Whether data travels from host memory, on a group for that.

    Attributes:
        host_copies: Copies gradients that travel from host memory; ``None`` if they travel from their device.
        payloads: As given; ``None`` if codecs work in host memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_error: Callable[[BaseException], BaseException],
        device: torch.device | None = None,
        push_pull: PushPull | None = None,
        overtaking: dist.ProcessGroup | None = None,
        *,
        by_host: bool = False,
        payloads: PayloadCopies | None = None,
    ) -> None:
        self.group = group
        self.payloads = payloads
        self.host_copies = None if device is None or not by_host else HostCopies(device, on_error)
        self.wire_device = torch.device("cpu") if device is None or by_host else device
        self._around_waits: Callable[[], AbstractContextManager[object]] = nullcontext
        self.push_pull = push_pull
        self.routing: RoutingGroup | None = None
        """Orders other code's collectives; ``None`` if they need no order."""
        self._started = 0
        self._on_error = on_error
        self._failing = threading.Lock()  # held while the cause of a failure is found; taken first
        self._telling = threading.Lock()  # held while a sub-task is notified; the launching lock is then only tried
        self._lanes: dict[int | str, CompletionThread] = {}
        self._streams: DeviceStreams | None = None
        self._completions: list[tuple[dist.ProcessGroup, CompletionThread]] = []  # by lane; empty if streams wait
        self._codec = WorkThread("codec")
        if self.wire_device.type == "cuda":
            self._streams = DeviceStreams(group, self.wire_device, on_error)
        elif overtaking is not None:
            self._completions = [(one, self._in_two_halves(one, n)) for n, one in enumerate((group, overtaking))]
        else:
            messages = group if push_pull is None else push_pull.group
            self._completions = [(group, CompletionThread(on_error, messages))]

    def launch(
        self,
        buffer: torch.Tensor,
        operation: Operation,
        ready: ReadyMark | None,
        on_part: Callable[[SubCommTask], None] | None,
        sub_task: SubCommTask,
    ) -> None:
        """Launch a sub-task of a task whose data is ``buffer``; bound to the first four, it is the task's ``launch``.

        Args:
            buffer: The task's data, flat, to send and receive in place.
            operation: From :mod:`~lightning_bytescheduler.collectives.operations`.
            ready: When the buffer is complete; ``None`` if it is, or came from this transport.
            on_part: Called with the sub-task when its result has arrived, before it is notified; on a CPU.
            sub_task: Notified when the result has arrived.
        """
        part = buffer[sub_task.offset : sub_task.offset + sub_task.size]
        with profiled(f"bytescheduler::start {sub_task.name}"):
            self.send(part, sub_task, operation, ready, None if on_part is None else partial(on_part, sub_task))

    def launch_encoded(
        self, start: EncodedStart, on_part: Callable[[SubCommTask], None] | None, sub_task: SubCommTask
    ) -> None:
        """Launch a sub-task whose data ``start`` encodes; see :meth:`launch` and :meth:`send_encoded`."""
        with profiled(f"bytescheduler::start {sub_task.name}"):
            self.send_encoded(sub_task, start, None if on_part is None else partial(on_part, sub_task))

    def send(
        self,
        part: torch.Tensor,
        sub_task: SubCommTask,
        operation: Operation,
        ready: ReadyMark | None = None,
        last: Callable[[], None] | None = None,
    ) -> None:
        """Start ``operation`` on ``part``.

        Args:
            part: Data to send and receive, in place.
            sub_task: Notified when the result has arrived.
            operation: From :mod:`~lightning_bytescheduler.collectives.operations`.
            ready: When the part is complete; ``None`` if it is, or came from this transport.
            last: Called when the operation has ended, before the sub-task is notified; on a CPU.
        """
        self._started += 1
        if self.push_pull is not None:
            self.push_pull.expect(sub_task.parent.key.bucket, sub_task.index)
        if self._streams is not None:
            self._streams.send(part, sub_task, operation, self._started, ready)
        else:
            group, completion = self._completions[sub_task.lane]
            try:
                started = _ending(operation(group, part, self._started), last)
            except RuntimeError as error:
                if self.push_pull is None or not is_communication_error(error):
                    raise
                raise self._failed(error) from error  # the connection has ended before the wait
            sub_task.passage = started.passage
            self._lane(started.lane, completion).watch(started, sub_task)

    def _lane(self, lane: int | str | None, otherwise: CompletionThread) -> CompletionThread:
        """Return the thread that waits for operations of ``lane``; called under the launching lock."""
        if lane is None:
            return otherwise
        found = self._lanes.get(lane)
        if found is None:
            group = self.group if self.push_pull is None else self.push_pull.group
            name, closing = f"pulls-{lane}", self._lanes.get(_BROADCASTS)
            if self.push_pull is not None and self.push_pull.local is not None and closing is None:
                closing = self._lanes[_BROADCASTS] = CompletionThread(self._failed, group, _BROADCASTS, self._telling)
            found = self._lanes[lane] = CompletionThread(self._failed, group, name, self._telling, closing)
        return found

    def _in_two_halves(self, group: dist.ProcessGroup, lane: int) -> CompletionThread:
        """Return the thread for first halves of ``lane``; another thread waits for second halves."""
        number = f"-{lane}" if lane else ""
        gathers = CompletionThread(self._failed, group, f"gathers{number}", self._telling)
        first = CompletionThread(self._failed, group, f"completion{number}", telling=self._telling, closing=gathers)
        self._lanes[_GATHERS - lane] = gathers
        return first

    def _failed(self, error: BaseException) -> BaseException:
        """Find the cause of a failure, for one lane after the other, so that the second sees the first's."""
        with self._failing:
            return self._on_error(error)

    def send_encoded(self, sub_task: SubCommTask, start: EncodedStart, last: Callable[[], None] | None = None) -> None:
        """Encode and send a sub-task's data on the codec thread; from host memory.

        Args:
            sub_task: Notified when the result has arrived.
            start: Called on the codec thread; its result is awaited like any operation.
            last: See :meth:`send`.

        Raises:
            RuntimeError: If data does not travel from host memory.
        """
        if not self._completions:
            raise RuntimeError("Encoded gradients travel from host memory only.")
        self._started += 1
        group, completion = self._completions[sub_task.lane]
        encoded = partial(start, group, sub_task, self._started)
        place = completion.reserve(sub_task)

        def fail(error: BaseException) -> None:
            place.fill(None)  # also where the work has not begun: others wait behind it
            sub_task.fail(self._on_error(naming(sub_task, error)))

        self._codec.put(partial(_encode, encoded, place, last), fail)

    @property
    def all_reduce(self) -> Averaging:
        """The operation that averages a part over all ranks."""
        if self.push_pull is not None:
            return self.push_pull.reduce
        return all_reduce if len(self._completions) < 2 else all_reduce_in_shards

    @property
    def wire_share(self) -> float:
        """Bytes that each rank sends in :attr:`all_reduce` per byte."""
        size = self.group.size()
        return 2 * (size - 1) / size if self.push_pull is None else self.push_pull.wire_share

    @property
    def streams(self) -> DeviceStreams | None:
        """Streams that join results; ``None`` on a CPU, where threads wait for results."""
        return self._streams

    def join(self, task: CommTask, timeout: float) -> None:
        """Wait for a task's result, on the host or, if that is enough, on the current stream.

        Args:
            task: The task.
            timeout: Longest wait of the host, in seconds.

        Raises:
            SchedulerTimeoutError: If it did not come in time.
            BaseException: The task's error.
        """
        with self._around_waits():
            if self._streams is None:
                task.wait(timeout)
            else:
                self._streams.join(task, timeout)

    def measure_waits(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """Enter ``around`` during each wait for a task's result."""
        self._around_waits = around

    def when_ready(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """Call ``then`` when the device has passed ``mark``; at once if there is nothing to wait for."""
        if self._streams is not None:
            self._streams.when_ready(mark, then)
        elif self.host_copies is not None and mark.event is not None:
            self.host_copies.when_made(mark, then)
        else:
            then()

    def mark(self, buffer: torch.Tensor) -> ReadyMark:
        """Return the moment at which ``buffer``, written by the current stream, is complete."""
        if self.payloads is not None and buffer.device.type == self.payloads.device.type:
            return self.payloads.mark()
        return ReadyMark(self.wire_device)

    def side_stream(self) -> AbstractContextManager[object]:
        """Return the context for computing host values from complete data: see :class:`DeviceStreams`."""
        if self.payloads is not None:
            return self.payloads.aside()
        return nullcontext() if self._streams is None else self._streams.side_stream()

    def stop_encoding(self, timeout: float) -> bool:
        """End the codec thread within ``timeout`` seconds, before the group is left; returns whether it ended.

        Waits for a device that encodes or decodes end, too.
        """
        if self.payloads is not None:
            self.payloads.stop()
        return self._codec.stop(timeout, drop=True)

    def stop(self, timeout: float) -> bool:
        """End the threads that wait for results, within ``timeout`` seconds; returns whether they ended."""
        deadline = time.monotonic() + timeout
        copying = self.host_copies is None or self.host_copies.stop(timeout)  # first, as others may wait for copies
        lanes = [lane.stop(max(0.1, deadline - time.monotonic())) for lane in list(self._lanes.values())]
        for stopped in (*(completion for _, completion in self._completions), self._streams):
            lanes.append(stopped is None or stopped.stop(max(0.1, deadline - time.monotonic())))
        return copying and all(lanes)


def _encode(start: Callable[[], StartedOperation], place: Place, last: Callable[[], None] | None) -> None:
    started = None
    try:
        started = _ending(start(), last)
    finally:
        place.fill(started)


def _ending(started: StartedOperation, last: Callable[[], None] | None) -> StartedOperation:
    return started if last is None else ending_with(started, last)
