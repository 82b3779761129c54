"""Measures the link with a few all-reduces, the same on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lightning_bytescheduler.tuning.sizes import LinkEstimate

__all__ = ["probe_link", "probe_start_up"]

_SMALL_BYTES = 4 * 1024
_FIRST_BYTES = 128 * 1024
_LAST_BYTES = 8 * 1024 * 1024
_ENOUGH_S = 0.03
_ALIKE = 1.25  # times the least: measurements without load
_ALIKE_TAKES = 3
_MOST_TAKES = 24
_LONG_ENOUGH_S = 0.02  # for one figure: a scheduling delay is as long as several quick messages


def _settled(group: dist.ProcessGroup, device: torch.device, size: int, *earlier: float) -> float:
    """Return the least time of all-reduces of ``size`` bytes, repeated until the three shortest are similar.

    Load delays each message by a different time, so measurements that differ were made under load.
    """
    takes = list(earlier)
    while True:
        takes = sorted([*takes, *_takes(_ALIKE_TAKES, group, device, size)])
        if len(takes) >= _MOST_TAKES or (sum(takes) >= _LONG_ENOUGH_S and takes[_ALIKE_TAKES - 1] <= _ALIKE * takes[0]):
            return takes[0]


def _takes(number: int, group: dist.ProcessGroup, device: torch.device, size: int) -> list[float]:
    """Return the seconds of ``number`` all-reduces on the slowest rank, equal on all ranks."""
    buffer, takes = torch.zeros(size // 4, dtype=torch.float32, device=device), []
    for _ in range(number):
        start = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        takes.append(time.perf_counter() - start)
    slowest = torch.tensor(takes, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return [float(seconds) for seconds in slowest]


def probe_start_up(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of a minimal all-reduce; every rank must call this at the same point."""
    return _settled(group, device, _SMALL_BYTES)


def probe_link(group: dist.ProcessGroup, device: torch.device, *, largest: int = _LAST_BYTES) -> LinkEstimate:
    """Estimate the cost of an all-reduce on ``group``; every rank must call this at the same point.

    Args:
        group: The group that is measured.
        device: Where its data lives.
        largest: The most bytes that will ever travel at once, the same on all ranks: what is larger is not measured.

    Sizes grow until one takes 30 ms more than a minimal one, so a slow link is probed for a fraction of a second, and a
    fast one with enough bytes. Ranks agree on each figure before the next size is chosen, so all run the same sequence.
    """
    small = _settled(group, device, _SMALL_BYTES)
    size, last = _FIRST_BYTES, min(largest, _LAST_BYTES)
    while True:
        (seconds,) = _takes(1, group, device, size)
        if seconds >= small + _ENOUGH_S or size >= last:
            seconds = _settled(group, device, size, seconds)
            if seconds >= small + _ENOUGH_S or size >= last:
                return LinkEstimate.fit([(_SMALL_BYTES, small), (size, seconds)])
        size *= 4
