"""A route: how the parts of gradients travel in one fit, chosen once, when the fit begins.

:class:`AllReduce` sends them from host memory, with gloo's all-reduce. :class:`Sharded` is for links with high latency:
each rank's shard goes straight to it, and its sum straight to all, and urgent parts overtake on a second lane.
:class:`Served` sends them to parameter servers and back. :class:`OnDevice` is for a GPU's own streams.

A task's ``launch`` is a method of the route. All routes but :class:`Served` also run the halves of an all-reduce, and
:class:`AllReduce` and :class:`Sharded` also send encoded parts. Parts of a GPU that travel from host memory are copied
there at their launch, and back before their sub-tasks are notified (``device_streams.py``).

Encoding has a thread, ``bytescheduler-codec``, so that neither the training nor a launch waits. The route owns it and
starts it with the first sub-task to encode. It works in the order of launches and holds no lock. The completion thread,
which decodes, follows the same order. All its work ends by itself: arithmetic on one partition, and messages that are
begun without waiting. So :meth:`AllReduce.stop_encoding` waits for one partition at most.

Why no rank waits forever: encoded data travels as messages between two ranks, with the number of the operation, which
is given at launch, in one order on all ranks. So it does not matter when a message begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import CompletionThread
from lightning_bytescheduler.collectives.device_streams import DeviceStreams, PayloadCopies, ReadyMark
from lightning_bytescheduler.collectives.operations import (
    Averaging,
    Coming,
    Operation,
    StartedOperation,
    all_reduce,
    all_reduce_in_shards,
)
from lightning_bytescheduler.collectives.push_pull import PushPull
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.scheduler.threads import WorkThread

__all__ = ["AllReduce", "EncodedStart", "OnDevice", "ReadyMark", "Served", "Sharded"]

EncodedStart = Callable[[dist.ProcessGroup, SubCommTask, int], StartedOperation]
"""Encodes and starts sends on (group, sub-task, number of the operation); only messages between two ranks."""

OnError = Callable[[BaseException], BaseException]


class AllReduce:
    """Gloo's all-reduce from host memory, and what all routes have in common; see the module.

    One thread at a time launches (the core's launching lock), in one order on all ranks.

    Args:
        group: The data group, over all ranks.
        on_error: Finds the cause of a failure, and stops the scheduler.
        copies: Copies parts of a GPU; ``None`` if gradients are in host memory.
        lanes: The group of each lane; the data group alone if left out.

    Attributes:
        wire_device: Where parts travel from.
        streams: Streams that join results; ``None`` where threads wait for results.
        routing: Orders other code's collectives; ``None`` if they need no order.
        merges: Whether a step taken as DDP's may send merged buckets on the data group, without the scheduler's core.
        all_reduce: The operation that averages a part over all ranks.
        wire_share: Bytes that each rank sends in :attr:`all_reduce` per byte.
    """

    streams: DeviceStreams | None = None
    routing: RoutingGroup | None = None
    merges = True
    wire_device = torch.device("cpu")

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_error: OnError,
        copies: PayloadCopies | None = None,
        *,
        lanes: Sequence[dist.ProcessGroup] | None = None,
    ) -> None:
        self.group = group
        self.copies = copies
        self.all_reduce: Averaging = all_reduce
        self.wire_share = 2 * (group.size() - 1) / group.size()
        self._on_error = on_error
        self._started = 0
        self._codec = WorkThread("codec")
        self._failing = threading.Lock()  # held while the cause of a failure is found; taken first
        self._telling = threading.Lock()  # held while a sub-task is notified; the launching lock is then only tried
        names = zip(("completion", "completion-1"), (group,) if lanes is None else lanes, strict=False)
        self._lanes = [(one, self._thread(name, one)) for name, one in names]  # each with what waits for it

    def _thread(self, name: str, group: dist.ProcessGroup) -> CompletionThread:
        return CompletionThread(self._failed, group, name, self._telling)

    def _failed(self, error: BaseException) -> BaseException:
        """Find the cause of a failure, for one thread after the other, so that the second sees the first's."""
        with self._failing:
            return self._on_error(error)

    # ------------------------------------------------------------------ launches

    def launch(
        self,
        buffer: torch.Tensor,
        operation: Operation,
        ready: ReadyMark | None,
        sub_task: SubCommTask,
    ) -> None:
        """Launch a sub-task of a task whose data is ``buffer``; bound to the first three, it is the task's ``launch``.

        Args:
            buffer: The task's data, flat, to send and receive in place.
            operation: From :mod:`~lightning_bytescheduler.collectives.operations`.
            ready: When the buffer is complete; ``None`` if it is, or came from this route.
            sub_task: Notified when the result has arrived.
        """
        part = buffer[sub_task.offset : sub_task.offset + sub_task.size]
        self.send(part, sub_task, operation, ready)

    def send(
        self, part: torch.Tensor, sub_task: SubCommTask, operation: Operation, ready: ReadyMark | None = None
    ) -> None:
        """Start ``operation`` on ``part``, in place."""
        self._started += 1
        group, completion = self._lanes[sub_task.lane]
        completion.watch(operation(group, part, self._started), sub_task)

    def launch_encoded(self, start: EncodedStart, sub_task: SubCommTask) -> None:
        """Launch a sub-task whose data ``start`` encodes, on the codec thread; see :meth:`launch`."""
        self._started += 1
        group, completion = self._lanes[sub_task.lane]
        number, encoded, started = self._started, Coming(), list[StartedOperation]()
        completion.watch(StartedOperation([encoded], lambda: started[0], messages=True), sub_task)

        def encode() -> None:
            started.append(start(group, sub_task, number))
            encoded.end()

        self._codec.put(encode, encoded.end)

    # ------------------------------------------------------------------ results

    def join(self, task: CommTask, timeout: float) -> None:
        """Wait for a task's result, on the host or, if that is enough, on the current stream.

        Args:
            task: The task.
            timeout: Longest wait of the host, in seconds.

        Raises:
            SchedulerTimeoutError: If it did not come in time.
            BaseException: The task's error.
        """
        if self.streams is None:
            task.wait(timeout)
        else:
            self.streams.join(task, timeout)

    def mark(self) -> ReadyMark:
        """Return the moment at which the current stream has done all its work so far."""
        return ReadyMark(self.wire_device) if self.copies is None else self.copies.mark()

    def when_ready(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """Call ``then`` when the device has passed ``mark``; at once if there is nothing to wait for."""
        if self.copies is None or mark.event is None:
            then()
        else:
            self.copies.when_made(mark, then, self._on_error)

    def side_stream(self) -> AbstractContextManager[object]:
        """Return the context for computing host values from complete data: see :class:`DeviceStreams`."""
        return nullcontext() if self.copies is None else self.copies.aside()

    # ------------------------------------------------------------------ the end

    def stop_encoding(self, timeout: float) -> bool:
        """End the codec thread within ``timeout`` seconds, before the group is left; returns whether it ended.

        It also ends the waits for copies.
        """
        copying = self.copies is None or self.copies.stop(timeout)
        return self._codec.stop(timeout, drop=True) and copying

    def stop(self, timeout: float) -> bool:
        """End what waits for results, within ``timeout`` seconds; returns whether it ended."""
        deadline = time.monotonic() + timeout
        ended = [one.stop(max(0.1, deadline - time.monotonic())) for one in self._waiting()]
        return all(ended)

    def _waiting(self) -> list[CompletionThread | DeviceStreams]:
        return [thread for _, thread in self._lanes]


class Sharded(AllReduce):
    """Two halves that go straight to their targets, on two lanes; see the module.

    Args:
        overtaking: The second lane's group, see ``LaneChoice``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_error: OnError,
        overtaking: dist.ProcessGroup,
        copies: PayloadCopies | None = None,
    ) -> None:
        super().__init__(group, on_error, copies, lanes=(group, overtaking))
        self.all_reduce = all_reduce_in_shards


class Served(AllReduce):
    """Pushes parts to servers, and pulls sums; see ``push_pull.py``. A thread for each server waits for its sums."""

    merges = False

    def __init__(
        self, group: dist.ProcessGroup, on_error: OnError, push_pull: PushPull, copies: PayloadCopies | None = None
    ) -> None:
        super().__init__(group, on_error, copies, lanes=())
        self.all_reduce = push_pull.reduce
        self.wire_share = push_pull.wire_share
        self._push_pull = push_pull
        self._pulls: dict[int | str | None, CompletionThread] = {}

    def send(
        self, part: torch.Tensor, sub_task: SubCommTask, operation: Operation, ready: ReadyMark | None = None
    ) -> None:
        """See :class:`AllReduce`."""
        self._started += 1
        self._push_pull.shares.expect(sub_task.parent.key.bucket, sub_task.index)
        try:
            started = operation(self.group, part, self._started)
        except RuntimeError as error:
            if not is_communication_error(error):
                raise
            raise self._failed(error) from error  # the connection has ended before the wait
        lane = started.lane
        if lane not in self._pulls:
            self._pulls[lane] = self._thread(f"pulls-{lane}", started.group or self.group)
        self._pulls[lane].watch(started, sub_task)

    def _waiting(self) -> list[CompletionThread | DeviceStreams]:
        return list(self._pulls.values())


class OnDevice(AllReduce):
    """Collectives of a GPU: a stream that joins one may use its result before the host knows that it has ended.

    See :mod:`~lightning_bytescheduler.collectives.device_streams`.
    """

    streams: DeviceStreams

    def __init__(self, group: dist.ProcessGroup, on_error: OnError, device: torch.device) -> None:
        super().__init__(group, on_error, lanes=())
        self.wire_device = device
        self.streams = DeviceStreams(group, device, on_error)

    def send(
        self, part: torch.Tensor, sub_task: SubCommTask, operation: Operation, ready: ReadyMark | None = None
    ) -> None:
        """See :class:`AllReduce`."""
        self._started += 1
        self.streams.send(part, sub_task, operation, self._started, ready)

    def when_ready(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """See :class:`AllReduce`."""
        self.streams.when_ready(mark, then)

    def side_stream(self) -> AbstractContextManager[object]:
        """See :class:`AllReduce`."""
        return self.streams.side_stream()

    def _waiting(self) -> list[CompletionThread | DeviceStreams]:
        return [self.streams]
