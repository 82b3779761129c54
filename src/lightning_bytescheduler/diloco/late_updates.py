"""What an update counts that comes after its round is over: a rule in whole numbers, so that order never matters.

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

from typing import Literal, get_args

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["LATE_RULES", "LateRule", "late_weight", "require_late", "round_of_late", "staleness"]

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
