"""Measures the link with a handful of all-reduces, the same ones on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_bytescheduler.tuning.default_sizes import LinkEstimate

__all__ = ["probe_link", "probe_start_up"]

_SMALL_BYTES = 4 * 1024
_FIRST_BYTES = 128 * 1024
_LAST_BYTES = 8 * 1024 * 1024
_ENOUGH_S = 0.03
_REPEATS = 2
_QUICK_S = 0.005  # what is over so soon is repeated more often: a processor's hiccup is as long
_QUICK_REPEATS = 12
_REPEATING_S = 0.02  # altogether, as nobody trains meanwhile


def _repeated(group: dist.ProcessGroup, device: torch.device, size: int, once: float) -> float:
    """Least time of several all-reduces of ``size`` bytes, the first of which took ``once`` seconds."""
    best = min(once, _least_of(_REPEATS, group, device, size))
    if best >= _QUICK_S:
        return best
    return min(best, _least_of(min(int(_REPEATING_S / best), _QUICK_REPEATS), group, device, size))


def _least_of(repeats: int, group: dist.ProcessGroup, device: torch.device, size: int) -> float:
    """In seconds: the slowest rank's figure, known to all ranks."""
    buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    slowest = torch.tensor(best, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest.item())


def probe_start_up(group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds that an all-reduce of next to nothing takes; every rank must call this at the same point.

    Args:
        group: The scheduler's data group, before the core launches anything.
        device: Where gradients live.
    """
    return _least_of(_REPEATS, group, device, _SMALL_BYTES)


def probe_link(group: dist.ProcessGroup, device: torch.device) -> LinkEstimate:
    """Estimate the cost of an all-reduce on ``group``; every rank must call this at the same point.

    Sizes grow until one takes 30 ms more than next to nothing, so a slow link is probed for a fraction of a second, and
    a fast one with enough bytes. Each figure is agreed on before the next size is chosen: all ranks run the same
    sequence.

    Args:
        group: The scheduler's data group, before the core launches anything.
        device: Where gradients live.
    """
    small = _repeated(group, device, _SMALL_BYTES, _least_of(1, group, device, _SMALL_BYTES))
    size = _FIRST_BYTES
    while True:
        seconds = _least_of(1, group, device, size)
        if seconds >= small + _ENOUGH_S or size >= _LAST_BYTES:
            seconds = _repeated(group, device, size, seconds)
            if seconds >= small + _ENOUGH_S or size >= _LAST_BYTES:
                return LinkEstimate.fit([(_SMALL_BYTES, small), (size, seconds)])
        size *= 4
