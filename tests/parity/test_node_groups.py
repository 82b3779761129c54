"""The group ``"node"``: the ranks of a node add up gradients before one pushes; the mean is of all ranks, as DDP's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import Adam

from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.parity.reference import SumsOfNodes
from tests.parity.weighted_fits import Case, fitted_all
from tests.support.fit import SIZES, Outcome, Recipe, Run, differences
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.servers import on_nodes, train_with_servers

GROUPED = {**SIZES, "servers": {"group": "node"}}
REFERENCE = partial(SumsOfNodes, nodes=((0, 1), (2, 3)), gradient_as_bucket_view=True)


def trained(pool: RankPool, recipe: Recipe, run: Run, *, servers: int = 0) -> list[Outcome]:
    """On two nodes of two ranks each."""
    served = pool.run(train_with_servers, recipe=recipe, run=run, servers=servers, nodes=2)
    outcomes = [one.outcome for one in served if one.outcome is not None]
    assert len(outcomes) == 4
    return outcomes


@pytest.mark.slow
def test_the_bits_are_those_of_sums_of_nodes_wherever_they_are_added_up(four_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)), steps=8)
    expected = trained(four_ranks, recipe, Run(strategy=REFERENCE))
    for servers in (2, 1):
        wanted = {"spare": servers, "group": "node"}
        ours = trained(four_ranks, recipe, Run(options={**SIZES, "servers": wanted}, network="held"), servers=servers)
        assert_same(expected, ours)
        assert_overlapped(ours, share=0.85)
        plan = ours[0].plan
        assert plan is not None
        assert plan.placement is not None
        assert plan.placement.nodes == ((0, 1), (2, 3))
        assert "ranks 0, 1; 2, 3" in repr(plan)
    ungrouped = trained(four_ranks, recipe, Run(options={**SIZES, "servers": 0}))
    assert differences(expected[0], ungrouped[0]), "the reference does not see the order of sums"


class Normed(Tower):
    """Has buffers, which are the first rank's."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.norm = nn.BatchNorm1d(24)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(self.first(inputs)))


def losses_scaled() -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(model=Tower, steps=8, trainer={"gradient_clip_val": 0.01}), id="clipping"),
        pytest.param(
            Recipe(model=Normed, steps=8, trainer={"accumulate_grad_batches": 2}, ddp={"find_unused_parameters": True}),
            id="accumulation and buffers",
            marks=pytest.mark.slow,
        ),
        pytest.param(Recipe(model=Tower, steps=8, plugins=(losses_scaled,)), id="fp16"),
    ],
)
def test_ranks_of_one_node_have_ddps_bits(two_ranks: RankPool, recipe: Recipe) -> None:
    expected, ours = train_on(two_ranks, recipe, DDP, Run(options=GROUPED))
    assert_same(expected, ours)


UNEQUAL = Case(
    sizes=[(1, 9, 2, 2), (7, 2, 0, 0), (64, 1, 3, 1), (0, 4, 2, 1)],
    optimizer="AdamW",
    clip=(0.05, "norm"),
    accumulate=2,
    options=GROUPED,
    trainer={"num_nodes": 2},
)


def fitted_on_nodes(rank: int, cases: list[Case]) -> list[tuple[Outcome, dict[str, Tensor]]]:
    with on_nodes(rank, 2):
        return fitted_all(rank, cases)


def test_ranks_may_count_by_their_samples(four_ranks: RankPool) -> None:
    """One rank has none in its first batch. Also with steps as DDP's."""
    cases = [UNEQUAL, replace(UNEQUAL, options={**GROUPED, "mode": "ddp"})]
    by_rank = four_ranks.run(fitted_on_nodes, cases=cases)
    for index in range(len(cases)):
        for outcome, expected in (found[index] for found in by_rank):
            for name, value in expected.items():
                assert (outcome.weights[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.slow
def test_a_dead_server_is_named_on_ranks_that_do_not_push_to_it_too(four_ranks: RankPool) -> None:
    run = Run(options={**SIZES, "servers": {"spare": 1, "group": "node"}}, network="plain")
    for one in four_ranks.run(train_with_servers, recipe=Recipe(model=Tower), run=run, servers=1, kill_at=5, nodes=2):
        assert one.outcome is None
        assert re.search(r"arameter server \d+ \(process", one.error)
        assert "shows no sign of life" in one.error
