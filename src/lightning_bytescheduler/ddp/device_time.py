"""What a batch takes a GPU to compute, as the GPU itself tells, where batches follow each rank's pace.

The host is ahead of a GPU, so its clock tells nothing. Events are recorded on the training's stream: when the forward
pass of a batch begins, around each wait for gradients, and when the last gradient of the batch exists. What lies
between the first and the last of them, less the waits, is what this rank computed. It is known when the GPU has come
there, a batch or more later; nobody waits for it.

A wait counts from where the stream has done what was before it, so a host that has to wait is no time of the GPU's
either. What other collectives wait for, such as those of a synchronised batch normalization, counts as computing.

Source: "CUDA semantics" in PyTorch's documentation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["DeviceTime"]

_UNDER_WAY = 64  # batches that the host may be ahead


class _Batch:
    """The events of one batch."""

    __slots__ = ("begin", "end", "samples", "waits")

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.end: Any = None
        self.samples = 0
        self.waits: list[tuple[Any, Any]] = []

    @property
    def over(self) -> bool:
        """Whether the GPU has passed all of it."""
        return bool(self.end.query()) and all(after.query() for _, after in self.waits)

    @property
    def milliseconds(self) -> float:
        """That the GPU has computed."""
        waited = sum(before.elapsed_time(after) for before, after in self.waits)
        return float(self.begin.elapsed_time(self.end) - waited)


class DeviceTime:
    """Takes the time of batches on one device; for the training thread, and for hooks of its backward passes.

    Args:
        device: A GPU.
        cuda: Streams and events; replaced by tests.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._thread = 0
        self._batch: _Batch | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._sends = False  # gradients, in the present backward pass
        self._past: deque[_Batch] = deque(maxlen=_UNDER_WAY)

    def begin(self) -> None:
        """The forward pass of a batch begins."""
        self._thread = threading.get_ident()
        self._waits = []
        self._batch = _Batch(self._now())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what makes the training's stream, and maybe the host, wait for gradients."""
        if self._batch is None or threading.get_ident() != self._thread:
            yield
            return
        before = self._now()
        try:
            yield
        finally:
            self._waits.append((before, self._now()))

    def gradient_exists(self) -> None:
        """All that computes a gradient is on the current stream; the last one of a batch is its end."""
        batch = self._batch
        if batch is not None:
            self._sends = True
            batch.end = self._now()
            batch.waits = list(self._waits)  # those after it are no part of the batch

    def end(self, samples: int) -> None:
        """A backward pass is over, for the host; the last one of a batch is its end.

        Args:
            samples: Of the batch.
        """
        batch = self._batch
        if batch is None:
            return
        if not self._sends:  # gradients are accumulated, and none was to be sent
            self.gradient_exists()
        self._sends = False
        batch.samples = samples
        if not self._past or self._past[-1] is not batch:
            self._past.append(batch)

    def latest(self) -> list[int]:
        """Samples and nanoseconds of the last batch that the GPU is through with; both 0 if there is no new one."""
        found = None
        while self._past and self._past[0].over:
            found = self._past.popleft()
        if found is None:
            return [0, 0]
        return [found.samples, max(int(1e6 * found.milliseconds), 0)]

    def _now(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event
