"""When the batch scheduler decides on the end of a round, and how long it waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_bytescheduler.checks import require_one_of, require_seconds, require_share, require_whole
from lightning_bytescheduler.diloco.late_updates import LATE_RULES, LateRule

__all__ = ["INNER_STEPS", "RoundOptions"]

INNER_STEPS = 100
"""Of a round, where neither these nor samples are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOptions:
    """When the batch scheduler decides on the end of a round, and how long it waits for whom; validated when made.

    Attributes:
        outer_steps: Rounds after which the training is over; ``None`` for no end.
        closing_rounds: Rounds that then follow without a step, each of which synchronises what the last steps have left
            of one more fragment.
        start_workers: Workers that the first round waits for. Whoever joins later trains in the round that is on, if
            its end is not decided; where all take equally many steps, from the next round on.
        restart_workers: The same for the first round after a restart.
        quorum: Share of a round's workers whose pseudo-gradients an outer step needs; with fewer, the weights stay as
            they are. Where a round synchronises one fragment only, so does its quorum. A round's workers are those that
            were told of its end; who joins later is none of them, and who had left before is none either.
        quorum_workers: The same as a number; both have to be reached.
        grace: Seconds that pseudo-gradients are waited for beyond the deadline, which is twice the forecast plus twice
            the longest transfer of the workers; explicit seconds must cover a first transfer. ``"auto"`` waits as long
            as that is worth what the others lose by it, see ``round_end.worthwhile_wait``.
        silent_after: Seconds of silence, on top of three steps, after which a worker is no longer counted on.
        first_step_limit: The same for a worker that has not reported a step yet; compiling may take minutes.
        late: What becomes of a pseudo-gradient that comes after its round is over, see ``late_updates.late_weight``.
        expiry: Seconds of silence after which a worker that was lost, or has left, is forgotten with its step times.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    outer_steps: int | None = None
    closing_rounds: int = 0
    start_workers: int = 1
    restart_workers: int = 1
    quorum: float = 0.5
    quorum_workers: int = 1
    grace: float | Literal["auto"] = 60.0
    silent_after: float = 10.0
    first_step_limit: float = 600.0
    late: LateRule = "drop"
    expiry: float = 3600.0

    def __post_init__(self) -> None:
        if self.outer_steps is not None:
            require_whole("outer_steps", self.outer_steps, 1)
        for option in ("start_workers", "restart_workers", "quorum_workers"):
            require_whole(option, getattr(self, option), 1)
        require_whole("closing_rounds", self.closing_rounds, 0)
        require_share("quorum", self.quorum)
        if self.grace != "auto":
            require_seconds("grace", self.grace)
        for option in ("silent_after", "first_step_limit", "expiry"):
            require_seconds(option, getattr(self, option))
        require_one_of("late", self.late, LATE_RULES)

    def closes(self, round: int) -> bool:
        """Whether a round is one without a step."""
        return self.outer_steps is not None and round > self.outer_steps

    def ends_with(self, round: int) -> bool:
        """Whether nothing follows a round."""
        return self.outer_steps is not None and round >= self.outer_steps + self.closing_rounds
