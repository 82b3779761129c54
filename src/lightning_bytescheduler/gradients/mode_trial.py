"""Overlap, or step as DDP does? Found out by doing both for a few steps.

Deferring updates costs a little on the training thread: gates, one optimizer call per bucket. Where gradients arrive
faster than that, DDP's own way is the faster one, and there is no telling beforehand: it depends on the model, the link
and what else the processors do. So after a warm-up, steps are timed each way, in turns, as machines drift; and again
after some thousand steps, as links do. Rank 0's clock decides for all.

Pure: no clock, no communication.
"""

from __future__ import annotations

import statistics

__all__ = ["ModeTrial"]

_WARM_UP_STEPS = 10
_TURN_STEPS = 4
_TURNS = 8  # of both ways together
_AGAIN_AFTER_STEPS = 2000
_WORTH_IT = 0.99  # of DDP's time; a tie goes to DDP, which has fewer moving parts


class ModeTrial:
    """Says for each step whether it is to be one as DDP's, and which way was faster.

    Args:
        warm_up: Steps before the first trial; they overlap.
        turn: Steps one way before it is the other's turn. The first of a turn is not counted, as the end of a step the
            other way is in it.
        turns: Of a trial, both ways together.
        again_after: Steps from the end of one trial to the next.
    """

    def __init__(
        self,
        *,
        warm_up: int = _WARM_UP_STEPS,
        turn: int = _TURN_STEPS,
        turns: int = _TURNS,
        again_after: int = _AGAIN_AFTER_STEPS,
    ) -> None:
        self._first_step = warm_up + 1
        self._turn = turn
        self._steps = turn * turns
        self._again_after = again_after
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._as_ddp = False
        self._settled = False

    @property
    def decision_step(self) -> int:
        """Before which step the ranks agree next."""
        return self._first_step + self._steps

    def as_ddp(self, step: int) -> bool:
        """Whether ``step``, counted from 1, is to be one as DDP's."""
        if not self._first_step <= step < self.decision_step:
            return self._as_ddp
        return (step - self._first_step) // self._turn % 2 == 1

    def note(self, step: int, seconds: float) -> None:
        """Take down how long ``step`` took, from its backward pass to the next one."""
        if self._first_step <= step < self.decision_step and (step - self._first_step) % self._turn:
            self._seconds[self.as_ddp(step)].append(seconds)

    def is_due(self, step: int) -> bool:
        """Whether ranks have to agree before ``step``."""
        return step >= self.decision_step

    def medians(self) -> tuple[float, float]:
        """Typical step, overlapped and as DDP's, in seconds; not numbers before there are any."""
        if not all(self._seconds.values()):
            return float("nan"), float("nan")
        return statistics.median(self._seconds[False]), statistics.median(self._seconds[True])

    def prefers_ddp(self) -> bool:
        """What this rank's clock says."""
        overlapped, as_ddp = self.medians()
        return as_ddp * _WORTH_IT <= overlapped

    def settle(self, as_ddp: bool) -> bool:
        """Keep what the ranks have agreed on until the next trial; returns whether that is news."""
        news = as_ddp != self._as_ddp or not self._settled
        self._as_ddp, self._settled = as_ddp, True
        self._first_step = self.decision_step + self._again_after
        self._seconds = {False: [], True: []}
        return news
