"""Starts collectives on parts of gradient buffers and tells the sub-tasks when they have ended.

A thread that encodes what is to be sent, so that neither the training nor a launch waits for that.

One thread, named ``bytescheduler-codec``, owned by the transport and started with the first thing there is to encode.
It works in the order in which sub-tasks are launched and holds no lock while it does; the completion thread, which
decodes, takes up what is encoded in that order. Whatever it does ends by itself: arithmetic on one partition, and
messages that are begun and not waited for. :meth:`CodecThread.stop` therefore waits for one partition at most.

Why no rank waits forever: what travels encoded are messages between two ranks, which carry the number of the operation,
and numbers are given at the launch, in one order on all ranks. When a message is begun does not matter.
"""

from __future__ import annotations

import queue
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
)
from lightning_bytescheduler.collectives.push_pull import PushPull
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from lightning_bytescheduler.failures.messages import is_communication_error
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["CodecThread", "EncodedStart", "GradientTransport", "ReadyMark", "ServedStart"]


class CodecThread:
    """Runs what encodes and sends one sub-task after the other.

    Args:
        on_error: Called with what could not be encoded or sent, on the codec thread, before the sub-task fails; returns
            the error to fail with.
    """

    def __init__(self, on_error: Callable[[BaseException], BaseException]) -> None:
        self._on_error = on_error
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], SubCommTask] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], None], sub_task: SubCommTask) -> None:
        """Do ``work`` for ``sub_task`` after all that was given before; for whoever holds the launching lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bytescheduler-codec", daemon=True)
            self._thread.start()
        self._waiting.put((work, sub_task))

    def stop(self, timeout: float) -> bool:
        """End the thread; what waits is left alone. Returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._waiting.put(None)
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        prefer_short_turns()
        while True:
            item = self._waiting.get()  # woken by stop(), which puts None
            if item is None or self._stopping.is_set():
                return
            work, sub_task = item
            try:
                work()
            except BaseException as error:
                sub_task.fail(self._on_error(naming(sub_task, error)))


_BROADCASTS = "local-broadcast"  # waits for what goes to the other ranks of a node
_GATHERS = -1  # of the first lane; of the second -2

EncodedStart = Callable[[dist.ProcessGroup, SubCommTask, int], StartedOperation]
"""Encodes and starts to send on (group, sub-task, number of the operation); messages between two ranks only."""

ServedStart = Callable[[PushPull, int, SubCommTask, int], StartedOperation]
"""Encodes and starts to push on (servers, rank of one of them, sub-task, number of the operation)."""


