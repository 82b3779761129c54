"""The group ``"node"``, compressed: a node's sum is formed as it is, and travels encoded; nothing of it is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

from lightning_bytescheduler.ddp.parameter_servers import ServerOptions
from lightning_bytescheduler.timeline.timeline import LOCAL_BROADCAST, LOCAL_REDUCE, PUSH
from lightning_bytescheduler.timeline.trace import read_timeline
from tests.parity.checks import DDP, assert_overlapped
from tests.parity.test_checkpoints import SaveAt
from tests.parity.test_compression import Overflows, max_difference, same_weights, scale_of, scaled
from tests.support.fit import SIZES, Outcome, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.servers import train_with_servers

PS = {**SIZES, "servers": 0, "compression": "int8", "compression_min_size": 40}
GROUPED = {**PS, "servers": {"group": "node"}}
RATE = 2.0**-7


def trained(pool: RankPool, recipe: Recipe, options: Mapping[str, Any], nodes: int) -> list[Outcome]:
    """With as many servers as the options say."""
    run = Run(options=options, network="held")
    servers = ServerOptions.resolve(options["servers"]).spare or 0
    served = pool.run(train_with_servers, recipe=recipe, run=run, servers=servers, nodes=nodes)
    return [one.outcome for one in served if one.outcome is not None]


class Arranged(Tower):
    """Each step has the same four batches: of four ranks one each, or of two ranks two each, one after the other."""

    def train_dataloader(self) -> Any:
        data = self._data(4 * 4 * 10, seed=1)
        each = 4 // self.trainer.world_size
        first = each * self.trainer.global_rank
        numbers = [4 * step + first + one for step in range(10) for one in range(each)]
        return DataLoader([list(data[4 * number : 4 * number + 4]) for number in numbers], batch_size=None)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_a_node_counts_as_one_rank_that_has_the_nodes_sum(
    two_ranks: RankPool, four_ranks: RankPool, servers: int
) -> None:
    """To the last bit: two ranks add up two batches each before they compress.

    Parts are cut alike in all steps, as DDP does not arrange its buckets anew here: what is left of a part that another
    rank pushes from then on would be added before the node's sum is formed.
    """
    recipe = Recipe(
        model=partial(Arranged, dropout=0.0, optimizer=partial(Adam, lr=0.005)),
        steps=8,
        trainer={"use_distributed_sampler": False},
        ddp={"find_unused_parameters": True},
    )
    codecs = {"*.bias": None, "first.*": "topk:0.1", "*": "int8"}
    options = {**PS, "servers": servers, "compression": codecs, "compression_min_size": 1}
    one_each = replace(recipe, trainer={**recipe.trainer, "accumulate_grad_batches": 2})
    expected = trained(two_ranks, one_each, options, nodes=1)
    ours = trained(four_ranks, recipe, {**options, "servers": {"spare": servers, "group": "node"}}, nodes=2)
    assert_overlapped(ours, share=0.85)
    assert len(ours) == 4
    for outcome in ours:
        assert same_weights(expected[0], outcome)
    assert max_difference(expected[0], trained(four_ranks, recipe, options, nodes=2)[0]) > 0


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param({"gradient_clip_val": 0.05}, id="clipping"),
        pytest.param({"accumulate_grad_batches": 2}, id="accumulation"),
    ],
)
def test_steps_have_the_same_bits_however_they_are_taken(four_ranks: RankPool, trainer: dict[str, Any]) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=partial(Adam, lr=0.005)), steps=6, trainer=trainer)
    ours = trained(four_ranks, recipe, GROUPED, nodes=2)
    as_ddp = trained(four_ranks, recipe, {**GROUPED, "mode": "ddp"}, nodes=2)
    exact = trained(four_ranks, recipe, {**GROUPED, "compression_min_size": 1_000_000}, nodes=2)
    assert len(ours) == 4
    for one, other in zip(ours, as_ddp, strict=True):
        assert same_weights(ours[0], one)
        assert same_weights(ours[0], other)
        assert 0 < max_difference(exact[0], one) < 0.02


def test_an_overflow_on_any_rank_of_a_node_is_seen(four_ranks: RankPool) -> None:
    """And by a server, which keeps what is left for all ranks that push to it."""
    recipe = Recipe(model=Overflows, steps=12, plugins=(scaled,), after=scale_of)
    ddp = [one.outcome for one in four_ranks.run(train_with_servers, recipe=recipe, run=DDP, servers=0, nodes=2)]
    ours = trained(four_ranks, recipe, {**GROUPED, "servers": {"spare": 1, "group": "node"}}, nodes=2)
    assert len(ours) == 4
    for one, reference in zip(ours, ddp, strict=True):
        assert reference is not None
        assert one.notes == reference.notes, "another loss scale"
        assert same_weights(ours[0], one)
        for name, weight in one.weights.items():
            assert torch.allclose(weight, reference.weights[name], atol=0.05), name


class Sloped(Tower):
    """Has tensors whose gradients are the same whatever the weights are: of all, in some steps, on one rank alone."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.always, self.rarely, self.once = [nn.Parameter(torch.zeros(60, 40)) for _ in range(3)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank, step = self.trainer.global_rank, len(self.losses)
        slope = torch.randn(60, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        loss: Any = super().training_step(batch, batch_idx)
        used = {"always": self.always}
        if step % 3 == 0:
            used["rarely"] = self.rarely
        if rank == 1:
            used["once"] = self.once
        self.notes.append((used.keys() & {"always", "rarely", "once"}, slope))
        return loss + sum((parameter * slope).sum() for parameter in used.values())


def save_to(path: str, trainer: Trainer, model: Any) -> None:
    trainer.save_checkpoint(path)


def gradients_of(outcomes: list[Outcome], name: str) -> Tensor:
    """Of the five steps before a checkpoint."""
    slopes = [slope for outcome in outcomes for used, slope in outcome.notes[:5] if name in used]
    return torch.stack(slopes).double().sum(0) / len(outcomes)


def test_what_is_sent_and_what_is_left_are_the_gradients(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    """Also where a fit goes on with other parts, which other ranks push, and on another number of nodes and ranks.

    Of what is left, those who have it tell at a checkpoint; after a fit, the ranks have all of it.
    """
    options = {**GROUPED, "compression": {"*": "topk:0.05"}, "servers": {"spare": 1, "group": "node"}}
    whole = {"always": torch.zeros(60, 40).double()}
    whole = {name: whole["always"].clone() for name in ("always", "rarely", "once")}
    before = None
    fits = [
        (four_ranks, 2, options),
        (four_ranks, 2, {**options, "partition_size": 300}),
        (four_ranks, 1, {**options, "servers": {"group": "node"}}),
        (two_ranks, 1, {**options, "servers": 1}),
        (four_ranks, 2, options),
    ]
    for number, (pool, nodes, how) in enumerate(fits):
        (tmp_path / str(number)).mkdir()
        path, within = str(tmp_path / str(number) / "ByteSchedulerStrategy.ckpt"), number % 2 == 0
        recipe = Recipe(
            model=partial(Sloped, optimizer=partial(SGD, lr=RATE)),
            steps=5 * (number + 1) + within,
            ddp={"find_unused_parameters": True},
            resume=before,
            callbacks=(partial(SaveAt, 5 * (number + 1), Path(path).parent),) if within else (),
            after=None if within else partial(save_to, path),
        )
        outcomes = trained(pool, recipe, how, nodes)
        checkpoint = torch.load(path, weights_only=True)
        state = checkpoint["lightning_bytescheduler.compression"]
        assert all(same_weights(outcomes[0], one) for one in outcomes), "ranks drift apart"
        for name, gradients in whole.items():
            gradients += gradients_of(outcomes, name)
            weights, left = checkpoint["state_dict"][name], state["residuals"][name].view(60, 40)
            assert float(left.abs().max()) > 0
            sent = -weights.double() / RATE
            torch.testing.assert_close(sent + left, gradients, rtol=1e-4, atol=1e-4, msg=f"{name}, fit {number}")
            assert float(left.norm()) < 0.95 * float(gradients.norm()), "nothing of what was left is sent later"
        before = path


def test_a_training_goes_on_from_its_checkpoint(four_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    model = partial(Tower, optimizer=partial(Adam, lr=0.005))
    trained(four_ranks, Recipe(model=model, steps=6, after=partial(save_to, str(path))), GROUPED, nodes=2)
    checkpoint = torch.load(path, weights_only=True)
    for tensor in checkpoint["lightning_bytescheduler.compression"]["residuals"].values():
        assert tensor.abs().max() > 0
        tensor.mul_(1e3)
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    found = [
        trained(four_ranks, Recipe(model=model, steps=12, resume=str(one)), how, nodes=2)
        for one, how in (
            (path, GROUPED),
            (path, {**SIZES, "servers": 0}),
            (tmp_path / "changed.ckpt", GROUPED),
        )
    ]
    ours, exact, changed = found
    assert all(same_weights(ours[0], one) for one in ours)
    off, far = (max_difference(exact[0], one[0]) for one in (ours, changed))
    assert off < 0.01 < far, "what was left to be sent was not sent"


def test_a_timeline_tells_what_is_encoded_from_what_is_not(four_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    servers = {"spare": 2, "group": "node"}
    options = {**GROUPED, "servers": servers, "timeline": str(path), "compression_min_size": 1}
    outcomes = trained(four_ranks, Recipe(model=Tower, steps=6), options, nodes=2)
    traces = [read_timeline(path), read_timeline(path.with_name("one.rank1.json"))]
    pushed = [{(s.name, s.args["step"], s.args["partition"]) for s in trace.select(PUSH)} for trace in traces]
    assert not pushed[0] & pushed[1]
    by_step = [{part[::2] for part in own} for own in pushed]
    assert not by_step[0] & by_step[1], "a part is pushed by another rank in another step"
    sizes = []
    for trace, outcome in zip(traces, outcomes, strict=False):
        statistics = outcome.statistics
        assert statistics is not None
        assert sum(float(span.args["bytes"]) for span in trace.select(PUSH)) == statistics.bytes_sent
        reduced, shared = trace.select(LOCAL_REDUCE), trace.select(LOCAL_BROADCAST)
        assert len(reduced) == len(shared) == sum(map(len, pushed))
        sizes.append([sum(float(span.args["bytes"]) for span in stage) for stage in (reduced, shared)])
    assert sizes[0] == sizes[1], "two ranks: what one has sent, the other has got"
    assert 3 < sizes[0][0] / sizes[0][1] < 4.2, "in fp32 there, in int8 back"
