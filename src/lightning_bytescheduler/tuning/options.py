"""How a search is run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.checks import require_positive, require_whole

__all__ = ["TuningOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningOptions:
    """Budgets of a search.

    Attributes:
        trials: Points that are tried at most, those at the start among them.
        steps_per_trial: Steps of a trial at most; fewer where the step time is steady, or the point clearly worse.
        precision: A trial ends when its step time is known with this standard error, as a share.
        plain_ddp: Whether DDP's own behaviour is among the candidates.
        least_gain: The search ends when nothing promises to save this share of the step time.
        cost_share: What may be lost, as a share of the time of the steps since the search began.
        cost_steps: So many steps' share may be lost from the start.
        warm_up: First steps that do not count.
        settle: Steps after a change that do not count; the communication of the last step before it is in them.
        lead: Steps from a decision to the first one that it governs.

    Raises:
        OptionError: Names the option that is not allowed.
    """

    trials: int = 15
    steps_per_trial: int = 100
    precision: float = 0.01
    plain_ddp: bool = True
    least_gain: float = 0.003
    cost_share: float = 0.02
    cost_steps: int = 500
    warm_up: int = 10
    settle: int = 1
    lead: int = 1

    def __post_init__(self) -> None:
        for option, least in (("trials", 1), ("steps_per_trial", 4), ("cost_steps", 1), ("warm_up", 0), ("settle", 0)):
            require_whole(option, getattr(self, option), least)
        require_whole("lead", self.lead, 1)
        for option in ("precision", "least_gain", "cost_share"):
            if require_positive(option, getattr(self, option)) >= 1:
                raise OptionError(option, getattr(self, option), "less than 1")
        if not isinstance(self.plain_ddp, bool):
            raise OptionError("plain_ddp", self.plain_ddp, "True or False")

    @property
    def least_steps(self) -> int:
        """Steps that a point takes until it can be left for good reason: two measured, and both changes' first ones."""
        return 2 + self.settle + self.lead
