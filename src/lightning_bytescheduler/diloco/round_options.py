"""When the batch scheduler decides on the end of a round, and how long it waits for whom.

What an update counts that comes after its round is over: a rule in whole numbers, so that order never matters.

A late update is added to the sum of the next round of its fragment, with a weight that depends on nothing but the
update and how late it is: not on which others are late, nor on who comes first. Weights are whole numbers, and sums of
them are exact, so that any order of arrival leads to the same mean.

``"drop"``
    It counts nothing: what is merged was made with the weights it is merged into.
``"discount"``
    ``weight // (1 + staleness)``. It was made with weights that many rounds old; the share that a round has in what
    they have become since falls about so, and the weight with it (delay-compensated and asynchronous SGD use the same
    factor: Xie et al., "Asynchronous Federated Optimization", section 5.2, polynomial weighting with exponent 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_bytescheduler.checks import require_one_of, require_seconds, require_share, require_whole
from lightning_bytescheduler.exceptions import OptionError

LateRule = Literal["drop", "discount"]
LATE_RULES: tuple[LateRule, ...] = get_args(LateRule)
"""What becomes of an update whose round is over."""


def require_late(option: str, value: LateRule, *, weighting: str = "samples") -> LateRule:
    """Return ``value`` if it is one of ``LATE_RULES`` that goes with the weighting.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    require_one_of(option, value, LATE_RULES)
    rule: LateRule = value
    if weighting == "uniform" and rule != "drop":
        raise OptionError(option, value, "'drop' where weighting='uniform': part of a weight of 1 is 0")
    return rule


def round_of_late(round: int, *, current: int, fragments: int = 1) -> int:
    """The round that a late update is to be part of: the next that synchronises its fragment.

    Args:
        round: In which it was made.
        current: The round that is on, later than that.
        fragments: That take turns.
    """
    return round + -(-max(current - round, 1) // fragments) * fragments


def staleness(round: int, *, into: int, fragments: int = 1) -> int:
    """How many rounds of its fragment an update is late.

    Args:
        round: In which it was made.
        into: That it is to be part of, as :func:`round_of_late` says it.
        fragments: That take turns.
    """
    return (into - round) // fragments


def late_weight(rule: LateRule, weight: int, *, staleness: int) -> int:
    """The weight with which a late update counts; 0 to drop it.

    Args:
        rule: One of ``LATE_RULES``.
        weight: That it would have had in time.
        staleness: See :func:`staleness`; 1 or more.

    Raises:
        OptionError: If a value is not allowed.
    """
    require_one_of("late", rule, LATE_RULES)
    require_whole("weight", weight, 0)
    require_whole("staleness", staleness, 1)
    return weight // (1 + staleness) if rule == "discount" else 0


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
        late: What becomes of a pseudo-gradient that comes after its round is over, see ``late_weight``.
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
