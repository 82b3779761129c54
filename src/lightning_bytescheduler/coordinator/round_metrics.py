"""What the workers' steps came to, as means over a round: summed as reports come in, at a cost that does not grow."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["RoundMetrics"]

_MOST = 100  # names of metrics in a round


class RoundMetrics:
    """Means over a round, weighted by samples."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # weighted sum, weight
        self._rates: dict[str, list[float]] = {}  # of each worker: samples, seconds

    def add(self, worker: str, *, batch_size: int, seconds: float, metrics: Mapping[str, float | None]) -> None:
        """Take note of a step; values that are not finite do not count."""
        if not batch_size:
            return
        rate = self._rates.setdefault(worker, [0.0, 0.0])
        rate[0] += batch_size
        rate[1] += seconds
        for name, value in metrics.items():
            if value is None or not math.isfinite(value):
                continue
            if name not in self._sums and len(self._sums) >= _MOST:
                continue
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += value * batch_size
            sums[1] += batch_size

    def take(self) -> dict[str, float]:
        """The means, by name, and ``samples_per_second`` of all workers together; begins anew."""
        means = {name: total / weight for name, (total, weight) in self._sums.items()}
        if self._rates:
            means["samples_per_second"] = sum(samples / seconds for samples, seconds in self._rates.values() if seconds)
        self._sums, self._rates = {}, {}
        return {name: value for name, value in means.items() if math.isfinite(value)}
