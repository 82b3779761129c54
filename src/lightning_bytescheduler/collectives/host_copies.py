"""Copies between a GPU and host memory, for gradients that travel from host memory.

*Whole buckets* (:class:`HostCopies`). Parameter servers work on a CPU, and gloo sends messages from host memory. So a
bucket is copied there when it is complete (``copy_to_host``), the copy is treated like a CPU's bucket, and the result
is copied back (``copy_to_device``) before the task ends. These are BytePS's stages COPYD2H and COPYH2D. A bucket is
copied whole, in the order of completion, and needs no credit: the copy is far faster than the link, so priorities would
gain nothing. The two directions use separate streams, as they do not slow each other down.

Why every read sees the right values: the copy out waits, on its stream, for an event recorded after the writer of the
bucket. The task becomes ready once the host has seen the event after the copy. A part is copied back when its operation
has ended, so no other code uses this part of the bucket or the copy. The thread that ends the part waits for the copy
back, so a reader on any stream finds the result once the task has ended. The next step's copy follows the next backward
pass, which begins when all tasks have ended.

*Payloads* (:class:`PayloadCopies`). Codecs are fastest where gradients are. So a gradient is encoded on its GPU, and
only the payload is copied. These are BytePS's COPYD2H after COMPRESS, and COPYH2D before DECOMPRESS.

Each thread that encodes or decodes has its own stream. Why every read sees the right values: encoding begins when the
host has seen the event after the writer of the bucket (:meth:`PayloadCopies.mark`). All work for a part on a thread,
copies included, is on that thread's stream, in order. The thread sends what was encoded, or ends the part, when the
host has seen all of it done (:meth:`PayloadCopies.working`). So one stream at a time works on a part, and later readers
on any stream find the result. Residuals and sums are used nowhere else.

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

__all__ = ["HostCopies", "HostPayloads", "PayloadCopies", "travel_by_host"]

_LOOK_AGAIN_S = 5e-5


def travel_by_host(device: torch.device, *, compressed: bool, served: bool) -> bool:
    """Whether gradients on ``device`` travel from host memory: on a GPU, if compressed or served."""
    return device.type == "cuda" and (compressed or served)


class HostCopies:
    """Copies of one device's buckets in host memory.

    A thread, ``bytescheduler-device``, polls copies out. A copy back is awaited by the thread that has seen a part's
    operation end.
    """

    def __init__(
        self, device: torch.device, on_error: Callable[[BaseException], object], *, cuda: Any = torch.cuda
    ) -> None:
        self._device = device
        self._on_error = on_error
        self._cuda = cuda
        self._out = cuda.Stream(device, priority=-1)
        self._back = cuda.Stream(device, priority=-1)
        # by index of the bucket; reused, as pinned memory is slow to allocate
        self._copies: dict[int, torch.Tensor] = {}
        self._stopping = threading.Event()
        # Select the device: a new thread uses device 0 and would create a context there.
        around = partial(torch.cuda.device, device) if device.type == "cuda" else nullcontext
        self._poller = DevicePoller(around)

    def take_out(self, index: int, buffer: torch.Tensor) -> tuple[torch.Tensor, ReadyMark, ReadyMark]:
        """Begin to copy a bucket whose data is complete on the current stream.

        Returns:
            The copy, when its source is complete, and when the copy is.
        """
        copy = self._copies.get(index)
        if copy is None or (copy.numel(), copy.dtype) != (buffer.numel(), buffer.dtype):
            if copy is not None:
                self._copies.clear()  # buckets were rearranged, and some may be gone
            copy = self._copies[index] = self._memory(buffer)
        exists = self._cuda.Event()
        exists.record(self._cuda.current_stream(self._device))
        self._out.wait_event(exists)
        return copy, ReadyMark.of(exists), ReadyMark.of(self._copied(copy, buffer, self._out))

    def when_made(self, mark: ReadyMark, then: Callable[[], None]) -> None:
        """Call ``then`` on the polling thread when the device has passed ``mark``; for any thread."""
        self._poller.await_mark(mark, then, self._on_error)

    def put_back(self, copy: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy a result back to its bucket, and wait for the copy.

        Raises:
            SchedulerClosedError: If the fit ends before.
        """
        if buffer.device.type == "cuda":
            torch.cuda.set_device(buffer.device)  # a new thread uses device 0 and would create a context there
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
        with self._cuda.stream(stream):
            self._copy(to, source)
            made = self._cuda.Event()
            made.record(stream)
        for tensor in (to, source):
            if tensor.device.type == "cuda":
                tensor.record_stream(stream)  # in case a failure releases it
        return made

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)


_GRACE_S = 1.0  # for copies in flight when something fails, as their memory may be released then


class HostPayloads:
    """Payloads of gradients in host memory, where nothing is copied; :class:`PayloadCopies` is for a device's.

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
    """Copies of payloads between a device and host memory, and the streams of codecs."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        self._own = threading.local()
        self._stopping = threading.Event()

    def mark(self) -> ReadyMark:
        """Return the moment at which the current stream has done all its work so far."""
        exists = self._cuda.Event()
        exists.record(self._cuda.current_stream(self.device))
        return ReadyMark.of(exists)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Wrap a thread's work on a part on the device; it is complete on exit.

        Raises:
            SchedulerClosedError: If the fit ends before.
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
        there.copy_(self.to_device(payload))

    def stop(self) -> None:
        """End all waits for the device."""
        self._stopping.set()

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
            time.sleep(_LOOK_AGAIN_S)
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
