"""Collectives on a GPU: which stream waits for what, and what the host waits for.

The host only ever tells a GPU what to do. Four kinds of streams are told::

    training    backward writes a bucket, and an event is recorded behind it (ReadyMark, in DDP's hook)
    launching   waits for that event; the operation starts here: scaling, then the backend's own stream after it
    arriving    waits for the operation (``Work.wait``) and what finishes it; an event is recorded behind it
    training    waits for that event (``join``, in the gate), then the optimizer step, then the forward pass
    side        for what the host wants to know, such as norms: nothing is queued there that it would wait behind

Why every read sees the right values: each arrow above is an event that is recorded after the writer and waited for
before the reader, so bucket, sum, step and forward pass follow each other although no thread waits for the GPU. The
next backward pass writes the bucket again; it is on the training stream behind the optimizer step, which is behind the
operation. Every wait is for something that was enqueued before it, so no cycle can arise, whichever streams torch hands
out. A stream of its own for arrivals lets the next operation start while earlier ones are under way.

What the host waits for:

* An operation is launched when its data exists on the GPU (``when_ready``), not when the hook has run: the host is far
  ahead by then, would launch by the order of the hooks, and then have the first layer's gradient, which comes last,
  hold up all others on the one communicator.
* Credit returns when the GPU is done with an operation.
* A gate waits until all parts of its bucket are launched, no longer; the rest is the stream's to wait for.

NCCL's ``Work.wait`` makes the current stream wait, not the host. Gloo works on copies in host memory: its operation is
over for the host when the copy back is enqueued on a stream of gloo's, and its ``Work.wait``, which until then blocks
the host, makes the current stream wait for that copy. So for gloo, and whatever else is not NCCL, the polling thread
asks (``is_completed``) before it waits, and a gate waits on the host for what travels through the host.

Memory: torch may hand out a tensor's memory again, in the order of the stream it was allocated on, once nobody holds
it. The gradients and everything an operation uses are held until the host knows that the GPU is done with them; if a
failure cuts that short, ``record_stream`` keeps the gradients.

Sources: "CUDA semantics" in PyTorch's documentation; ``ProcessGroupNCCL`` and ``ProcessGroupGloo`` of torch 2.6 to
2.13.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import naming
from lightning_bytescheduler.collectives.operations import Operation, StartedOperation
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask

__all__ = ["DeviceStreams", "ReadyMark"]

_LOOK_AGAIN_S = 2e-4
_HAS_ENDED = timedelta(seconds=1)  # how long to wait for what has ended: any time makes NCCL say what went wrong

Look = Callable[[], bool]
"""Returns whether it has happened, after telling whom it concerns; must not raise or block."""


class DevicePoller:
    """Finds out on the host how far a GPU has got, while neither of them waits for the other.

    One thread, ``bytescheduler-device``, looks at two lines in turn: data that is to exist, and operations that are to
    end. What is in a line happens in its order, so only the first of each is looked at. An event can be asked
    (``query``), or waited for without a limit; so this thread asks, about five thousand times a second while there is
    something to ask for, and sleeps without a limit while there is not. An answer is thus up to 0.2 ms late, which is
    covered by what else credit keeps in flight.

    Args:
        surroundings: Entered once, on the thread: what is told is told in there.
    """

    def __init__(self, surroundings: Callable[[], AbstractContextManager[object]]) -> None:
        self._surroundings = surroundings
        self._data: deque[Look] = deque()
        self._results: deque[Look] = deque()
        self._new: queue.SimpleQueue[tuple[deque[Look], Look] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bytescheduler-device", daemon=True)
        self._thread.start()

    def await_mark(
        self, mark: ReadyMark, then: Callable[[], None], on_error: Callable[[BaseException], object]
    ) -> None:
        """Look until the device has passed ``mark``, and call ``then``; for any thread.

        Args:
            mark: Behind what data comes from.
            then: Called on the polling thread.
            on_error: Called with what looking or ``then`` raises.
        """

        def look() -> bool:
            try:
                if mark.event is not None and not mark.event.query():
                    return False
                then()
            except BaseException as error:
                on_error(error)
            return True

        self._new.put((self._data, look))

    def await_result(self, look: Look) -> None:
        """Look until an operation has ended; for any thread."""
        self._new.put((self._results, look))

    def stop(self, timeout: float) -> bool:
        """End the thread; what it still watched is left alone. Returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._new.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        prefer_short_turns()
        with self._surroundings():
            happened = False
            while not self._stopping.is_set():
                self._take_in(patiently=not happened)
                happened = self._happened(self._data) | self._happened(self._results)

    def _take_in(self, *, patiently: bool) -> None:
        """Put what is new into its line; while nothing happens, give it a moment to come."""
        try:
            if not self._data and not self._results:
                new = self._new.get()  # woken by stop(), which puts None
            else:
                new = self._new.get(timeout=_LOOK_AGAIN_S) if patiently else self._new.get_nowait()
            while new is not None:
                line, look = new
                line.append(look)
                new = self._new.get_nowait()
        except queue.Empty:
            pass

    def _happened(self, line: deque[Look]) -> bool:
        happened = False
        while line and not self._stopping.is_set() and line[0]():
            line.popleft()
            happened = True
        return happened


