"""How long a step takes, from few steps that are now and then disturbed.

Location is the median and scale the median absolute deviation: neither moves much while fewer than half of the
steps are disturbed, by a checkpoint elsewhere, a slow disk, or the garbage collector. The median of ``n`` steps has a
standard error of about ``1.2533 × scale / sqrt(n)``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StepTime", "is_clearly_slower"]

_CONSISTENT = 1.4826  # makes the median absolute deviation a normal distribution's standard deviation
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
_LEAST_SCALE = 0.002  # of the location; coarse clocks must not make us certain
_TRUSTED = 8  # steps; from fewer, the deviation is no estimate of the scale
_CERTAIN = 3.0  # standard errors


@dataclass(frozen=True, slots=True)
class StepTime:
    """A robust estimate.

    Attributes:
        seconds: Of a typical step.
        error: Standard error of ``seconds``.
        scale: Standard deviation of undisturbed steps, in seconds.
        steps: How many it was made of.
    """

    seconds: float
    error: float
    scale: float
    steps: int

    @classmethod
    def of(cls, samples: Sequence[float], *, usual_noise: float = 0.0) -> StepTime:
        """Make the estimate.

        Args:
            samples: Seconds of steps, at least one.
            usual_noise: Scale of other measurements relative to their location. The scale is taken to be at least
                this while there are few samples, whose deviation may be small by chance.
        """
        ordered = sorted(samples)
        # Of an even number the lower of the middle two: one of two, or two of four, may be disturbed.
        seconds = statistics.median_low(ordered)
        scale = _CONSISTENT * statistics.median_low(abs(sample - seconds) for sample in ordered)
        noise = usual_noise if len(ordered) < _TRUSTED else 0.0
        scale = max(scale, seconds * max(_LEAST_SCALE, noise))
        return cls(seconds, _MEDIAN_ERROR * scale / math.sqrt(len(ordered)), scale, len(ordered))

    @property
    def noise(self) -> float:
        """Scale relative to the location."""
        return self.scale / self.seconds


def is_clearly_slower(time: StepTime, reference: StepTime) -> bool:
    """Whether more steps would not change that ``time`` is the larger one. One step alone is never clear."""
    margin = _CERTAIN * math.hypot(time.error, reference.error)
    return time.steps >= 2 and time.seconds - reference.seconds > margin
