"""Payloads that are made and read on a GPU, and travel from host memory.

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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lightning_bytescheduler.collectives.device_streams import ReadyMark
from lightning_bytescheduler.exceptions import SchedulerClosedError

__all__ = ["PayloadCopies"]

_LOOK_AGAIN_S = 5e-5
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
