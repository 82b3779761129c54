"""``servers``: the weights of DDP, wherever gradients are added up."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from lightning.pytorch import Trainer
from torch.optim import Adam

from lightning_bytescheduler.collectives import launch_order
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, read_timeline
from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.servers import train_with_servers

PS = {**SIZES, "servers": 0}


@pytest.mark.slow
def test_one_server_that_is_slow_for_a_while_gives_ddps_bits(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)))
    (expected,) = train_on(two_ranks, recipe, DDP)
    run = Run(options={**PS, "servers": 1}, network="held")
    served = two_ranks.run(train_with_servers, recipe=recipe, run=run, servers=1, pause_at=3, pause_s=1.5)
    ours = [one.outcome for one in served]
    assert all(one is not None for one in ours)
    assert_same(expected, [one for one in ours if one is not None])
    assert_overlapped([one for one in ours if one is not None])


@pytest.mark.slow
def test_the_bits_do_not_depend_on_where_three_ranks_are_added_up(three_ranks: RankPool, tmp_path: Path) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)), steps=8)
    (colocated,) = train_on(three_ranks, recipe, Run(options=PS))
    for servers, placement in ((1, "mixed"), (3, "balanced")):
        path = tmp_path / f"{servers}.json"
        run = Run(options={**PS, "servers": {"spare": servers, "placement": placement}, "timeline": str(path)})
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
        trace, statistics = read_timeline(path), outcomes[0].statistics
        assert statistics is not None
        assert len(trace.select(COMMUNICATION)) == statistics.sub_tasks


def save_to(path: str, trainer: Trainer, model: object) -> None:
    trainer.save_checkpoint(path)


def train_without_broadcasts_of_decisions(rank: int, recipe: Recipe, run: Run) -> Outcome:
    """As :func:`train`; a broadcast of rank 0's decisions is an error."""
    refused = AssertionError("a follower would learn of each batch of parts a round trip after the one before")
    with patch.object(launch_order, "broadcast_from_first", side_effect=refused):
        return train(rank, recipe, run)


def test_each_rank_is_told_by_itself_what_travels_next(two_ranks: RankPool) -> None:
    """Broadcasts wait for a word of the receiver: over links with queues, followers would push 0.1 s after rank 0."""
    recipe = Recipe(model=Tower)
    (expected,) = train_on(two_ranks, recipe, DDP)
    run = Run(options=PS, network="plain")
    assert_same(expected, two_ranks.run(train_without_broadcasts_of_decisions, recipe=recipe, run=run))


def test_a_dead_server_is_named_on_all_ranks(two_ranks: RankPool) -> None:
    recipe, run = Recipe(model=Tower), Run(options={**PS, "servers": 1}, network="plain")
    for one in two_ranks.run(train_with_servers, recipe=recipe, run=run, servers=1, kill_at=5):
        assert one.outcome is None
        assert re.search(r"arameter server \d+ \(process", one.error)
        assert "shows no sign of life" in one.error


@pytest.mark.slow
def test_a_server_that_stands_still_for_too_long_is_named_on_all_ranks(two_ranks: RankPool) -> None:
    """One's time is up first, which breaks its connections to the others, who still wait."""
    recipe, run = Recipe(model=Tower), Run(options={**PS, "servers": 1}, network="plain")
    for one in two_ranks.run(train_with_servers, recipe=recipe, run=run, servers=1, pause_at=5, timeouts=(15.0, 120.0)):
        assert one.outcome is None
        assert re.search(r"arameter server \d+ \(process", one.error)
        assert "shows no sign of life" in one.error
        assert one.seconds < 100


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(model=Tower), id="plain"),
        pytest.param(Recipe(model=Tower, trainer={"gradient_clip_val": 0.01}), id="clipping"),
        pytest.param(Recipe(model=Tower, trainer={"accumulate_grad_batches": 2}), id="accumulation"),
    ],
)
def test_ranks_that_are_servers_besides_give_ddps_bits(two_ranks: RankPool, recipe: Recipe) -> None:
    expected, ours = train_on(two_ranks, recipe, DDP, Run(options=PS))
    assert_same(expected, ours)
