"""Overlap, or step as DDP does? Found out by doing both for a few steps.

Deferring updates costs a little on the training thread: gates, one optimizer call per bucket. Where gradients arrive
faster than that, DDP's own way is the faster one, and there is no telling beforehand: it depends on the model, the link
and what else the processors do. So after a warm-up some steps are timed each way. Rank 0's clock decides for all.

Pure: no clock, no communication.
"""

from __future__ import annotations

import statistics

__all__ = ["ModeTrial"]

_WARM_UP_STEPS = 10
_STEPS_EACH = 10
_WORTH_IT = 0.99  # of DDP's time; a tie goes to DDP, which has fewer moving parts


class ModeTrial:
    """Says for each step whether it is to be one as DDP's, and which way was faster.

    Args:
        warm_up: Steps before the trial; they overlap.
        steps: Steps of each way. The first of each is not counted, as it follows one of the other way.
    """

    def __init__(self, *, warm_up: int = _WARM_UP_STEPS, steps: int = _STEPS_EACH) -> None:
        self._first_overlapped = warm_up + 1
        self._first_as_ddp = self._first_overlapped + steps
        self.decision_step = self._first_as_ddp + steps
        self._seconds: dict[int, float] = {}
        self._outcome: bool | None = None

    def as_ddp(self, step: int) -> bool:
        """Whether ``step``, counted from 1, is to be one as DDP's."""
        if self._outcome is not None:
            return self._outcome
        return self._first_as_ddp <= step < self.decision_step

    def note(self, step: int, seconds: float) -> None:
        """Take down how long ``step`` took, from its backward pass to the next one."""
        if self._first_overlapped < step < self.decision_step and step != self._first_as_ddp:
            self._seconds[step] = seconds

    def is_due(self, step: int) -> bool:
        """Whether ranks have to agree before ``step``."""
        return self._outcome is None and step >= self.decision_step

    def medians(self) -> tuple[float, float]:
        """Typical step, overlapped and as DDP's, in seconds; not numbers before there are any."""
        overlapped = [s for step, s in self._seconds.items() if step < self._first_as_ddp]
        as_ddp = [s for step, s in self._seconds.items() if step > self._first_as_ddp]
        if not overlapped or not as_ddp:
            return float("nan"), float("nan")
        return statistics.median(overlapped), statistics.median(as_ddp)

    def prefers_ddp(self) -> bool:
        """What this rank's clock says."""
        overlapped, as_ddp = self.medians()
        return as_ddp * _WORTH_IT <= overlapped

    def settle(self, as_ddp: bool) -> None:
        """Keep what the ranks have agreed on."""
        self._outcome = as_ddp
