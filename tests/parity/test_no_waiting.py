"""No rank waits for another within a step: neither as a batch begins, nor in its forward pass, nor as its step ends.

What is needed of others is waited for where it is needed: gradients at gates, and that others have begun the batch
before gradients of it are handed over. Where a model has buffers, DDP waits for the first rank's in each forward pass.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

STEPS = 40
FROM = 16  # batches before have their own rules: sizes are agreed on, parameters found
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "monitored_barrier",
)


class Reaches(Tower):
    """Tells where it is."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, samples=2 * 4 * STEPS)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.reached(f"forward {batch_idx}")
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.reached(f"backward {self.batch}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx

    def on_train_batch_end(self, *_: Any) -> None:
        self.reached(f"end {self.batch}")

    def reached(self, place: str) -> None:
        """Replaced by what holds ranks up."""


def waits_for(rank: int, place: str) -> str | None:
    """What the other rank has to have reached before this one goes on from here."""
    name, number = place.split()[0], int(place.split()[1])
    if number < FROM or number >= STEPS - 2 or number % 2 != rank:
        return None
    if number % 4 < 2:
        return f"forward {number + 1}" if name == "end" else None
    return f"end {number}" if name == "backward" else None


@contextmanager
def held_up(
    module: LightningModule, folder: Path, *, patience: float = 60.0, also: Callable[[int], None] | None = None
) -> Iterator[None]:
    """One rank stays where it is until the other has come further, each in its turn.

    The other one would wait for ever where it needs a collective of the rank that stays; after ``patience`` seconds
    that goes on, and says so. Collectives that the training thread waits for are noted, too.

    Args:
        module: What is trained.
        folder: Where ranks say what they have reached.
        patience: In seconds.
        also: Called with each batch of these as it begins.
    """
    assert isinstance(module, Reaches)
    training = threading.get_ident()
    within = False

    def reached(place: str) -> None:
        nonlocal within
        rank = dist.get_rank()
        (folder / f"{rank} {place}").touch()
        within = FROM <= int(place.split()[1]) < STEPS - 2
        wanted = waits_for(rank, place)
        if wanted is not None:
            deadline = time.monotonic() + patience
            while not (folder / f"{1 - rank} {wanted}").exists():
                if time.monotonic() > deadline:
                    module.notes.append(f"rank {1 - rank} waits for rank {rank}, which is at {place}")
                    break
                time.sleep(0.002)
        if also is not None and within and place.startswith("end"):
            also(rank)

    def noted(name: str, collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if within and threading.get_ident() == training and not kwargs.get("async_op"):
                module.notes.append(f"{name}: {traceback.extract_stack()[-2]}")
            return collective(*args, **kwargs)

        return call

    module.reached = reached  # type: ignore[method-assign]
    with ExitStack() as stack:
        for name in COLLECTIVES:
            wrapped = noted(name, getattr(distributed_c10d, name))
            for place in (dist, distributed_c10d):
                stack.enter_context(patch.object(place, name, wrapped))
        yield


def test_no_rank_waits_for_another_within_a_step(two_ranks: RankPool, tmp_path: Path) -> None:
    recipe = Recipe(model=Reaches, steps=STEPS, trainer={"max_epochs": 1})
    run = Run(network="plain", sabotage=partial(held_up, folder=tmp_path))
    ddp, ours = train_on(two_ranks, recipe, DDP, run)
    assert_same(ddp, ours)
    assert_overlapped(ours)
    assert len(list(tmp_path.iterdir())) == 2 * 3 * STEPS


def barrier(rank: int) -> None:
    dist.broadcast(Tensor([rank]), src=0)


def test_waiting_would_be_noticed(two_ranks: RankPool, tmp_path: Path) -> None:
    """Waits of Lightning itself."""
    recipe = Recipe(model=Reaches, steps=FROM + 6, trainer={"max_epochs": 1})
    sabotage = partial(held_up, folder=tmp_path, patience=0.3, also=barrier)
    (ours,) = train_on(two_ranks, recipe, Run(network="plain", sabotage=sabotage))
    notes = [note for outcome in ours for note in outcome.notes]
    assert any("waits for rank" in note for note in notes), notes
    assert any(note.startswith("broadcast") for note in notes), notes


class Normalised(Reaches):
    """Has statistics of batches, which each forward pass changes and the next one wants of the first rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(self.norm(inputs))


class FailsApart(Callback):
    """Rank 1 as it begins a batch, and rank 0 at the end of the one before, later."""

    def __init__(self, folder: Path) -> None:
        self.failed = folder / "failed"

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == STEPS + 6:
            self.failed.touch()
            raise ValueError("boom")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == STEPS + 6:
            deadline = time.monotonic() + 60
            while not self.failed.exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            raise ValueError("boom")


def fail_and_speak(trainer: Trainer, module: Any, folder: Path) -> None:
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit_loop.max_epochs = 2
    trainer.callbacks.append(FailsApart(folder))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(module)
    module.notes.append(trainer.strategy.broadcast(trainer.global_rank))


@pytest.mark.slow
def test_what_one_rank_expects_of_a_batch_meets_nothing_else(two_ranks: RankPool, tmp_path: Path) -> None:
    """It has begun a batch that the first rank never will: then they exchange messages, after the fit."""
    recipe = Recipe(
        model=Normalised, steps=STEPS, trainer={"max_epochs": 1}, after=partial(fail_and_speak, folder=tmp_path)
    )
    (ours,) = train_on(two_ranks, recipe, Run(network="plain"))
    assert [one.notes for one in ours] == [[0], [0]]
