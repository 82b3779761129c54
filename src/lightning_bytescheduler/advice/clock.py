"""Moments on a device: what has been computed by then, not what has been asked for."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["DeviceClock"]


class DeviceClock:
    """Takes moments and tells the time between them.

    On CUDA a moment is an event on the current stream, so that taking one does not hold the device up.

    Args:
        device: Where the model computes, a CPU or a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def moment(self) -> Any:
        """Now, for :meth:`seconds`."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one moment to a later one; waits until the device has passed both."""
        if not self._on_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
