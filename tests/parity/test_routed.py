"""One order for gradients and for all collectives of DDP's group, as on NCCL, over gloo: the training stays DDP's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.collectives.routing_group import RoutingGroup
from tests.parity.checks import DDP, assert_same, train_on
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import MeanOfAll, Tower, sgd
from tests.support.rank_pool import RankPool

STEPS = 8


class Talkative(Tower):
    """Calls every collective on DDP's group."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(depth=3, dropout=0.0, optimizer=sgd, **arguments)
        self.norms = nn.ModuleList(nn.BatchNorm1d(24) for _ in range(2))

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.norms[0](self.first(inputs))
        for layer in self.layers:
            hidden = hidden + torch.tanh(MeanOfAll.apply(layer(hidden)))
        return self.last(self.norms[1](hidden))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        total = torch.ones(3) * (1 + self.global_rank)
        under_way = dist.all_reduce(total, async_op=True)
        if self.global_rank == 1:  # each rank may wait elsewhere
            under_way.wait()
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.notes.append(self.all_gather(loss.detach()).tolist())
        words = [None] * dist.get_world_size()
        dist.all_gather_object(words, f"rank {self.global_rank} in {batch_idx}")
        out = torch.empty(2 * dist.get_world_size())
        dist.all_gather_into_tensor(out, torch.full((2,), float(self.global_rank)))
        scattered = torch.empty(2)
        dist.scatter(scattered, list(out.view(-1, 2).clone()) if self.global_rank == 0 else None, src=0)
        dist.barrier()
        under_way.wait()
        self.notes.append((words, out.tolist(), scattered.tolist(), total.tolist()))
        return loss


class ReadsAlone(Callback):
    """One rank alone waits for all gradients after its batch, while the others go on to the next one's collectives."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1:
            pl_module.notes.append(sum(p.detach().double().sum().item() for p in pl_module.parameters()))


class SeesTheGroup(Callback):
    """The group stands in from the start of the fit to its end, and orders where gradients travel on their own."""

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if isinstance(trainer.strategy, ByteSchedulerStrategy):
            assert isinstance(dist.group.WORLD, RoutingGroup)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        group = dist.group.WORLD
        if batch_idx > 2 and isinstance(trainer.strategy, ByteSchedulerStrategy):
            assert isinstance(group, RoutingGroup)
            assert group.in_order == self.in_order
            assert dist.get_backend() == "gloo"

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        assert isinstance(trainer.strategy, ByteSchedulerStrategy) or not isinstance(dist.group.WORLD, RoutingGroup)


def _closes(trainer: Trainer, model: Any) -> None:
    assert not isinstance(dist.group.WORLD, RoutingGroup)
    dist.barrier()


@pytest.mark.parametrize(
    ("mode", "trainer"),
    [
        pytest.param("overlapped", {}, marks=pytest.mark.slow),
        pytest.param(
            "overlapped", {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, marks=pytest.mark.slow
        ),
        ("overlapped", {"accumulate_grad_batches": 2}),
        ("ddp", {}),
        pytest.param("auto", {}, marks=pytest.mark.slow),
    ],
)
def test_all_of_it_is_ddps(two_ranks: RankPool, mode: str, trainer: dict[str, Any]) -> None:
    in_order = mode == "overlapped"
    recipe = Recipe(
        model=Talkative,
        steps=STEPS,
        trainer={"limit_val_batches": 2, "val_check_interval": 5, **trainer},
        callbacks=(ReadsAlone, partial(SeesTheGroup, in_order)),
        after=_closes,
    )
    routed = Run(options={**SIZES, "mode": mode}, routed=True, network="plain" if mode != "overlapped" else "late")
    expected, actual = train_on(two_ranks, recipe, DDP, routed)
    assert_same(expected, actual)
    if in_order:
        assert all(o.statistics is not None and o.statistics.deferred_updates for o in actual)


@pytest.mark.slow
def test_three_ranks_end_with_the_same_weights(three_ranks: RankPool) -> None:
    recipe = Recipe(model=Talkative, steps=STEPS, callbacks=(ReadsAlone,), after=_closes)
    plain, routed = train_on(three_ranks, recipe, Run(), Run(routed=True))
    for rank, (one, other) in enumerate(zip(plain, routed, strict=True)):
        for name, value in one.weights.items():
            assert torch.allclose(value, other.weights[name], rtol=1e-4, atol=1e-5), (rank, name)
        assert all(torch.equal(other.weights[n], routed[0].weights[n]) for n in other.weights if "norms" not in n)


class Fails(Talkative):
    """Rank 1 does not call what rank 0 waits for."""

    expected_error = True

    def __init__(self, how: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.how = how

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if batch_idx == 4:
            value = torch.ones(2)
            if self.global_rank == 0:
                dist.all_reduce(value)
            elif self.how == "raises":
                raise RuntimeError("there is no more")
            else:
                dist.broadcast(value, src=0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("how", "why"), [("raises", "there is no more"), ("differs", "rank 0 launches another one")])
def test_the_rank_that_failed_is_named_where_its_collective_is_waited_for(how: str, why: str) -> None:
    recipe = Recipe(model=partial(Fails, how), steps=STEPS)
    with RankPool(2) as pool:
        ((first, second),) = train_on(pool, recipe, Run(routed=True, network="plain"))
    assert first.error is not None
    assert "Rank 1 failed" in first.error
    assert why in first.error
    assert second.error is not None
    assert why in second.error
