"""For how long a GPU computes nothing in a training, as ``torch.profiler`` sees it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.cuda.steps import Case, Scheduled, train_both
from tests.support.rank_pool import RankPool

__all__ = ["EXPOSED", "covered", "profiled", "split"]

EXPOSED = (("gloo", 2), ("nccl", 1))
"""Backends, and how many ranks share the GPU."""

_STEPS = 30
Interval = tuple[float, float]


def split(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Intervals in which the device computes, and in which it communicates or copies, in microseconds."""
    computes: list[Interval] = []
    carries: list[Interval] = []
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        carried = "nccl" in event.name.lower() or event.name.startswith("Memcpy")
        (carries if carried else computes).append((event.time_range.start, event.time_range.end))
    return computes, carries


def covered(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


@contextmanager
def _figures(scheduled: Scheduled) -> Iterator[dict[str, float]]:
    figures: dict[str, float] = {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        yield figures
        torch.cuda.synchronize()
    computes, carries = split(seen.events() or [])
    whole = [*computes, *carries]
    span = max(stop for _, stop in whole) - min(start for start, _ in whole)
    figures.update(span=span, idle=span - covered(computes), exposed=covered(whole) - covered(computes))


def profiled(pool: RankPool, backend: str) -> list[str]:
    """Train on each rank of ``pool``, as DDP and overlapped; returns a line for each.

    Args:
        pool: Ranks that share a GPU.
        backend: Backend of the process groups.
    """
    lines = []
    for mode in ("ddp", "overlapped"):
        case = Case(device="cuda", backend=backend, mode=mode, steps=_STEPS)
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder, "meeting"))
            answers = pool.run(train_both, world_size=pool.world_size, meeting=meeting, case=case, inside=_figures)
        figures = answers[0][-1]
        span, idle, exposed = (figures[name] / _STEPS / 1000 for name in ("span", "idle", "exposed"))
        lines.append(
            f"{backend}, {mode}: a step takes {span:.2f} ms, in which the GPU computes nothing for {idle:.2f} ms, and "
            f"communicates or copies alone for {exposed:.2f} ms"
        )
    return lines
