"""Copies between a GPU and host memory, for gradients that travel from host memory.

Parameter servers work on a CPU, and gloo sends messages from host memory. So a part is copied there as it is launched
(``copy_to_host``), and its result is copied back before the part ends (``copy_to_device``). These are BytePS's stages
COPYD2H and COPYH2D. Codecs are fastest where gradients are: what they encode there is copied as a *payload*, as with
BytePS's COPYD2H after COMPRESS, and COPYH2D before DECOMPRESS.

Each thread that copies, encodes or decodes has its own stream. Why every read sees the right values: work on a part
begins when the host has seen the event after the writer of the bucket (:meth:`PayloadCopies.mark`). All work for a part
on a thread is on that thread's stream, in order. The thread sends the part, or ends it, when the host has seen all of
that work done (:meth:`PayloadCopies.working`). So one stream at a time works on a part, and later readers on any stream
find the result. Residuals and sums are used nowhere else.

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

__all__ = ["HostPayloads", "PayloadCopies", "travel_by_host"]

_LOOK_AGAIN_S = 5e-5


def travel_by_host(device: torch.device, *, compressed: bool, served: bool) -> bool:
    """Whether gradients on ``device`` travel from host memory: on a GPU, if compressed or served."""
    return device.type == "cuda" and (compressed or served)


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
