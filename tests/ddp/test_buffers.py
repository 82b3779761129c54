"""Buffers are DDP's, whichever rank changes them and when."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.fit import Recipe, Run
from tests.support.models import Trained
from tests.support.rank_pool import RankPool


class Buffered(Trained):
    """Buffers of several kinds: statistics of batches, a counter, a queue that the output depends on, no elements.

    Args:
        recomputed: Run a layer once more in the backward pass.
        replaced: Put another tensor in the queue's place in each forward pass.
        arguments: See :class:`Trained`.
    """

    queue: Tensor
    seen: Tensor

    def __init__(self, *, recomputed: bool = False, replaced: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.recomputed = recomputed
        self.replaced = replaced
        self.first = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.last = nn.Linear(16, 3)
        self.register_buffer("queue", torch.zeros(5, 3))
        self.register_buffer("seen", torch.zeros(7, dtype=torch.bool))
        self.register_buffer("nothing", torch.empty(0, 4))

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.first, inputs, use_reentrant=False) if self.recomputed else self.first(inputs)
        outputs: Tensor = self.last(hidden) + 0.1 * self.queue.mean(0)
        if self.training:
            newest = torch.cat([outputs.detach()[:1], self.queue[:-1]])
            if self.replaced:
                self.queue = newest
            else:
                self.queue.copy_(newest)
            self.seen[inputs.shape[0] % 7] = True
        return outputs


class Changes(Callback):
    """Changes a buffer between two batches, as a rank of its own would.

    Args:
        after: Batches, from which on every other one is followed by a change.
        ranks: Those that change it.
    """

    def __init__(self, *, after: int, ranks: tuple[int, ...]) -> None:
        self.after = after
        self.ranks = ranks

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step >= self.after and trainer.global_step % 2 and trainer.global_rank in self.ranks:
            assert isinstance(pl_module, Buffered)
            pl_module.queue.mul_(-0.5).add_(trainer.global_rank)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=partial(Buffered, recomputed=True), trainer={"accumulate_grad_batches": 2}),
        Recipe(model=partial(Buffered, replaced=True), trainer={"val_check_interval": 3}),
        Recipe(model=Buffered, steps=6, ddp={"broadcast_buffers": False}),
        Recipe(model=Buffered, steps=6, callbacks=(partial(Changes, after=2, ranks=(0,)),)),
    ],
)
def test_buffers_are_ddps(two_ranks: RankPool, recipe: Recipe) -> None:
    ddp, ours = train_on(two_ranks, recipe, DDP, Run())
    assert_same(ddp, ours)
    assert_overlapped(ours, 0.5)
