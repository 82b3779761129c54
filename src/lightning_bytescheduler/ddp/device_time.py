"""Measures steps, and the computing time of batches on a GPU with the GPU's own events, for shares by pace.

The host runs ahead of a GPU, so its clock is of no use here. Events are recorded on the training's stream: when the
forward pass of a batch begins, around each wait for gradients, and when the last gradient of the batch is complete. The
time from the first to the last, less the waits, is this rank's computing time. It is read when the GPU has passed these
events, a batch or more later, without waiting.

A wait begins when the stream has done the work before it, so time that the host waits does not count. Waits within
other collectives, such as those of synchronised batch normalization, count as computing. Source: "CUDA semantics" in
PyTorch's documentation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_UNDER_WAY = 64  # batches that the host may be ahead


class _Batch:
    __slots__ = ("begin", "end", "samples", "waits")

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.end: Any = None
        self.samples = 0
        self.waits: list[tuple[Any, Any]] = []

    @property
    def over(self) -> bool:
        return bool(self.end.query()) and all(after.query() for _, after in self.waits)

    @property
    def milliseconds(self) -> float:
        waited = sum(before.elapsed_time(after) for before, after in self.waits)
        return float(self.begin.elapsed_time(self.end) - waited)


class DeviceTime:
    """Times batches on one device; for the training thread and the hooks of its backward passes."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._thread = 0
        self._batch: _Batch | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._sends = False  # whether the present backward pass sends gradients
        self._past: deque[_Batch] = deque(maxlen=_UNDER_WAY)

    def begin(self) -> None:
        """Begin the forward pass of a batch."""
        self._thread = threading.get_ident()
        self._waits = []
        self._batch = _Batch(self._now())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wrap a wait for gradients of the training's stream, and possibly of the host."""
        if self._batch is None or threading.get_ident() != self._thread:
            yield
            return
        before = self._now()
        try:
            yield
        finally:
            self._waits.append((before, self._now()))

    def gradient_exists(self) -> None:
        """Record that all work of a gradient is on the current stream; a batch ends with its last gradient."""
        batch = self._batch
        if batch is not None:
            self._sends = True
            batch.end = self._now()
            batch.waits = list(self._waits)  # later waits are not part of the batch

    def end(self, samples: int) -> None:
        """Record that a backward pass has returned on the host; a batch ends with its last one."""
        batch = self._batch
        if batch is None:
            return
        if not self._sends:  # gradients are accumulated and none was sent
            self.gradient_exists()
        self._sends = False
        batch.samples = samples
        if not self._past or self._past[-1] is not batch:
            self._past.append(batch)

    def latest(self) -> list[int]:
        """Return samples and nanoseconds of the last batch that the GPU has finished; both 0 if there is no new one."""
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


class StepTimer:
    """Times one engine's steps, from one forward pass to the next.

    On a GPU it records events on the training's stream, as the host may be whole steps ahead, and reads them once the
    GPU has passed them.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float], *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._clock = clock
        self._cuda = cuda
        self._began: Any = clock() if device.type != "cuda" else None
        self._unread: deque[tuple[int, Any, Any]] = deque()

    def begin(self, step: int, seen: Callable[[int, float], None]) -> None:
        """Begin ``step``; ``seen`` gets numbers and seconds of earlier steps that are known."""
        if self._device.type != "cuda":
            now = self._clock()
            seen(step - 1, now - self._began)
            self._began = now
            return
        now = self._cuda.Event(enable_timing=True)
        now.record(self._cuda.current_stream(self._device))
        if self._began is not None:
            self._unread.append((step - 1, self._began, now))
        self._began = now
        while self._unread and self._unread[0][2].query():
            ended, start, end = self._unread.popleft()
            seen(ended, start.elapsed_time(end) / 1e3)
