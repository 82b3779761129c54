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
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from lightning_bytescheduler.collectives.device_streams import DevicePoller, ReadyMark
from lightning_bytescheduler.exceptions import SchedulerClosedError

__all__ = ["HostCopies", "travel_by_host"]

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
