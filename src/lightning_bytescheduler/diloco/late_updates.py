"""What an update counts that comes after its round is over: a rule in whole numbers, so that order never matters.

A late update is added to the sum of the next round of its fragment, with a weight that depends on nothing but the
update, how late it is, and what was merged last: not on which others are late, nor on who comes first. Weights are
whole numbers, and sums of them are exact, so that any order of arrival leads to the same mean.

``"drop"``
    It counts nothing: what is merged was made with the weights it is merged into.
``"discount"``
    ``weight // (1 + staleness)``. It was made with weights that many rounds old; the share that a round has in what
    they have become since falls about so, and the weight with it (delay-compensated and asynchronous SGD use the same
    factor: Xie et al., "Asynchronous Federated Optimization", section 5.2, polynomial weighting with exponent 1).
``"aligned"``
    ``floor(weight * max(0, cosine))`` with the direction of the last mean of its fragment: it counts as far as it
    agrees with where the others went, and not at all if it points elsewhere, however late it is.

The cosine is worked out in whole numbers as well: both vectors are rounded to 16 bits of their largest element and
multiplied exactly, so that neither the order of summation nor the number of threads changes a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.exceptions import OptionError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LATE_RULES",
    "Alignment",
    "LateRule",
    "alignment",
    "late_weight",
    "require_late",
    "round_of_late",
    "staleness",
]

LateRule = Literal["drop", "discount", "aligned"]
LATE_RULES: tuple[LateRule, ...] = get_args(LateRule)
"""What becomes of an update whose round is over."""

_STEPS = 2**15 - 1  # of the largest element; a sum of 2^33 products of these fits into 63 bits
_CHUNK = 1 << 20  # elements that are worked on at once


@dataclass(frozen=True, slots=True)
class Alignment:
    """How an update lies to another, exactly.

    Attributes:
        product: Of the two, in units of their own.
        norms: The product of their squared norms, in these units squared.
    """

    product: int
    norms: int

    @property
    def cosine(self) -> float:
        """Of the angle between them, for people; 0 if one of them is 0."""
        return self.product / math.sqrt(self.norms) if self.norms else 0.0


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


def late_weight(rule: LateRule, weight: int, *, staleness: int, alignment: Alignment | None = None) -> int:
    """The weight with which a late update counts; 0 to drop it.

    Args:
        rule: One of ``LATE_RULES``.
        weight: That it would have had in time.
        staleness: See :func:`staleness`; 1 or more.
        alignment: To the last mean of its fragment; ``None`` if there was none, as there is no direction to agree with.

    Raises:
        OptionError: If a value is not allowed.
    """
    require_one_of("late", rule, LATE_RULES)
    require_whole("weight", weight, 0)
    require_whole("staleness", staleness, 1)
    if rule == "discount":
        return weight // (1 + staleness)
    if rule == "aligned" and alignment is not None and alignment.product > 0:
        return min(math.isqrt(weight**2 * alignment.product**2 // alignment.norms), weight)
    return 0


def alignment(update: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Alignment:
    """How an update lies to another of the same names and shapes, exactly and the same on every machine.

    Args:
        update: Tensors by name, of finite values.
        reference: The same, such as the last mean.
    """
    scales = [_scale(tensors) for tensors in (update, reference)]
    product = ours = theirs = 0
    for name, tensor in update.items():
        flat, other = tensor.reshape(-1), reference[name].reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            left, right = _rounded(flat[part], scales[0]), _rounded(other[part], scales[1])
            product += int((left * right).sum())
            ours += int((left * left).sum())
            theirs += int((right * right).sum())
    return Alignment(product, ours * theirs)


def _scale(tensors: Mapping[str, Tensor]) -> float:
    largest = max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)
    return _STEPS / largest if largest else 0.0


def _rounded(values: Tensor, scale: float) -> Tensor:
    return values.double().mul(scale).round_().long()
