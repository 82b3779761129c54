"""Loops of Fabric: the weights, the optimizers and what the loop sees are DDP's, and steps overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.optim import SGD, AdamW

from tests.support.fabric_loops import compare, data, tower
from tests.support.rank_pool import RankPool

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
sgd: Optimizers = partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
adamw: Optimizers = partial(AdamW, lr=0.005)


def plain(fabric: Fabric, *, optimizer: Optimizers, zero_first: bool) -> Mapping[str, Any]:
    """The loop of the textbook, with gradients dropped before the forward pass, or after the step."""
    model = tower()
    wrapped, stepped = fabric.setup(model, optimizer(model.parameters()))
    losses = []
    for inputs, targets in data(fabric):
        if zero_first:
            stepped.zero_grad()
        loss = F.mse_loss(wrapped(inputs), targets)
        fabric.backward(loss)
        stepped.step()
        if not zero_first:
            stepped.zero_grad()
        losses.append(loss.detach())
    return {"model": wrapped, "optimizer": stepped, "losses": losses}


PLAIN = {
    "sgd, zero_grad first": partial(plain, optimizer=sgd, zero_first=True),
    "sgd, zero_grad last": partial(plain, optimizer=sgd, zero_first=False),
    "adamw": partial(plain, optimizer=adamw, zero_first=False),
}


def test_every_step_but_the_first_overlaps(two_ranks: RankPool) -> None:
    """No gradient leaves before the next forward pass has begun: whoever waits for one earlier waits in vain."""
    for outcome in two_ranks.run(compare, loops=PLAIN, network="held"):
        for name, seen in outcome.items():
            assert not seen.differences, name
            assert not seen.forced, name
            assert seen.statistics[0].overlapped_steps == seen.statistics[0].steps - 1 == 11, name
