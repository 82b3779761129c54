"""For how long a worker trains on while its pseudo-gradient travels: a number of steps, or as long as it takes.

With ``"auto"`` a worker merges at the first step boundary at which nothing is left to wait for: the mean is there, the
end of its round is known, and so is the next round's beginning, or that there is none. After at most half as many steps
as its last round had, it waits for that. So each worker has a bound by its own pace, and the better half of a round is
trained on top of the merge; a fast worker of the same run may take ten steps meanwhile, a slow one three.

Workers may merge at different steps, each at one of its own, and at another one each time:

- *The global weights depend on nothing but what was sent.* A pseudo-gradient is complete when it is sent, and the round
  is merged from what was sent. Each worker takes the same outer steps with the same means, in the order of the rounds,
  as it sends nothing before it has merged what is under way. With fragments that is so for each by itself: a merge
  touches no other one.
- *Steps beside a mean count for the next round*, whenever that is begun here: :class:`RoundCounter` counts anew from
  where it has sent, reports carry the next round's number, and the scheduler counts them as soon as it has begun that
  round. What it then decides on its end is not listened to before the merge, and said again after ``RoundStarted``.
- *Where all stand still*, at a validation or the end of an epoch, a worker merges before it asks for that, and whoever
  trains beside the mean of such a round does not wait for a next round, as there is none until all have passed.
- *A checkpoint* is of the begin of a round or of a standstill, thus after a merge. What a worker has at a round's begin
  (weights, counts) is its own with a number of steps too. A worker is behind the one that writes by one merge at most.
- *Nobody waits for longer than with a number.* The scheduler has the samples of steps beside a mean in its reports, and
  whoever merges as soon as it can is ready for the next end as soon as it can be.

With a coordinator, who is late or cut off has nothing to wait for as soon as that is known: it catches up at once.

What does depend on the step of the merge are a worker's own weights between two rounds, as on the number of steps that
it takes in a round. So two runs with ``"auto"`` are no more alike, bit for bit, than two runs by pace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["Overlap", "OverlapSteps"]

OverlapSteps: TypeAlias = int | Literal["auto"]

_AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """How a worker decides when to merge; validated when made.

    Attributes:
        steps: Between sending a pseudo-gradient and merging the mean, 0 to wait for it; ``"auto"`` merges once the mean
            is there.
        inner_steps: That a round has at most; ``None`` where samples end it.

    Raises:
        OptionError: If it is neither, or does not end before the next pseudo-gradient is sent.
    """

    steps: OverlapSteps = 0
    inner_steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps != _AUTO and not is_whole(self.steps):
            raise OptionError("overlap_steps", self.steps, f"a whole number, 0 or more, or {_AUTO!r}")
        if self.inner_steps is None:
            return
        if self.steps == _AUTO and self.inner_steps == 1:
            raise OptionError("overlap_steps", _AUTO, "left out with inner_steps=1: each step ends a round")
        if isinstance(self.steps, int) and self.steps >= self.inner_steps:
            raise OptionError(
                "overlap_steps",
                self.steps,
                f"less than the steps between two sends, inner_steps={self.inner_steps}",
            )

    def __bool__(self) -> bool:
        """Whether a worker trains on at all."""
        return self.steps != 0

    @property
    def follows_mean(self) -> bool:
        """Whether a worker merges as soon as the mean is there."""
        return self.steps == _AUTO

    def longest(self, taken: int) -> int:
        """Steps after which a worker waits for the mean.

        Args:
            taken: Its steps in the round that it has sent.
        """
        if isinstance(self.steps, int):
            return self.steps
        # A round that nobody could end, as the coordinator was away, may have had many more than the next one will.
        most = taken if self.inner_steps is None else min(taken, self.inner_steps)
        return max(most // 2, 1)