class ReadyMark:
    """The moment a buffer's contents exist: at once on a CPU, when the current stream gets there on a GPU."""

    __slots__ = ("event",)

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    @classmethod
    def of(cls, event: Any) -> ReadyMark:
        """The moment at which a device has passed ``event``."""
        mark = cls(torch.device("cpu"))
        mark.event = event
        return mark


class _Enqueued:
    """How much of a task's result the arriving stream has been told to wait for."""

    __slots__ = ("_once", "_then", "event", "known", "missing")

    def __init__(self, size: int, then: Callable[[], None] | None) -> None:
        self.missing = size
        self.event: torch.cuda.Event | None = None
        self.known = threading.Event()  # all of it, or the task has ended
        self._then = then
        self._once = threading.Lock()

    def add(self, size: int, event: torch.cuda.Event) -> None:
        """Another part arrives before ``event``. They are told of one after the other, so the last one's covers all."""
        self.missing -= size
        self.event = event
        if not self.missing:
            self.tell()

    def tell(self) -> None:
        """Let those know who wait for this; once, whoever comes first."""
        if self._once.acquire(blocking=False):
            try:
                if self._then is not None:
                    self._then()
            finally:
                self.known.set()


class _SentPart:
    """An operation under way, and all that its memory depends on."""

    __slots__ = ("finished", "kept", "part", "started", "sub_task")

    def __init__(self, part: torch.Tensor, sub_task: SubCommTask, started: StartedOperation) -> None:
        self.part = part
        self.sub_task = sub_task
        self.started = started  # the last of the operations that follow each other
        self.kept = [started]
        self.finished: torch.cuda.Event | None = None

    def take_in(self) -> bool:
        """Make the current stream wait for what was started, and enqueue what follows; whether that was all."""
        for work in self.started.works:
            work.wait()  # returns at once: on NCCL the stream waits, and elsewhere it was asked whether it has ended
        following = None if self.started.finish is None else self.started.finish()
        if following is None:
            return True
        self.started = following
        self.kept.append(following)
        return False

    def raise_failure(self) -> None:
        """Raise what any of it failed with; all of it has ended."""
        for operation in self.kept:
            for work in operation.works:
                work.wait(_HAS_ENDED)


