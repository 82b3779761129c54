"""Checks of the outcomes of :func:`tests.support.fit.train`, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.fit import SIZES, Outcome, Recipe, Run, differences, train
from tests.support.rank_pool import RankPool

__all__ = ["assert_overlapped", "assert_same", "assert_same_as_ddp", "train_on"]

DDP = Run(strategy="ddp")


def train_on(pool: RankPool, recipe: Recipe, *runs: Run) -> list[list[Outcome]]:
    """Outcomes by run, then by rank; what the pool has trained before is not trained again."""
    if recipe.resume is not None:  # from a file, which may have changed
        return [pool.run(train, recipe=recipe, run=run) for run in runs]
    return [pool.run_once(train, recipe=recipe, run=run) for run in runs]


def assert_same(expected: Sequence[Outcome], actual: Sequence[Outcome]) -> None:
    """Weights, optimizer state, every loss and everything noted: the same bits on every rank."""
    for rank, (one, other) in enumerate(zip(expected, actual, strict=True)):
        found = differences(one, other)
        assert not found, f"rank {rank}:\n  " + "\n  ".join(found[:12])
        assert len(set(one.losses)) > 1 or one.error, "a training that does not move proves nothing"
        assert all(torch.isfinite(w).all() for w in one.weights.values()), "and neither does one that explodes"


def assert_overlapped(outcomes: Sequence[Outcome], share: float = 0.9) -> None:
    """Updates crossed the step boundary. With a held network: nothing waited for a gradient before it."""
    for outcome in outcomes:
        assert outcome.reasons == ()
        assert outcome.statistics is not None
        assert outcome.statistics.deferred_share >= share, outcome.statistics
        assert outcome.forced == 0, f"{outcome.forced} steps waited for gradients before the next step began"


def assert_same_as_ddp(
    pool: RankPool,
    recipe: Recipe,
    *,
    network: str | None = None,
    overlap: bool = True,
    broken: Any = None,
    options: dict[str, Any] | None = None,
) -> tuple[list[Outcome], list[Outcome]]:
    """Train under both strategies and compare; with ``broken``, also prove that the comparison can fail.

    Args:
        pool: The ranks that train.
        recipe: What they train.
        network: See :class:`Run`; by default the one that shows waits, if updates are to cross the step boundary.
        overlap: Whether the updates are expected to cross the step boundary.
        broken: A sabotage that must show, in weights, losses, notes or an error.
        options: Options of the strategy, instead of the small sizes.

    Returns:
        The outcomes of DDP and of the strategy under test.
    """
    options = dict(SIZES) if options is None else options
    runs = [DDP, Run(network=network or ("held" if overlap else "late"), options=options)]
    if broken is not None:
        runs.append(Run(options=options, sabotage=broken))
    outcomes = train_on(pool, recipe, *runs)
    assert_same(outcomes[0], outcomes[1])
    if overlap:
        assert_overlapped(outcomes[1])
    if broken is not None:
        assert any(differences(one, other) for one, other in zip(outcomes[0], outcomes[2], strict=True)), (
            "without what this test is about the result is the same: the test cannot fail"
        )
    return outcomes[0], outcomes[1]
