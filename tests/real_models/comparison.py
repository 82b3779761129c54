"""How the training of a real model is compared with DDP's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.checks import DDP, assert_same, train_on
from tests.support.compare import bit_differences
from tests.support.fit import Outcome, Recipe, Run
from tests.support.rank_pool import RankPool

__all__ = ["SIZES", "STEPS", "VALIDATED", "assert_close_to_ddp", "assert_same_as_ddp"]

STEPS = 7
SIZES = {"bucket_cap_mb": 0.004, "partition_size": 1000, "credit": 2000}
"""A dozen buckets, cut into partitions."""
LEAST_SHARE = 0.8
"""Share of updates that cross the step boundary; those of the first of seven steps do not."""
VALIDATED = {"val_check_interval": 3, "limit_val_batches": 1}


def assert_same_as_ddp(pool: RankPool, recipe: Recipe, *, reason: str | None = None, options: Any = SIZES) -> None:
    """The same bits in weights, optimizer state, losses, metrics and all that was noted.

    Args:
        pool: Of two ranks.
        recipe: What is trained.
        reason: Occurs in the reason why steps are synchronised; ``None`` if they overlap.
        options: Of the strategy.
    """
    expected, actual = train_on(pool, recipe, DDP, Run(network="late", options=options))
    assert_same(expected, actual)
    for one, other in zip(expected, actual, strict=True):
        assert set(other.warnings) <= set(one.warnings), "a warning that DDP does not give"
    _assert_steps(actual, reason)


def assert_close_to_ddp(pool: RankPool, recipe: Recipe) -> None:
    """For clipped norms: one step from an identical state within 1e-6 of each tensor's norm, and losses that stay near.

    The first step of a fit is synchronised, so that a fit of two steps is one from an identical state. Weights are not
    compared later: a gradient that is zero but for rounding, as of a key's bias, is made a whole step by Adam.
    """
    run = Run(network="late", options=SIZES)
    expected, actual = train_on(pool, replace(recipe, steps=2), DDP, run)
    for one, other in zip(expected, actual, strict=True):
        assert one.weights.keys() == other.weights.keys()
        for name, weight in one.weights.items():
            distance = (other.weights[name].double() - weight.double()).norm()
            assert distance <= 1e-6 * weight.double().norm(), name
    expected, actual = train_on(pool, recipe, DDP, run)
    for one, other in zip(expected, actual, strict=True):
        assert not bit_differences(actual[0].weights, other.weights), "ranks differ"
        assert other.losses == pytest.approx(one.losses, rel=1e-4)
    _assert_steps(actual, None)


def _assert_steps(outcomes: list[Outcome], reason: str | None) -> None:
    for outcome in outcomes:
        assert outcome.statistics is not None
        if reason is None:
            assert outcome.reasons == ()
            assert outcome.statistics.deferred_share >= LEAST_SHARE, outcome.statistics
        else:
            assert any(reason in said for said in outcome.reasons), outcome.reasons
