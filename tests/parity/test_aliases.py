"""Code that keeps an alias of a weight's memory, made at any time, reads what DDP would show there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import AdamW

from tests.parity.checks import assert_overlapped, assert_same_as_ddp
from tests.parity.observers import sums
from tests.parity.sabotage import blind_to_aliases
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

model = partial(Tower, optimizer=partial(AdamW, lr=0.005))
STEPS = 12


def data(module: Any) -> list[Tensor]:
    return [parameter.data for parameter in module.parameters()]


def detached(module: Any) -> list[Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


def state_dict(module: Any) -> list[Tensor]:
    return list(module.state_dict().values())


def arrays(module: Any) -> list[Any]:
    return [parameter.detach().numpy() for parameter in module.parameters()]


def flat_views(module: Any) -> list[Tensor]:
    return [parameter.detach().view(-1)[1:] for parameter in module.layers.parameters()]


def one_of_a_layer(module: Any) -> list[Tensor]:
    return [module.get_parameter("layers.1.weight").data]


class KeepsAliases(Callback):
    """Takes hold of the weights once, and looks at what it holds whenever it is called."""

    def __init__(self, take: Any, *, since: str) -> None:
        self.take = take
        self.since = since
        self.kept: list[Any] = []

    def look(self, module: Any) -> None:
        module.notes.append(sums(map(torch.as_tensor, self.kept)))

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        if self.since == "before":
            self.kept = self.take(module)

    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.look(module)

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        if self.since == "backward" and trainer.global_step == 6:
            self.kept = self.take(module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.look(module)
        if self.since == "batch end" and trainer.global_step == 6:
            self.kept = self.take(module)


class KeepsForAWhile(KeepsAliases):
    """Lets go of them again."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, module)
        if trainer.global_step == 10:
            self.kept = []


class KeepsInForward(Tower):
    """Takes hold of a weight in the middle of a forward pass, and looks at it from outside."""

    def predict(self, inputs: Tensor) -> Tensor:
        if self.trainer.global_step == 6:
            self.kept = {"in a dictionary, where nothing looks": self.get_parameter("layers.1.weight").detach()}
        return super().predict(inputs)

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append(sums(getattr(self, "kept", {}).values()))


class WritesThroughAlias(KeepsAliases):
    """Clips weights through what it holds."""

    def look(self, module: Any) -> None:
        for kept in self.kept:
            kept.clamp_(-0.2, 0.2)


@pytest.mark.parametrize(
    ("take", "since"),
    [
        pytest.param(data, "before", marks=pytest.mark.slow),
        (detached, "backward"),
        pytest.param(state_dict, "batch end", marks=pytest.mark.slow),
        pytest.param(arrays, "before", marks=pytest.mark.slow),
        (flat_views, "batch end"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_alias_of_a_callback(two_ranks: RankPool, take: Any, since: str) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(partial(KeepsAliases, take, since=since),))
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_aliases)


def test_alias_made_in_the_forward_pass(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(KeepsInForward, optimizer=partial(AdamW, lr=0.005)), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_aliases)


def test_write_through_an_alias(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(partial(WritesThroughAlias, data, since="before"),))
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_aliases)


def test_the_other_weights_keep_their_overlap(two_ranks: RankPool) -> None:
    keeps_one = partial(KeepsAliases, one_of_a_layer, since="before")
    recipe = Recipe(model=model, steps=STEPS, callbacks=(keeps_one,))
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_aliases)
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_share > 0.6


@pytest.mark.slow
def test_overlap_comes_back_with_the_end_of_the_alias(two_ranks: RankPool) -> None:
    """Of 60 steps, the first is synchronised and four are of a time when everything was held."""
    keeps = partial(KeepsForAWhile, data, since="batch end")
    recipe = Recipe(model=model, steps=60, callbacks=(keeps,))
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_aliases)
    assert_overlapped(ours, share=0.9)
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_share < 0.95
