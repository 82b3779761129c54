"""Arithmetic on intervals of time, in sweeps over sorted ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["Interval", "intersection", "length", "subtract", "union"]

Interval = tuple[float, float]
"""Start and end, in seconds, with start <= end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint, ascending ones; those that touch become one, empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return what two unions (see ``union``) have in common, in one sweep over both."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return what is in the union ``left`` (see ``union``) and not in the union ``right``."""
    edges = [-math.inf, *(edge for interval in right for edge in interval), math.inf]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    return intersection(left, gaps)


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals, in seconds; what overlaps counts as often as it occurs."""
    return math.fsum(end - start for start, end in intervals)
