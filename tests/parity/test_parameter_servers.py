"""``architecture="ps"``: the weights of DDP, wherever gradients are added up."""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import Adam

from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.servers import train_with_servers

PS = {**SIZES, "architecture": "ps"}


def test_one_server_gives_ddps_bits(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)))
    (expected,) = train_on(two_ranks, recipe, DDP)
    run = Run(options={**PS, "servers": 1}, network="held")
    served = two_ranks.run(train_with_servers, recipe=recipe, run=run, servers=1)
    ours = [one.outcome for one in served]
    assert all(one is not None for one in ours)
    assert_same(expected, [one for one in ours if one is not None])
    assert_overlapped([one for one in ours if one is not None])


def test_the_bits_do_not_depend_on_where_three_ranks_are_added_up(three_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)), steps=8)
    (colocated,) = train_on(three_ranks, recipe, Run(options=PS))
    for servers, placement in ((1, "djb2"), (3, "balanced")):
        run = Run(options={**PS, "servers": servers, "placement": placement})
        served = three_ranks.run(train_with_servers, recipe=recipe, run=run, servers=servers)
        outcomes = [one.outcome for one in served if one.outcome is not None]
        assert_same(colocated, outcomes)
        tables = [outcome.plan.placement for outcome in outcomes if outcome.plan is not None]
        assert len(tables) == 3
        assert len({table.bytes_per_server for table in tables if table is not None}) == 1, "ranks placed differently"
        assert tables[0] is not None
        assert tables[0].how == placement
        assert tables[0].spare_servers == servers
        assert all(tables[0].bytes_per_server[:servers])
        assert f"spare server {servers - 1}" in repr(outcomes[0].plan)


def test_a_dead_server_is_named_on_all_ranks(two_ranks: RankPool) -> None:
    recipe, run = Recipe(model=Tower), Run(options={**PS, "servers": 1}, network="plain")
    for one in two_ranks.run(train_with_servers, recipe=recipe, run=run, servers=1, kill_at=5):
        assert one.outcome is None
        assert "arameter server 0 (process" in one.error
        assert "has ended" in one.error


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(model=Tower), id="plain"),
        pytest.param(Recipe(model=Tower, trainer={"gradient_clip_val": 0.01}), id="clipping"),
        pytest.param(Recipe(model=Tower, trainer={"accumulate_grad_batches": 2}), id="accumulation"),
    ],
)
def test_ranks_that_are_servers_besides_give_ddps_bits(two_ranks: RankPool, recipe: Recipe) -> None:
    expected, ours = train_on(two_ranks, recipe, DDP, Run(options=PS, network="held"))
    assert_same(expected, ours)
