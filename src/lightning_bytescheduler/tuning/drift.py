"""Has the step time changed for good, or was that a blip?

Steps are gathered in windows. When several windows in a row are off in the same direction, by their medians, the
change has lasted. Anything shorter than a window or two is forgotten.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_bytescheduler.tuning.measurement import StepTime

__all__ = ["DriftDetector"]

_WINDOW = 20  # steps
_WINDOWS = 3
_LEAST = 0.1  # of the reference: less is not worth another search
_CERTAIN = 4.0  # standard errors of a window's median


class DriftDetector:
    """Compares steps with a reference.

    Args:
        reference: The step time that was measured.
    """

    def __init__(self, reference: StepTime) -> None:
        self._reference = reference
        self._window: list[float] = []
        self._off = 0  # windows in a row, negative where faster

    def note(self, seconds: float) -> bool:
        """Take down a step; returns whether the change has lasted. It stays true until a window is as it was."""
        self._window.append(seconds)
        if len(self._window) == _WINDOW:
            self._judge(StepTime.of(self._window))
            self._window = []
        return abs(self._off) >= _WINDOWS

    def _judge(self, window: StepTime) -> None:
        change = window.seconds - self._reference.seconds
        margin = max(_LEAST * self._reference.seconds, _CERTAIN * (window.error + self._reference.error))
        if abs(change) <= margin:
            self._off = 0
        elif change > 0:
            self._off = max(self._off, 0) + 1
        else:
            self._off = min(self._off, 0) - 1

    def state_dict(self) -> dict[str, Any]:
        """Plain types."""
        return {"reference": asdict(self._reference), "window": list(self._window), "off": self._off}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> DriftDetector:
        """Go on from ``state_dict()``."""
        made = cls(StepTime(**state["reference"]))
        made._window = list(state["window"])
        made._off = state["off"]
        return made
