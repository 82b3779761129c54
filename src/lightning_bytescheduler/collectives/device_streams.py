"""Gradients on a GPU: which stream waits for what, what the host waits for, and copies in host memory.

The host only enqueues work, on four kinds of streams::

    training    backward writes a bucket, and an event is recorded after it (ReadyMark, in DDP's hook)
    launching   waits for that event; the operation starts here: scaling, then the backend's own stream after it
    arriving    waits for the operation (``Work.wait``) and what finishes it; an event is recorded after it
    training    waits for that event (``join``, in the gate), then the optimizer step, then the forward pass
    side        for values that the host needs, such as norms; nothing else is queued on it

Why every read sees the right values: each transition above is an event that is recorded after the writer and awaited
before the reader. So bucket, sum, step and forward pass follow each other although no thread waits for the GPU. The
next backward pass writes the bucket again; it is on the training stream after the optimizer step, which follows the
operation. Every wait is for something enqueued before it, so no cycle is possible, whichever streams torch hands out.
With a separate stream for arrivals the next operation can start while earlier ones are in flight.

What the host waits for:

* An operation is launched when its data is complete on the GPU (``when_ready``), not when the hook has run. The host is
  far ahead by then. It would launch in the order of the hooks, and the first layer's gradient, which comes last, would
  block all others on the one communicator.
* Credit returns when the GPU has finished an operation.
* A gate waits until all parts of its bucket are launched; the stream waits for the rest.

NCCL's ``Work.wait`` makes the current stream wait, not the host. Gloo works on copies in host memory. Its operation is
over for the host when the copy back is enqueued on one of gloo's streams; its ``Work.wait`` blocks the host until then,
and makes the current stream wait for that copy. So with gloo, and any backend but NCCL, the polling thread asks
``is_completed`` before it waits, and a gate waits on the host for data that travels through the host.

Memory: once a tensor is released, torch may reuse its memory, in the order of the stream that allocated it.
Gradients and everything an operation uses are held until the host knows that the GPU has finished with them. If a
failure ends that early, ``record_stream`` keeps the gradients.

*Copies in host memory.* Parameter servers work on a CPU, and gloo sends messages from host memory. So a part is copied
there as it is launched (``copy_to_host``), and its result is copied back before the part ends (``copy_to_device``).
These are BytePS's stages COPYD2H and COPYH2D. Codecs are fastest where gradients are, so they run there, and only the
encoded *payload* is copied, as with BytePS's COPYD2H after COMPRESS, and COPYH2D before DECOMPRESS.

Each thread that copies, encodes or decodes has its own stream. Why every read sees the right values: work on a part
begins when the host has seen the event after the writer of the bucket (:meth:`PayloadCopies.mark`). All work for a part
on a thread is on that thread's stream, in order. The thread sends the part, or ends it, when the host has seen all of
that work done (:meth:`PayloadCopies.working`). So one stream at a time works on a part, and later readers on any stream
find the result. Residuals and sums are used nowhere else.

Sources: "CUDA semantics" in PyTorch's documentation; ``ProcessGroupNCCL`` and ``ProcessGroupGloo`` of torch 2.6 to
2.13; BytePS (Jiang et al., OSDI 2020, section 5).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.completion import naming
from lightning_bytescheduler.collectives.operations import Operation, StartedOperation
from lightning_bytescheduler.exceptions import SchedulerClosedError, SchedulerTimeoutError
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.scheduler.threads import start_thread

__all__ = ["DeviceStreams", "HostPayloads", "PayloadCopies", "ReadyMark", "travel_by_host"]

_LOOK_AGAIN_S = 2e-4
_HAS_ENDED = timedelta(seconds=1)  # the wait for an ended operation; any time makes NCCL raise its error

Look = Callable[[], bool]
"""Polls once: returns whether the event has happened and its callback was called. Must not raise or block."""


class DevicePoller:
    """Polls the progress of a GPU from the host.

    One thread, ``bytescheduler-device``, polls two queues: data to be completed, and operations to end. Each queue is
    in order, so only its head is polled. A wait for an event has no time limit, so this thread queries events instead,
    about five thousand times a second while a queue is not empty. Otherwise it sleeps. An answer is up to 0.2 ms late;
    other parts in flight cover that.
    """

    def __init__(self, surroundings: Callable[[], AbstractContextManager[object]]) -> None:
        self._surroundings = surroundings
        self._data: deque[Look] = deque()
        self._results: deque[Look] = deque()
        self._new: queue.SimpleQueue[tuple[deque[Look], Look] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = start_thread("device", self._run)

    def await_mark(
        self, mark: ReadyMark, then: Callable[[], None], on_error: Callable[[BaseException], object]
    ) -> None:
        """Call ``then`` when the device has passed ``mark``; for any thread."""

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
        """Poll until an operation has ended; for any thread."""
        self._new.put((self._results, look))

    def stop(self, timeout: float) -> bool:
        """End the thread without finishing its work; returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._new.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with self._surroundings():
            happened = False
            while not self._stopping.is_set():
                self._take_in(patiently=not happened)
                happened = self._happened(self._data) | self._happened(self._results)

    def _take_in(self, *, patiently: bool) -> None:
        try:
            if not self._data and not self._results:
                new = self._new.get()  # stop() puts None to wake it
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
    """The moment a buffer is complete: at once on a CPU, when the current stream gets there on a GPU."""

    __slots__ = ("event",)

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(device))

    @classmethod
    def of(cls, event: Any) -> ReadyMark:
        """Return the moment at which a device has passed ``event``."""
        mark = cls(torch.device("cpu"))
        mark.event = event
        return mark


