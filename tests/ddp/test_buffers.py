"""Buffers that travel under the backward pass are DDP's, whoever changes them, and nobody waits for them."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.parity.checks import DDP, assert_same, train_on
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
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


class ReplacedByOne(Buffered):
    """One rank alone puts another tensor in a buffer's place, within a late forward pass."""

    def predict(self, inputs: Tensor) -> Tensor:
        outputs = super().predict(inputs)
        if self.training and self.trainer.global_rank == 0 and self.trainer.global_step >= 12:
            self.queue = self.queue + 1.0
        return outputs


class Changes(Callback):
    """Changes a buffer between two batches, as a rank of its own would.

    Args:
        after: Batches, from which on every other one is followed by a change.
        ranks: Those that change it.
        unseen: Where no version counter sees it.
    """

    def __init__(self, *, after: int, ranks: tuple[int, ...], unseen: bool = False) -> None:
        self.after = after
        self.ranks = ranks
        self.unseen = unseen

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step >= self.after and trainer.global_step % 2 and trainer.global_rank in self.ranks:
            assert isinstance(pl_module, Buffered)
            queue = pl_module.queue.data if self.unseen else pl_module.queue
            queue.mul_(-0.5).add_(trainer.global_rank)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=partial(Buffered, recomputed=True), trainer={"accumulate_grad_batches": 2}),
        Recipe(model=partial(Buffered, replaced=True), trainer={"val_check_interval": 3}),
        pytest.param(Recipe(model=ReplacedByOne, steps=16), marks=pytest.mark.slow),
        Recipe(model=Buffered, steps=6, ddp={"broadcast_buffers": False}),
        pytest.param(
            Recipe(model=Buffered, steps=16, callbacks=(partial(Changes, after=12, ranks=(0, 1)),)),
            marks=pytest.mark.slow,
        ),
        Recipe(model=Buffered, steps=16, callbacks=(partial(Changes, after=12, ranks=(0, 1), unseen=True),)),
        Recipe(model=Buffered, steps=6, callbacks=(partial(Changes, after=2, ranks=(0,)),)),
        pytest.param(
            Recipe(model=Buffered, steps=16, callbacks=(partial(Changes, after=12, ranks=(1,)),)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_buffers_are_ddps(two_ranks: RankPool, recipe: Recipe) -> None:
    ddp, ours = train_on(two_ranks, recipe, DDP, Run())
    assert_same(ddp, ours)


def test_buffers_of_steps_as_ddps_are_too(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Buffered, steps=6, callbacks=(partial(Changes, after=2, ranks=(0, 1)),))
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(options={**SIZES, "mode": "ddp"}))
    assert_same(ddp, ours)


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train_and_listen(rank: int, recipe: Recipe) -> tuple[Outcome, list[str]]:
    logger, warned = logging.getLogger("lightning_bytescheduler.ddp.buffers"), Warned()
    logger.addHandler(warned)
    try:
        return train(rank, recipe, Run()), warned.said
    finally:
        logger.removeHandler(warned)


def test_a_change_of_the_first_rank_alone_late_in_a_fit_is_said_once(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Buffered, steps=20, callbacks=(partial(Changes, after=12, ranks=(0,)),))
    (first, said_by_first), (_, said_by_second) = two_ranks.run(train_and_listen, recipe=recipe)
    assert first.error is None
    assert not said_by_first
    assert len(said_by_second) == 1
    assert said_by_second[0].startswith("[rank 1] The first rank's buffers changed between two forward passes")


class Counted(Callback):
    """Counts DDP's broadcasts in the middle of a fit."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.thread = threading.get_ident()
        self.counts = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.counts = 10 <= trainer.global_step < 19

    def see(self, name: str) -> None:
        if self.counts and threading.get_ident() == self.thread:
            self.calls.append(name)


def train_and_count(rank: int, strategy: str) -> list[str]:
    """DDP's broadcasts of buffers in nine steps of a fit, and what was waited for in them on this rank."""
    calls: list[str] = []
    counted = Counted(calls)
    plain = DistributedDataParallel._distributed_broadcast_coalesced

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        counted.see("broadcast")
        return plain(*args, **kwargs)

    with patch.object(DistributedDataParallel, "_distributed_broadcast_coalesced", broadcast):
        run = Run(strategy=strategy, options={**SIZES, "tuning": False}, network="plain")
        train(rank, Recipe(model=Buffered, steps=20, callbacks=(lambda: counted,)), run)
    return calls


def test_no_forward_pass_begins_with_a_broadcast(two_ranks: RankPool) -> None:
    assert two_ranks.run(train_and_count, strategy="bytescheduler") == [[], []]
    assert [len(calls) for calls in two_ranks.run(train_and_count, strategy="ddp")] == [9, 9]
