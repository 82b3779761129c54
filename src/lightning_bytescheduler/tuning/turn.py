"""Steps at one point, one after the other."""

from __future__ import annotations

from typing import Any

from lightning_bytescheduler.tuning.measurement import StepTime

__all__ = ["Turn"]


class Turn:
    """Gathers the steps that count, and says what they lose.

    Args:
        settle: First steps that are not part of the measurement. Their loss is a loss all the same.
    """

    def __init__(self, *, settle: int) -> None:
        self._settle = settle
        self._settling: list[float] = []
        self.samples: list[float] = []

    def note(self, seconds: float, *, counts: bool) -> bool:
        """Take down a step, and return whether it is measured. One that does not count still lets the change settle."""
        if self._settle:
            self._settle -= 1
            if counts:
                self._settling.append(seconds)
            return False
        if counts:
            self.samples.append(seconds)
        return counts

    def time(self, *, usual_noise: float = 0.0) -> StepTime | None:
        """The step time as far as it is known."""
        return StepTime.of(self.samples, usual_noise=usual_noise) if self.samples else None

    def lost(self, best_seconds: float, *, before_seconds: float | None = None) -> float:
        """Seconds lost against steps of ``best_seconds``; disturbed steps are taken to be like the others.

        Args:
            best_seconds: The best step time that is known.
            before_seconds: The step time at the point before this one, whose last communication may be in the first
                steps here; that much longer they may take for a reason.
        """
        here = self._likely_seconds()
        if here is None:
            return 0.0
        longest = float("inf") if before_seconds is None else here + before_seconds
        settling = sum(max(min(seconds, longest) - best_seconds, 0.0) for seconds in self._settling)
        return settling + len(self.samples) * max(here - best_seconds, 0.0)

    def loses_each_step(self, best_seconds: float) -> float:
        """Seconds that another step will probably lose; nothing is known after one step, which may be disturbed."""
        here = self._likely_seconds()
        if here is None or len(self.samples) + len(self._settling) < 2:
            return 0.0
        return max(here - best_seconds, 0.0)

    def _likely_seconds(self) -> float | None:
        """Of a step here. While little is measured, the first steps are better than nothing."""
        few = self.samples if len(self.samples) > 2 else [*self._settling, *self.samples]
        return StepTime.of(few).seconds if few else None

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"settle": self._settle, "settling": list(self._settling), "samples": list(self.samples)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Turn:
        """Go on from ``state_dict()``."""
        made = cls(settle=state["settle"])
        made._settling = list(state["settling"])
        made.samples = list(state["samples"])
        return made
