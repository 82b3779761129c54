"""How fast a worker trains, from what it reports."""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["WorkerSpeed"]

_INTERVALS = 15


class WorkerSpeed:
    """Median over the last reports, so that one long pause (a checkpoint, a validation) says nothing.

    Time in which the worker has no slice begun is not counted. A worker that falls silent gets slower by the second.
    """

    def __init__(self) -> None:
        self._intervals: deque[tuple[int, float]] = deque(maxlen=_INTERVALS)
        self._since: float | None = None
        self._samples = 0  # reported since then; several reports may come at one reading of the clock

    def begin(self, now: float) -> None:
        """The worker trains from now on, if it did not already. ``now`` in seconds."""
        if self._since is None:
            self._since, self._samples = now, 0

    def report(self, samples: int, now: float) -> None:
        """The worker trained on so many samples since its last report."""
        if self._since is None:
            return
        self._samples += samples
        if self._samples > 0 and now > self._since:
            self._intervals.append((self._samples, now - self._since))
            self._since, self._samples = now, 0

    def pause(self) -> None:
        """The worker has nothing to train on."""
        self._since = None

    def samples_per_second(self, now: float) -> float | None:
        """The speed, more than 0, or None if there was no report to tell it from."""
        if not self._intervals:
            return None
        speed = median(samples / seconds for samples, seconds in self._intervals)
        if self._since is not None and now > self._since:
            usual = median(samples for samples, _ in self._intervals)
            speed = min(speed, usual / (now - self._since))
        return speed
