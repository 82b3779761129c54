"""How rounds are scheduled: when to decide, and how long to wait for whom."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.checks import require_seconds, require_share, require_whole

__all__ = [
    "RoundOptions",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOptions:
    """Options of the batch scheduler; validated when made.

    Attributes:
        outer_steps: Rounds after which the training is over; ``None`` for no end.
        start_workers: Workers that the first round waits for. Whoever joins later counts from the next round.
        restart_workers: The same for the first round after a restart.
        step_cap: Steps that no worker exceeds in a round, or ``None``. A worker that has raced ahead waits there.
        lead_steps: The end of a round is decided when it is this many steps of the slowest worker away. Fewer make a
            better forecast; with one, a worker may be in the middle of a step that it should not have begun.
        quorum: Share of a round's workers whose updates an outer step needs; with fewer, the weights stay as they are.
        grace: Seconds that updates are waited for beyond the deadline, which is twice the forecast plus twice the
            longest transfer so far. It must cover a first transfer.
        silent_after: Seconds of silence, on top of three steps, after which a worker is no longer counted on.
        first_step_limit: The same for a worker that has not reported a step yet; compiling may take minutes.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    outer_steps: int | None = None
    start_workers: int = 1
    restart_workers: int = 1
    step_cap: int | None = None
    lead_steps: int = 3
    quorum: float = 0.5
    grace: float = 60.0
    silent_after: float = 10.0
    first_step_limit: float = 600.0

    def __post_init__(self) -> None:
        for option in ("outer_steps", "step_cap"):
            if getattr(self, option) is not None:
                require_whole(option, getattr(self, option), 1)
        for option in ("start_workers", "restart_workers", "lead_steps"):
            require_whole(option, getattr(self, option), 1)
        require_share("quorum", self.quorum)
        for option in ("grace", "silent_after", "first_step_limit"):
            require_seconds(option, getattr(self, option))