class DeviceStreams:
    """Starts operations on one device and tells their sub-tasks; see the module.

    One thread sends at a time (the core's launching lock). The polling thread is the only one that looks.

    Args:
        group: The scheduler's data group.
        device: Where gradients live.
        on_error: As for :class:`~lightning_bytescheduler.collectives.completion.CompletionThread`.
        cuda: Streams and events; replaced by tests.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        on_error: Callable[[BaseException], BaseException],
        *,
        cuda: Any = torch.cuda,
    ) -> None:
        self._group = group
        self._device = device
        self._on_error = on_error
        self._cuda = cuda
        self._works_wait_on_stream = group._get_backend(device).name() == "nccl"
        # Little is done on these streams, and others wait for it: it goes first.
        self._launching = cuda.Stream(device, priority=-1)
        # Gloo's operations are taken in when they have ended: they hold up nothing on the stream they started on.
        self._arriving = cuda.Stream(device, priority=-1) if self._works_wait_on_stream else self._launching
        self._side = cuda.Stream(device, priority=-1)
        self._enqueued: dict[CommTask, _Enqueued] = {}
        self._failed: BaseException | None = None
        self._poller = DevicePoller(self.side_stream)

    def when_ready(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """Call ``then`` on the polling thread when the device has passed ``mark``; for any thread."""
        self._poller.await_mark(mark, then, self._on_error)

    def expect(self, task: CommTask, then: Callable[[], None] | None = None) -> None:
        """Keep account of a task for :meth:`join`, before any of it is sent; :meth:`forget` has to follow.

        Args:
            task: Whose sub-tasks are going to be sent.
            then: Called once: when all of them are launched, where the current stream waits for their results, or when
                the task has failed before.
        """
        self._enqueued[task] = _Enqueued(task.size, then)

    def forget(self, task: CommTask) -> None:
        """Let go of a task that has ended, and of whoever waits for it."""
        enqueued = self._enqueued.pop(task, None)
        if enqueued is not None:
            enqueued.tell()

    def send(
        self, part: torch.Tensor, sub_task: SubCommTask, operation: Operation, number: int, ready: ReadyMark | None
    ) -> None:
        """Start ``operation`` on ``part``; see :meth:`GradientTransport.send`."""
        with self._cuda.stream(self._launching):
            if ready is not None and ready.event is not None:
                self._launching.wait_event(ready.event)
            part.record_stream(self._launching)
            sent = _SentPart(part, sub_task, operation(self._group, part, number))
        if self._works_wait_on_stream:
            with self._cuda.stream(self._arriving):
                part.record_stream(self._arriving)
                while not sent.take_in():
                    pass
                self._mark_finished(sent)
        self._poller.await_result(partial(self._look_at, sent))

    def join(self, task: CommTask, timeout: float) -> None:
        """Make the current stream wait for a task's result; of one that was not expected, the host waits for the end.

        The host waits until all of the task is launched, or with gloo until its result is on the way to the device.

        Args:
            task: What is waited for.
            timeout: Longest wait of the host, in seconds.

        Raises:
            SchedulerTimeoutError: If the task was not launched in time.
            BaseException: Whatever the task failed with.
        """
        enqueued = self._enqueued.get(task)
        if enqueued is None:
            task.wait(timeout)
            return
        if not enqueued.known.wait(timeout):
            raise SchedulerTimeoutError(
                f"Task {task.name!r} was not sent within {timeout:g} s; outstanding: {task.describe_outstanding()}."
            )
        if task.error is not None:
            raise task.error
        if enqueued.event is not None:
            self._cuda.current_stream(self._device).wait_event(enqueued.event)

    def side_stream(self) -> AbstractContextManager[object]:
        """Make current the stream that nothing is queued on; only for data that the host knows to exist."""
        context: AbstractContextManager[object] = self._cuda.stream(self._side)
        return context

    def stop(self, timeout: float) -> bool:
        """End the polling thread within ``timeout`` seconds; returns whether it ended."""
        return self._poller.stop(timeout)

    def _mark_finished(self, sent: _SentPart) -> None:
        """All of ``sent`` is enqueued; the arriving stream is current."""
        sent.finished = self._cuda.Event()
        sent.finished.record(self._arriving)
        enqueued = self._enqueued.get(sent.sub_task.parent)
        if enqueued is not None:
            enqueued.add(sent.sub_task.size, sent.finished)

    # On the polling thread.

    def _look_at(self, sent: _SentPart) -> bool:
        if self._failed is None:
            try:
                if not self._has_ended(sent):
                    return False
            except BaseException as error:
                self._failed = self._on_error(naming(sent.sub_task, error))
        if self._failed is None:
            sent.sub_task.notify_finish()
        else:
            sent.sub_task.fail(self._failed)
        return True

    def _has_ended(self, sent: _SentPart) -> bool:
        if sent.finished is None:
            if not all(work.is_completed() for work in sent.started.works):
                return False
            with self._cuda.stream(self._arriving):
                if not sent.take_in():
                    return False
                self._mark_finished(sent)
        if sent.finished is None or not sent.finished.query():
            return False
        sent.raise_failure()
        return True