class GradientTransport:
    """Launches collectives, one at a time (the core's launching lock), so ranks that launch in one order match.

    On a GPU an operation's result may be used, by the stream that joins it, before the host knows that it is there; see
    :mod:`~lightning_bytescheduler.collectives.device_streams`.

    Args:
        group: The scheduler's data group.
        on_error: See :class:`CompletionThread`.
        device: Where gradients live.
        push_pull: Takes the place of all-reduces, where parameter servers average gradients.
        overtaking: Where messages are long under way: the second lane's group. All-reduces are of as few messages as
            can be, one after the other, then.
        by_host: Whether what travels does so from host memory, on a group for that.
        payloads: Copies what is encoded on the device, where gradients are.

    Attributes:
        host_copies: Copies gradients that travel by host memory; ``None`` where they travel from where they are.
        payloads: See above; ``None`` where codecs work in host memory.
        wire_device: Where what travels lives.
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
        """What has collectives of others in the order; ``None`` where they need none."""
        self._started = 0
        self._on_error = on_error
        self._failing = threading.Lock()  # held while it is found out why something failed; taken first
        self._telling = threading.Lock()  # held while a sub-task's end is told; the launching lock is only tried then
        self._lanes: dict[int | str, CompletionThread] = {}
        self._streams: DeviceStreams | None = None
        self._completions: list[tuple[dist.ProcessGroup, CompletionThread]] = []  # by lane; none where streams wait
        self._codec = CodecThread(on_error)
        if self.wire_device.type == "cuda":
            self._streams = DeviceStreams(group, self.wire_device, on_error)
        elif overtaking is not None:
            self._completions = [(one, self._in_two_halves(one, n)) for n, one in enumerate((group, overtaking))]
        else:
            messages = group if push_pull is None else push_pull.group
            self._completions = [(group, CompletionThread(on_error, messages))]

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
            part: What is sent and received, in place.
            sub_task: Told when the result is there.
            operation: Of :mod:`~lightning_bytescheduler.collectives.operations`.
            ready: When the part's contents exist; left out if they exist, or came from this transport.
            last: What is done when the operation has ended, before anybody is told; on a CPU.
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
                raise self._failed(error) from error  # a connection has ended before anybody waited for it
            sub_task.passage = started.passage
            self._lane(started.lane, completion).watch(started, sub_task)

    def _lane(self, lane: int | str | None, otherwise: CompletionThread) -> CompletionThread:
        """Who waits for operations of ``lane``; called under the launching lock."""
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
        """Who waits for the first halves of what travels on ``lane``; another thread waits for the second ones."""
        number = f"-{lane}" if lane else ""
        gathers = CompletionThread(self._failed, group, f"gathers{number}", self._telling)
        first = CompletionThread(self._failed, group, f"completion{number}", telling=self._telling, closing=gathers)
        self._lanes[_GATHERS - lane] = gathers
        return first

    def _failed(self, error: BaseException) -> BaseException:
        """One lane after the other: the second finds out why the first has failed."""
        with self._failing:
            return self._on_error(error)

    def send_encoded(self, sub_task: SubCommTask, start: EncodedStart, last: Callable[[], None] | None = None) -> None:
        """Have a sub-task's data encoded and sent, on a thread of its own; from host memory.

        Args:
            sub_task: Told when the result is there.
            start: Called on the codec thread; what it returns is waited for like any operation.
            last: See :meth:`send`.

        Raises:
            RuntimeError: If nothing travels from host memory.
        """
        if not self._completions:
            raise RuntimeError("Encoded gradients travel from host memory only.")
        self._started += 1
        group, completion = self._completions[sub_task.lane]
        encoded = partial(start, group, sub_task, self._started)
        self._codec.run(partial(_encode, encoded, completion.reserve(sub_task), last), sub_task)

    def send_served(
        self, sub_task: SubCommTask, nbytes: int, start: ServedStart, last: Callable[[], None] | None = None
    ) -> None:
        """Have a sub-task's data encoded, pushed to its server and pulled; see :meth:`send_encoded`.

        Args:
            sub_task: Told when the result is there.
            nbytes: Of the data as it is.
            start: Called on the codec thread.
            last: See :meth:`send`.

        Raises:
            RuntimeError: If there are no servers.
        """
        servers = self.push_pull
        if servers is None:
            raise RuntimeError("There are no parameter servers.")
        self._started += 1
        servers.expect(sub_task.parent.key.bucket, sub_task.index)
        server = servers.next_server(nbytes)  # here, in the order of launches
        place = self._lane(server, self._completions[0][1]).reserve(sub_task)
        push = partial(start, servers, server, sub_task, self._started)
        self._codec.run(partial(_encode, push, place, last), sub_task)

    @property
    def all_reduce(self) -> Averaging:
        """What averages a part over all ranks."""
        if self.push_pull is not None:
            return self.push_pull.reduce
        return all_reduce if len(self._completions) < 2 else all_reduce_in_shards

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
        with self._around_waits():
            if self._streams is None:
                task.wait(timeout)
            else:
                self._streams.join(task, timeout)

    def measure_waits(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """Have ``around`` entered while somebody waits for a task's result."""
        self._around_waits = around

    def when_ready(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """Call ``then`` when the device has passed ``mark``; at once where there is nothing to wait for."""
        if self._streams is not None:
            self._streams.when_ready(mark, then)
        elif self.host_copies is not None and mark.event is not None:
            self.host_copies.when_made(mark, then)
        else:
            then()

    def mark(self, buffer: torch.Tensor) -> ReadyMark:
        """The moment at which what is in ``buffer`` exists, if the current stream writes it."""
        if self.payloads is not None and buffer.device.type == self.payloads.device.type:
            return self.payloads.mark()
        return ReadyMark(self.wire_device)

    def side_stream(self) -> AbstractContextManager[object]:
        """Where numbers for the host are computed, from data that it knows to exist: see :class:`DeviceStreams`."""
        if self.payloads is not None:
            return self.payloads.aside()
        return nullcontext() if self._streams is None else self._streams.side_stream()

    def stop_encoding(self, timeout: float) -> bool:
        """End the thread that encodes, within ``timeout`` seconds; before the group is left. Returns whether it did.

        Whoever still waits for a device that encodes or decodes gives up.
        """
        if self.payloads is not None:
            self.payloads.stop()
        return self._codec.stop(timeout)

    def stop(self, timeout: float) -> bool:
        """End the threads that wait for results, within ``timeout`` seconds; returns whether they ended."""
        deadline = time.monotonic() + timeout
        copying = self.host_copies is None or self.host_copies.stop(timeout)  # first: others may wait for copies
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
