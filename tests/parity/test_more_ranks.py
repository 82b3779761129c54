"""Beyond two ranks: bit for bit what DDP computes from the same partitions, and a step of DDP's own within rounding."""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.parity.reference import same_sizes
from tests.support.fit import SIZES, Recipe, Run, differences
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

OTHER_SIZES = {**SIZES, "partition_size": 150}


@pytest.fixture(params=["three_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


def test_same_partitions_give_the_same_bits(ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005), samples=192), steps=16)
    expected, ours = train_on(ranks, recipe, Run(strategy=same_sizes(SIZES)), Run(network="held"))
    assert_same(expected, ours)
    assert_overlapped(ours)


def test_other_partitions_give_other_bits(four_ranks: RankPool) -> None:
    """The comparison above is sharp enough to see where a gradient was cut."""
    recipe = Recipe(model=Tower, steps=4)
    expected, ours = train_on(four_ranks, recipe, Run(strategy=same_sizes(OTHER_SIZES)), Run(network="held"))
    assert differences(expected[0], ours[0])


def only_second_step(step: int) -> float:
    return float(step == 1)


def test_one_step_from_the_same_weights_is_ddps_within_rounding(ranks: RankPool) -> None:
    """The first step has no effect, as its rate is zero; the second is deferred, and starts from the same weights."""
    schedule = partial(LambdaLR, lr_lambda=only_second_step)
    model = partial(Tower, optimizer=partial(SGD, lr=0.1, weight_decay=0.01), schedule=schedule, dropout=0.0)
    before, ddp, ours = train_on(ranks, Recipe(model=model, steps=1), DDP) + train_on(
        ranks, Recipe(model=model, steps=2), DDP, Run(network="held")
    )
    for start, one, other in zip(before, ddp, ours, strict=True):
        assert one.losses == other.losses
        assert other.statistics is not None
        assert other.statistics.overlapped_steps == 1
        for name, expected in one.weights.items():
            assert (expected - start.weights[name]).norm() > 1e-4 * expected.norm()
            error = (expected - other.weights[name]).norm()
            assert error <= 1e-6 * expected.norm(), f"{name}: {error / expected.norm():g}"
