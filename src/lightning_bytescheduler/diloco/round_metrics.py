"""What the steps of a round came to: means of whatever workers log, weighted by samples, and the speed of all together.

Sums are kept as steps come in, at a cost that does not grow with the round or the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["RoundMetrics"]

_MOST = 256  # names of metrics in a round; a worker that makes up names does not fill the memory


class RoundMetrics:
    """Means over the steps of a round."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}  # weighted sum, and samples
        self._rates: dict[str, tuple[float, int]] = {}  # by worker: seconds, and samples

    def add(
        self, worker: str, *, batch_size: int, seconds: float, metrics: Mapping[str, float | None] | None = None
    ) -> None:
        """Take note of a step.

        Args:
            worker: Who took it.
            batch_size: Its samples; without any it does not count.
            seconds: That it took.
            metrics: By name; ``None`` for one that it does not have.
        """
        if not batch_size:
            return
        time, samples = self._rates.get(worker, (0.0, 0))
        self._rates[worker] = time + seconds, samples + batch_size
        for name, value in (metrics or {}).items():
            if value is None or (name not in self._sums and len(self._sums) >= _MOST):
                continue
            total, samples = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value * batch_size, samples + batch_size

    def take(self) -> dict[str, float]:
        """The means by name, and ``samples_per_second`` of all workers together; begins anew.

        What is not finite, as the loss of a training that has diverged, is left out: no such number travels as JSON.
        """
        means = {name: total / samples for name, (total, samples) in self._sums.items()}
        if self._rates:
            means["samples_per_second"] = sum(samples / time for time, samples in self._rates.values() if time)
        self._sums, self._rates = {}, {}
        return {name: value for name, value in means.items() if math.isfinite(value)}
