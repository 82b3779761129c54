"""How long steps take, from one backward pass to the next one.

On a GPU by what it has done, not by what it has been told: the host may be whole steps ahead. Events on the training's
stream take the moments, and are read once the GPU has passed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["StepTimes"]

Note = Callable[[int, float], None]
"""Told the number of a step and how long it took, in seconds."""


class StepTimes:
    """Takes the time of one engine's steps.

    Args:
        device: Where they are computed.
        clock: Seconds; for a CPU.
        cuda: Events and streams; replaced by tests.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float], *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._clock = clock
        self._cuda = cuda
        self._began: Any = clock() if device.type != "cuda" else None
        self._unread: deque[tuple[int, Any, Any]] = deque()

    def begin(self, step: int, note: Note) -> None:
        """``step`` begins where the caller is; ``note`` what is known of steps before it."""
        if self._device.type != "cuda":
            now = self._clock()
            note(step - 1, now - self._began)
            self._began = now
            return
        now = self._cuda.Event(enable_timing=True)
        now.record(self._cuda.current_stream(self._device))
        if self._began is not None:
            self._unread.append((step - 1, self._began, now))
        self._began = now
        while self._unread and self._unread[0][2].query():
            self._read(note)

    def settle(self, note: Note) -> None:
        """``note`` what is not known yet of steps that have ended; waits for a GPU to pass their ends."""
        while self._unread:
            self._unread[0][2].synchronize()
            self._read(note)

    def _read(self, note: Note) -> None:
        step, start, end = self._unread.popleft()
        note(step, start.elapsed_time(end) / 1e3)