class _Enqueued:
    """How much of a task's result is enqueued on the arriving stream."""

    __slots__ = ("event", "known", "missing")

    def __init__(self, size: int) -> None:
        self.missing = size
        self.event: torch.cuda.Event | None = None
        self.known = threading.Event()  # set when all is enqueued or the task has ended

    def add(self, size: int, event: torch.cuda.Event) -> None:
        """Add a part that arrives before ``event``. Parts are added in order, so the last event covers all."""
        self.missing -= size
        self.event = event
        if not self.missing:
            self.known.set()


class _SentPart:
    """An operation in flight, with everything its memory depends on."""

    __slots__ = ("finished", "kept", "part", "started", "sub_task")

    def __init__(self, part: torch.Tensor, sub_task: SubCommTask, started: StartedOperation) -> None:
        self.part = part
        self.sub_task = sub_task
        self.started = started  # the last one of a chain of operations
        self.kept = [started]
        self.finished: torch.cuda.Event | None = None

    def take_in(self) -> bool:
        """Make the current stream wait, and enqueue the next operation of the chain; returns whether it has ended."""
        for work in self.started.works:
            work.wait()  # does not block: on NCCL the stream waits, otherwise the work has ended
        following = None if self.started.finish is None else self.started.finish()
        if following is None:
            return True
        self.started = following
        self.kept.append(following)
        return False

    def raise_failure(self) -> None:
        for operation in self.kept:
            for work in operation.works:
                work.wait(_HAS_ENDED)


class DeviceStreams:
    """Starts operations on one device and notifies their sub-tasks; see the module.

    One thread sends at a time (the core's launching lock). Only the polling thread polls.
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
        # These streams do little, and others wait for them, so they have high priority.
        self._launching = cuda.Stream(device, priority=-1)
        # Gloo's operations are taken in when they have ended, so they cannot block the stream on which they started.
        self._arriving = cuda.Stream(device, priority=-1) if self._works_wait_on_stream else self._launching
        self._side = cuda.Stream(device, priority=-1)
        self._enqueued: dict[CommTask, _Enqueued] = {}
        self._failed: BaseException | None = None
        self._poller = DevicePoller(self.side_stream)

    def when_ready(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """Call ``then`` on the polling thread when the device has passed ``mark``; for any thread."""
        self._poller.await_mark(mark, then, self._on_error)

    def expect(self, task: CommTask) -> None:
        """Register a task for :meth:`join`, before any of it is sent; :meth:`forget` has to follow."""
        self._enqueued[task] = _Enqueued(task.size)

    def forget(self, task: CommTask) -> None:
        """Drop a task that has ended, and wake its waiters."""
        enqueued = self._enqueued.pop(task, None)
        if enqueued is not None:
            enqueued.known.set()

    def send(
        self, part: torch.Tensor, sub_task: SubCommTask, operation: Operation, number: int, ready: ReadyMark | None
    ) -> None:
        """Start ``operation`` on ``part``; see :class:`~lightning_bytescheduler.collectives.route.OnDevice`."""
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
        """Make the current stream wait for a task's result; without :meth:`expect` the host waits for its end.

        The host waits until all of the task is launched, or with gloo until its result is being copied to the device.

        Args:
            task: The task.
            timeout: Longest wait of the host, in seconds.

        Raises:
            SchedulerTimeoutError: If the task was not launched in time.
            BaseException: The task's error.
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
        """Make the side stream current; only for data that the host knows to be complete."""
        context: AbstractContextManager[object] = self._cuda.stream(self._side)
        return context

    def stop(self, timeout: float) -> bool:
        """End the polling thread within ``timeout`` seconds; returns whether it ended."""
        return self._poller.stop(timeout)

    def _mark_finished(self, sent: _SentPart) -> None:
        """Record that all of ``sent`` is enqueued; the arriving stream is current."""
        sent.finished = self._cuda.Event()
        sent.finished.record(self._arriving)
        enqueued = self._enqueued.get(sent.sub_task.parent)
        if enqueued is not None:
            enqueued.add(sent.sub_task.size, sent.finished)

    # Called on the polling thread.

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


