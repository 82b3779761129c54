"""``weighting="samples"``: the weights of one process on all ranks' samples; DDP's where ranks have equally many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.checks import DDP, assert_same
from tests.parity.weighted_fits import Case, fitted, fitted_all
from tests.support.fit import SIZES, Outcome, Run
from tests.support.rank_pool import RankPool

TOLERANCE = 1e-6  # of a tensor's norm
UNEQUAL = Case(sizes=[(1, 3, 2), (64, 5, 1)])
CASES = {
    "SGD": UNEQUAL,
    "AdamW": replace(UNEQUAL, optimizer="AdamW"),
    "clipped by norm": replace(UNEQUAL, clip=(0.05, "norm")),
    "clipped by value": replace(UNEQUAL, clip=(0.01, "value")),
    "losses scaled": replace(UNEQUAL, scaled=True),
    "accumulated": Case(sizes=[(3, 1, 64, 2, 5), (7, 2, 1, 4, 1)], accumulate=2),
    "accumulated and clipped": Case(
        sizes=[(3, 1, 64, 2), (7, 2, 1, 4)], accumulate=2, clip=(0.05, "norm"), optimizer="AdamW"
    ),
    "no overlap": replace(UNEQUAL, options={"cross_barrier": False, "mode": "overlapped"}),
    "as DDP": replace(UNEQUAL, options={"mode": "ddp"}),
    "as DDP, accumulated": Case(sizes=[(3, 1, 64, 2), (7, 2, 1, 4)], accumulate=2, options={"mode": "ddp"}),
    "by hand, two optimizers": replace(UNEQUAL, manual=True),
    "an empty rank": Case(sizes=[(4, 0, 3), (2, 5, 0)]),
    "an empty rank, as DDP": Case(sizes=[(4, 0, 3), (2, 5, 0)], options={"mode": "ddp"}),
    "an empty rank, in shards": Case(sizes=[(4, 0, 3), (2, 5, 0)], clip=(0.05, "norm")),
    "empty batches of a step": Case(sizes=[(0, 4, 3, 0), (2, 5, 0, 6)], accumulate=2),
}


def relative_errors(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((weights[name] - value).norm() / value.norm()) for name, value in expected.items()}


def assert_as_one_process(found: Sequence[tuple[Outcome, dict[str, Tensor]]], case: str) -> None:
    for rank, (outcome, expected) in enumerate(found):
        errors = relative_errors(outcome.weights, expected)
        assert max(errors.values()) <= TOLERANCE, f"{case}, rank {rank}: {errors}"


def test_weights_are_those_of_one_process(two_ranks: RankPool) -> None:
    by_rank = two_ranks.run(fitted_all, cases=list(CASES.values()))
    for index, case in enumerate(CASES):
        assert_as_one_process([found[index] for found in by_rank], case)
    kinds = dict(zip(CASES, (found[0].statistics for found in by_rank[0]), strict=True))
    for case in ("SGD", "AdamW", "clipped by norm", "accumulated", "an empty rank"):
        assert kinds[case].overlapped_steps >= 1, f"{case}: no step has overlapped"


MORE = [
    Case(sizes=[(1, 9), (7, 2), (64, 1), (0, 4)]),
    Case(sizes=[(1, 9), (7, 2), (64, 1), (0, 4)], optimizer="AdamW", clip=(0.05, "norm")),
    Case(sizes=[(1, 9, 2, 2), (7, 2, 0, 0), (64, 1, 3, 1), (0, 4, 2, 1)], accumulate=2, options={"mode": "ddp"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_with_more_ranks(request: pytest.FixtureRequest, ranks: int) -> None:
    pool: RankPool = request.getfixturevalue({3: "three_ranks", 4: "four_ranks"}[ranks])
    cases = [replace(case, sizes=case.sizes[:ranks]) for case in MORE]
    by_rank = pool.run(fitted_all, cases=cases)
    for index in range(len(cases)):
        assert_as_one_process([found[index] for found in by_rank], str(cases[index]))


@pytest.mark.parametrize("strategy", ["ddp", "ours"])
def test_ranks_weighed_alike_are_something_else(two_ranks: RankPool, strategy: str) -> None:
    run = DDP if strategy == "ddp" else Run(options=SIZES)
    for outcome, expected in two_ranks.run(fitted, case=UNEQUAL, run=run):
        assert max(relative_errors(outcome.weights, expected).values()) > 1e3 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "options"),
    [(1, {}), (2, {"mode": "ddp"}), (2, {"cross_barrier": False})],
    ids=["overlapped", "ddp", "waits"],
)
def test_the_bits_are_ddps_where_counts_are_equal(
    two_ranks: RankPool, accumulate: int, options: dict[str, Any]
) -> None:
    case = Case(sizes=[(3, 3, 3, 3, 3)] * 2, accumulate=accumulate, options=options, optimizer="AdamW")
    ddp = two_ranks.run_once(fitted, case=case, run=DDP)
    assert_same([outcome for outcome, _ in ddp], [outcome for outcome, _ in two_ranks.run(fitted, case=case)])


def test_what_is_not_finite_on_a_rank_without_samples_counts_nothing(two_ranks: RankPool) -> None:
    """The mean over no sample is not a number."""
    case = CASES["an empty rank"]
    for rank, (outcome, _) in enumerate(two_ranks.run(fitted, case=case)):
        assert sum(loss != loss for loss in outcome.losses) == sum(size == 0 for size in case.sizes[rank])
        assert all(torch.isfinite(weight).all() for weight in outcome.weights.values())
