"""How much a worker's update counts in the merge.

Weights are whole numbers until the very end, so that they add up exactly in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_bytescheduler.diloco.numbers import require_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["WEIGHTINGS", "require_weighting", "update_weight", "weight_shares"]

WEIGHTINGS = ("samples", "tokens", "uniform")
"""Ways to weight updates."""


def require_weighting(option: str, value: object) -> str:
    """Return ``value`` if it is one of ``WEIGHTINGS``.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if value not in WEIGHTINGS:
        raise OptionError(option, value, f"one of {', '.join(map(repr, WEIGHTINGS))}")
    return str(value)


def update_weight(weighting: str, *, samples: int, tokens: int = 0) -> int:
    """Weight of one worker's update, relative to the others'.

    Args:
        weighting: One of ``WEIGHTINGS``.
        samples: That the worker processed in the round.
        tokens: The same in tokens.

    Returns:
        0 for a worker that has processed nothing, whatever the weighting.

    Raises:
        OptionError: If a value is not allowed, as when tokens are to count and samples were processed without any.
    """
    require_weighting("weighting", weighting)
    require_whole("samples", samples, 0)
    require_whole("tokens", tokens, 0)
    if weighting == "tokens":
        if samples and not tokens:
            raise OptionError("weighting", weighting, "'samples' or 'uniform' where steps do not say how many tokens")
        return tokens
    return samples if weighting == "samples" else int(samples > 0)


def weight_shares(weights: Mapping[str, int]) -> dict[str, float]:
    """Each worker's share in the merged update; they sum to one.

    Raises:
        OptionError: If all weights are 0, or one is not a whole number from 0 on.
    """
    total = sum(require_whole("weight", weight, 0) for weight in weights.values())
    if not total:
        raise OptionError("weights", dict(weights), "of workers one of which has processed something")
    return {worker: weight / total for worker, weight in weights.items()}
