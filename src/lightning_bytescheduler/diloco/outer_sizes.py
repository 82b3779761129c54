"""How large the parts of a pseudo-gradient are, and how many of them travel at once, on a link that was measured.

The parts of a pseudo-gradient need no order, unlike gradients, of which the first layers' are needed first: nothing is
to overtake them. So parts are as large as that brings something, and no larger than lets a worker encode, add up and
decode one part while another one travels. Pure.
"""

from __future__ import annotations

import math

from lightning_bytescheduler.checks import require_size, require_whole
from lightning_bytescheduler.tuning.default_sizes import LinkEstimate

__all__ = ["outer_sizes"]

_BYTES = 4  # of a parameter, in fp32; what travels may be less, and is part of the estimate
_LARGEST = 8_000_000  # parameters, as published; what travels is held in memory several times
_SMALLEST = 16_384
_ALONE = 1 / 6  # of what a part costs is not hidden under other parts, at the beginning and the end


def outer_sizes(
    parameters: int,
    link: LinkEstimate,
    *,
    partition_size: int | None = None,
    credit: int | None = None,
) -> tuple[int, int]:
    """Sizes with which a pseudo-gradient is exchanged soonest.

    Cutting ``N`` parameters into parts of ``p`` costs ``alpha N / p`` for starting them. What cannot be hidden under
    other parts is a share of one, ``beta p / 6``. Their sum is least with ``p = sqrt(6 N alpha / beta)``. Two parts are
    in flight, and more where the link holds more than one.

    Args:
        parameters: Of the largest pseudo-gradient that is sent.
        link: Cost of exchanging one part, by the bytes that it has in fp32.
        partition_size: The same size if it is given.
        credit: What may be in flight, if it is given.

    Returns:
        Largest part that is sent at once, and what may be in flight, in parameters.

    Raises:
        OptionError: If a size is not a whole number above 0.
    """
    require_whole("parameters", parameters, 1)
    if partition_size is None:
        best = math.sqrt(parameters * link.alpha / (_ALONE * link.beta * _BYTES))
        parts = max(round(parameters / min(max(best, _SMALLEST), _LARGEST)), math.ceil(parameters / _LARGEST), 1)
        partition_size = math.ceil(parameters / parts)  # of the same size: a small one at the end would cost as much
        if credit is not None:
            partition_size = min(partition_size, require_size("credit", credit))
    require_size("partition_size", partition_size)
    if credit is None:
        held = math.ceil(link.alpha / (link.beta * _BYTES * partition_size))
        credit = (1 + max(held, 1)) * partition_size
    return partition_size, require_size("credit", credit)