_LOOK_AT_WORK_S = 5e-5
_GRACE_S = 1.0  # for copies in flight when something fails, as their memory may be released then


def travel_by_host(device: torch.device, *, compressed: bool, served: bool) -> bool:
    """Whether gradients on ``device`` travel from host memory: on a GPU, if compressed or served."""
    return device.type == "cuda" and (compressed or served)


class HostPayloads:
    """Payloads of gradients in host memory: nothing is copied. :class:`PayloadCopies` is for gradients on a device.

    Attributes:
        device: Where codecs work.
    """

    device = torch.device("cpu")

    def working(self) -> AbstractContextManager[None]:
        """Wrap a thread's work on a part; it is complete on exit."""
        return nullcontext()

    def to_host(self, payload: Tensor) -> Tensor:
        """Return a payload in host memory, complete when :meth:`working` is left."""
        return payload

    def to_device(self, payload: Tensor) -> Tensor:
        """Return a payload on the device, for the next work within :meth:`working`."""
        return payload

    def bring_back(self, payload: Tensor, there: Tensor) -> None:
        """Fill ``there``, on the device, with a result in host memory; within :meth:`working`."""

    def memory(self, elements: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return host memory with fast copies."""
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")


class PayloadCopies(HostPayloads):
    """Copies between a device and host memory, and the streams of codecs.

    A thread, ``bytescheduler-device``, polls for gradients to be complete.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        self._own = threading.local()
        self._stopping = threading.Event()
        # Select the device: a new thread uses device 0 and would create a context there.
        self._poller = DevicePoller(partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext)

    def mark(self) -> ReadyMark:
        """Return the moment at which the current stream has done all its work so far."""
        exists = self._cuda.Event()
        exists.record(self._cuda.current_stream(self.device))
        return ReadyMark.of(exists)

    def when_made(self, mark: ReadyMark, then: Callable[[], None], on_error: Callable[[BaseException], object]) -> None:
        """Call ``then`` on the polling thread when the device has passed ``mark``; for any thread."""
        self._poller.await_mark(mark, then, on_error)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wrap a thread's work on a part on the device; it is complete on exit.

        Raises:
            SchedulerClosedError: If the fit ends before the work does.
        """
        stream = self._stream()
        with self._cuda.stream(stream):
            try:
                yield
            except BaseException:
                with suppress(Exception):  # a failed device raises again
                    self._done(stream, within=_GRACE_S)
                raise
            if not self._done(stream):
                raise SchedulerClosedError("The fit has ended while gradients were encoded or decoded on the device.")

    def aside(self) -> AbstractContextManager[Any]:
        """Wrap computations for the host on complete data, without waiting for the training's work."""
        context: AbstractContextManager[Any] = self._cuda.stream(self._stream())
        return context

    def to_host(self, payload: Tensor) -> Tensor:
        """See :class:`HostPayloads`."""
        return self._copied(payload, self.memory(payload.numel(), payload.dtype))

    def to_device(self, payload: Tensor) -> Tensor:
        """See :class:`HostPayloads`."""
        return self._copied(payload, torch.empty_like(payload, device=self.device))

    def bring_back(self, payload: Tensor, there: Tensor) -> None:
        """See :class:`HostPayloads`."""
        self._copied(payload, there)

    def stop(self, timeout: float) -> bool:
        """End all waits for the device, and the thread within ``timeout`` seconds; returns whether it ended."""
        self._stopping.set()
        return self._poller.stop(timeout)

    def _done(self, stream: Any, within: float = math.inf) -> bool:
        """Wait for all work of ``stream``; returns whether it was done in time.

        Args:
            stream: This thread's stream.
            within: Longest wait, in seconds; one second at most once the fit has ended.
        """
        done = self._cuda.Event()
        done.record(stream)
        deadline = time.monotonic() + within
        while not done.query():
            if self._stopping.is_set():
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_AT_WORK_S)
        return True

    def _stream(self) -> Any:
        stream = getattr(self._own, "stream", None)
        if stream is None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread uses device 0 and would create a context there
            stream = self._own.stream = self._cuda.Stream(self.device, priority=-1)
        return stream

    def _copied(self, payload: Tensor, there: Tensor) -> Tensor:
        return there.copy_(payload, non_blocking=True)
