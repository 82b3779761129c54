"""Gradients of a GPU that travel by way of host memory: the first and the last stage of their way.

Parameter servers work on a CPU, and gloo's messages between two ranks leave from host memory. So
a bucket is copied there when it exists (``copy_to_host``), all else is done to the copy as to a bucket of a CPU, and
what comes of it is copied back (``copy_to_device``) before anybody is told that it is there. These are BytePS's COPYD2H
and COPYH2D.

A bucket is copied whole, in the order in which buckets exist: that takes a hundredth of the time that it takes a link
of 1 Gbit/s, so what is urgent would win nothing by going first, and needs no credit. Copies out and back go on streams
of their own, as the directions do not slow each other down.

Why every read sees the right values: the copy out waits, on its stream, for an event that was recorded behind what
wrote the bucket; the task is ready, and so read by the host, once the host has seen the event behind the copy. A part
is copied back when its operation has ended, and so when nobody else reads or writes this part of the bucket or of the
copy. Who ends the part waits until that is seen to have been done, so whoever reads the bucket when its task has ended,
on any stream, finds it there. The next step's copy is made behind the next backward pass, which begins when all tasks
have ended.

The source of the stages: BytePS (Jiang et al., OSDI 2020, section 5), and "CUDA semantics" in PyTorch's documentation.

Payloads that are made and read on a GPU, and travel from host memory.

Gloo's messages between two ranks leave from host memory, and codecs are at their fastest where gradients are. So a
gradient is encoded on its GPU, and only what travels of it is copied: as much as the link carries, and not as much as
the bus does. These are BytePS's COPYD2H and COPYH2D, behind its COMPRESS and before its DECOMPRESS.

Each thread that encodes or decodes has a stream of its own for that. Why every read sees the right values: whoever
encodes begins when the host has seen the event behind what writes the bucket (:meth:`PayloadCopies.mark`). All that is
done for a part on a thread, copies included, is on that thread's stream, in order; and the thread goes on, to send what
was encoded or to say that a part has been decoded, when the host has seen all of it to be done
(:meth:`PayloadCopies.working`). So a part is worked on by one stream at a time, one after the other, and whoever reads
the bucket afterwards, on any stream, finds it there. Residuals and sums are worked on nowhere else.

Sources: BytePS (Jiang et al., OSDI 2020, section 5); "CUDA semantics" in PyTorch's documentation.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_bytescheduler.collectives.device_streams import DevicePoller, ReadyMark
from lightning_bytescheduler.exceptions import SchedulerClosedError

__all__ = ["HostCopies", "PayloadCopies", "travel_by_host"]

_LOOK_AGAIN_S = 5e-5


def travel_by_host(device: torch.device, *, compressed: bool, served: bool) -> bool:
    """Whether gradients on ``device`` travel from host memory.

    Args:
        device: Where they live.
        compressed: Whether they travel compressed.
        served: Whether parameter servers average them.
    """
    return device.type == "cuda" and (compressed or served)


class HostCopies:
    """Copies of one device's buckets in host memory.

    A thread, ``bytescheduler-device``, looks whether copies out have been made. Copies back are waited for by the
    thread that has seen a part's operation end.

    Args:
        device: Where gradients live.
        on_error: Called with what goes wrong while copies are looked for, on the thread that looks.
        cuda: Streams and events; replaced by tests.
    """

    def __init__(
        self, device: torch.device, on_error: Callable[[BaseException], object], *, cuda: Any = torch.cuda
    ) -> None:
        self._device = device
        self._on_error = on_error
        self._cuda = cuda
        self._out = cuda.Stream(device, priority=-1)
        self._back = cuda.Stream(device, priority=-1)
        self._copies: dict[int, torch.Tensor] = {}  # by index of the bucket: pinned memory is slow to come by
        self._stopping = threading.Event()
        # On the device: a thread's first one is 0, where it would begin a context.
        around = partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext
        self._poller = DevicePoller(around)

    def take_out(self, index: int, buffer: torch.Tensor) -> tuple[torch.Tensor, ReadyMark, ReadyMark]:
        """Begin to copy a bucket, whose data exists for the current stream.

        Args:
            index: Of the bucket.
            buffer: Its, on the device.

        Returns:
            The copy, when what it is of exists, and when it has been made.
        """
        copy = self._copies.get(index)
        if copy is None or (copy.numel(), copy.dtype) != (buffer.numel(), buffer.dtype):
            if copy is not None:
                self._copies.clear()  # buckets were arranged anew, and some may be no more
            copy = self._copies[index] = self._memory(buffer)
        exists = self._cuda.Event()
        exists.record(self._cuda.current_stream(self._device))
        self._out.wait_event(exists)
        return copy, ReadyMark.of(exists), ReadyMark.of(self._copied(copy, buffer, self._out))

    def when_made(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """Call ``then`` on the thread that looks, when the device has passed ``mark``; for any thread."""
        self._poller.await_mark(mark, then, self._on_error)

    def put_back(self, copy: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy what has become of a bucket back to it, and wait until that is done.

        Raises:
            SchedulerClosedError: If the fit ends meanwhile.
        """
        if buffer.device.type == "cuda":
            torch.cuda.set_device(buffer.device)  # a thread's first device is 0, where it would begin a context
        made = self._copied(buffer, copy, self._back)
        while not made.query():
            if self._stopping.wait(_LOOK_AGAIN_S):
                raise SchedulerClosedError("The fit has ended while gradients were on their way back to the device.")

    def stop(self, timeout: float) -> bool:
        """End the thread within ``timeout`` seconds; returns whether it ended."""
        self._stopping.set()
        return self._poller.stop(timeout)

    def _memory(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda")

    def _copied(self, to: torch.Tensor, source: torch.Tensor, stream: Any) -> Any:
        """Enqueue a copy; returns the event behind it."""
        with self._cuda.stream(stream):
            self._copy(to, source)
            made = self._cuda.Event()
            made.record(stream)
        for tensor in (to, source):
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)  # if a failure lets go of it
        return made

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream."""
        to.copy_(source, non_blocking=True)


_GRACE_S = 1.0  # for what is on its way when something fails: it reads and writes memory that may be let go of then


class PayloadCopies:
    """Copies of payloads between a device and host memory, and the streams on which payloads are made and read.

    Args:
        device: Where gradients live.
        cuda: Streams and events; replaced by tests.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        self._own = threading.local()
        self._stopping = threading.Event()

    def mark(self) -> ReadyMark:
        """The moment at which the current stream has done all that it was given."""
        exists = self._cuda.Event()
        exists.record(self._cuda.current_stream(self.device))
        return ReadyMark.of(exists)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what a thread does to a part on the device: when it is left, all of that has been done.

        Raises:
            SchedulerClosedError: If the fit ends meanwhile.
        """
        stream = self._stream()
        with self._cuda.stream(stream):
            try:
                yield
            except BaseException:
                with suppress(Exception):  # a device that has failed says so again
                    self._done(stream, within=_GRACE_S)
                raise
            if not self._done(stream):
                raise SchedulerClosedError("The fit has ended while gradients were encoded or decoded on the device.")

    def aside(self) -> AbstractContextManager[Any]:
        """Around what the host wants to know of a part that it knows to exist: not behind what training does."""
        context: AbstractContextManager[Any] = self._cuda.stream(self._stream())
        return context

    def to_host(self, payload: Tensor) -> Tensor:
        """A copy in host memory, which is there when :meth:`working` is left."""
        return self._copied(payload, self.memory(payload.numel(), payload.dtype))

    def to_device(self, payload: Tensor) -> Tensor:
        """A copy on the device, for what is done next while :meth:`working`."""
        return self._copied(payload, torch.empty_like(payload, device=self.device))

    def memory(self, elements: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Host memory from and to which copies are fast."""
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")

    def stop(self) -> None:
        """Have whoever still waits for the device give up."""
        self._stopping.set()

    def _done(self, stream: Any, within: float = math.inf) -> bool:
        """Wait for all that ``stream`` was given; returns whether it was done in time.

        Args:
            stream: This thread's.
            within: Longest wait, in seconds; no more than a moment once the fit has ended.
        """
        done = self._cuda.Event()
        done.record(stream)
        deadline = time.monotonic() + within
        while not done.query():
            if self._stopping.is_set():
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_AGAIN_S)
        return True

    def _stream(self) -> Any:
        """This thread's."""
        stream = getattr(self._own, "stream", None)
        if stream is None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread's first device is 0, where it would begin a context
            stream = self._own.stream = self._cuda.Stream(self.device, priority=-1)
        return stream

    def _copied(self, payload: Tensor, there: Tensor) -> Tensor:
        """On the current stream."""
        return there.copy_(payload, non_blocking=True)
