"""Measures the link with a handful of all-reduces, the same ones on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_bytescheduler.tuning.link import LinkEstimate

__all__ = ["probe_link"]

_SMALL_BYTES = 4 * 1024
_FIRST_BYTES = 128 * 1024
_LAST_BYTES = 8 * 1024 * 1024
_ENOUGH_S = 0.03
_REPEATS = 3
_QUICK_S = 0.005  # what is over so soon is repeated more often: a processor's hiccup is as long
_QUICK_REPEATS = 12


def _measure(group: dist.ProcessGroup, device: torch.device, size: int) -> float:
    """Best of several all-reduces of ``size`` bytes, in seconds; the slowest rank's figure, known to all ranks."""
    best = _best_of(_REPEATS, group, device, size)
    return min(best, _best_of(_QUICK_REPEATS, group, device, size)) if best < _QUICK_S else best


def _best_of(repeats: int, group: dist.ProcessGroup, device: torch.device, size: int) -> float:
    buffer = torch.zeros(size // 4, device=device)
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


def probe_link(group: dist.ProcessGroup, device: torch.device) -> LinkEstimate:
    """Estimate the cost of an all-reduce on ``group``; every rank must call this at the same point.

    Sizes grow until one takes 30 ms, so a slow link is probed for a fraction of a second and a fast one with enough
    bytes. Each figure is agreed on before the next size is chosen: all ranks run the same sequence.

    Args:
        group: The scheduler's data group, before the core launches anything.
        device: Where gradients live.
    """
    samples = [(_SMALL_BYTES, _measure(group, device, _SMALL_BYTES))]
    size = _FIRST_BYTES
    while True:
        samples.append((size, _measure(group, device, size)))
        if samples[-1][1] >= _ENOUGH_S or size >= _LAST_BYTES:
            return LinkEstimate.fit(samples)
        size *= 4
