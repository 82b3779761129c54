"""The options of a coordinator: what all workers of its run have in common, and how it waits, keeps and saves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lightning_bytescheduler.checks import (
    require_bool,
    require_positive,
    require_share,
    require_whole,
)
from lightning_bytescheduler.diloco.coordinator_protocol import RunOptions, overlap_of, wire_of
from lightning_bytescheduler.diloco.fragments import FragmentOptions
from lightning_bytescheduler.diloco.outer_optimizer import SPARSE_DEFAULTS
from lightning_bytescheduler.diloco.round_end import (
    FastestSteps,
    FixedSteps,
    RoundOptions,
    RoundTarget,
    SampleTarget,
    require_late,
)
from lightning_bytescheduler.diloco.weighted_mean import require_weighting
from lightning_bytescheduler.exceptions import OptionError


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorOptions:
    """How a coordinator runs; validated when made.

    Attributes:
        run: What all workers have in common.
        rounds: When rounds end, and who is waited for; ``outer_steps`` is that of ``run``, and
            ``closing_rounds`` follows from its ``fragments``.
        lease: Seconds without a sign of life after which a worker is given up.
        keep_rounds: Means of that many rounds are kept for workers that are behind; later they fetch the state.
        keep_bytes: That these may take together; the last one is always kept.
        spool_bytes: That all uploads under way may take together; one that is larger is taken alone.
        spool_memory: Of these, in memory; the others are temporary files.
        save_every: Rounds from one saved state to the next.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    run: RunOptions = field(default_factory=RunOptions)
    rounds: RoundOptions = field(default_factory=RoundOptions)
    lease: float = 60.0
    keep_rounds: int = 8
    keep_bytes: int = 2**30
    spool_bytes: int = 2**32
    spool_memory: int = 2**29
    save_every: int = 1

    def __post_init__(self) -> None:
        require_late("late", self.rounds.late, weighting=self.run.weighting)
        require_positive("lease", self.lease, of="seconds")
        require_whole("keep_rounds", self.keep_rounds, 1)
        for option in ("keep_bytes", "spool_bytes", "spool_memory"):
            require_whole(option, getattr(self, option), 0 if option == "spool_memory" else 1)
        require_whole("save_every", self.save_every, 1)
        own = replace(self.rounds, outer_steps=self.run.outer_steps, closing_rounds=self.run.fragments - 1)
        object.__setattr__(self, "rounds", own)


def run_options(**given: Any) -> RunOptions:
    """What all workers have in common, checked as ``DiLoCoStrategy`` checks it.

    Args:
        given: Fields of ``RunOptions`` by name; None for the default.

    Raises:
        OptionError: Names the option that is not allowed.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    wire = wire_of(RunOptions(**chosen))
    chosen["wire_dtype"] = wire.name
    if wire.dtype == "sparse":
        chosen = {**SPARSE_DEFAULTS, **chosen}
    options = RunOptions(**chosen)
    if options.samples_per_round is not None:
        require_whole("samples_per_round", options.samples_per_round, 1)
        for option in ("inner_steps", "equal_steps"):
            if getattr(options, option):
                raise OptionError(option, getattr(options, option), "left out where samples_per_round ends a round")
    if options.inner_steps is not None:
        require_whole("inner_steps", options.inner_steps, 1)
    require_bool("equal_steps", options.equal_steps)
    if options.outer_steps is not None:
        require_whole("outer_steps", options.outer_steps, 1)
    require_positive("outer_lr", options.outer_lr)
    require_share("outer_momentum", options.outer_momentum)
    require_weighting("weighting", options.weighting)
    FragmentOptions(fragments=options.fragments, overlap_steps=options.overlap_steps)
    overlap_of(options)
    return options


def target_of(options: RunOptions) -> RoundTarget:
    """What ends a round."""
    if options.samples_per_round is not None:
        return SampleTarget(options.samples_per_round)
    steps = options.steps_of_round
    return FixedSteps(steps) if options.equal_steps else FastestSteps(steps)


def target_in_words(options: RunOptions) -> str:
    """The same, for people."""
    if options.samples_per_round is not None:
        return f"{options.samples_per_round} samples of all workers"
    steps = options.steps_of_round
    return f"{steps} steps of {'every worker' if options.equal_steps else 'the fastest worker'}"
