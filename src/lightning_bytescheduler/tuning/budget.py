"""What looking for something better may cost.

Time lost is what steps took beyond the best that is known. It may add up to a share of the steps taken since the
search began, and from the start to that share of the first few hundred: with 2% of 500 steps, to ten steps' time.
That is little. A point that doubles the step time costs one of the ten at each step, and four steps pass before it is
left for good reason: the one in which it comes into force, two that are measured, and the one in which the change back
comes into force. So points that are expected to be far off are not tried before it is affordable, and when there is
nothing affordable to try, training goes on with the best that is known until there is. What no account can prevent is
that a point turns out far slower than expected when little is left: the steps until this is noticed are lost.
"""

from __future__ import annotations

__all__ = ["TimeBudget"]


class TimeBudget:
    """Accounts for time lost.

    Args:
        share: Of the steps' time that may be lost.
        first_steps: So many steps' share may be lost from the start.
        lost: Seconds lost so far.
    """

    def __init__(self, *, share: float, first_steps: int, lost: float = 0.0) -> None:
        self._share = share
        self._first_steps = first_steps
        self.lost = lost

    def left(self, *, steps: int, step_seconds: float) -> float:
        """Seconds that may still be lost, when ``steps`` of ``step_seconds`` have been taken since the search began."""
        return self._share * max(self._first_steps, steps) * step_seconds - self.lost

    def lose(self, seconds: float) -> None:
        """Take down a loss; gains are not set against it."""
        self.lost += max(seconds, 0.0)
