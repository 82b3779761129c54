"""The options of a coordinator: what all workers of its run have in common, and how it waits, keeps and saves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_bytescheduler.checks import require_positive, require_whole
from lightning_bytescheduler.diloco.coordinator_protocol import RunOptions
from lightning_bytescheduler.diloco.round_end import RoundOptions, require_late


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorOptions:
    """How a coordinator runs; validated when made.

    Attributes:
        run: What all workers have in common.
        rounds: When rounds end, and who is waited for; ``outer_steps`` is that of ``run``, and
            ``closing_rounds`` follows from its ``fragments``.
        lease: Seconds without a sign of life after which a worker is given up.
        keep_rounds: Means of that many rounds are kept for workers that are behind, if they do not take more than 1 GiB
            together; later they fetch the state. The last one is always kept.
        save_every: Rounds from one saved state to the next.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    run: RunOptions = field(default_factory=RunOptions)
    rounds: RoundOptions = field(default_factory=RoundOptions)
    lease: float = 60.0
    keep_rounds: int = 8
    save_every: int = 1

    def __post_init__(self) -> None:
        require_late("late", self.rounds.late, weighting=self.run.weighting)
        require_positive("lease", self.lease, of="seconds")
        for option in ("keep_rounds", "save_every"):
            require_whole(option, getattr(self, option), 1)
        own = replace(self.rounds, outer_steps=self.run.outer_steps, closing_rounds=self.run.fragments - 1)
        object.__setattr__(self, "rounds", own)


def target_in_words(options: RunOptions) -> str:
    """What ends a round, for people."""
    if options.samples_per_round is not None:
        return f"{options.samples_per_round} samples of all workers"
    return f"{options.inner_steps} steps of {'every worker' if options.equal_steps else 'the fastest worker'}"
