"""A SIGTERM for one rank ends all with the same weights, whenever it comes and however unequal the ranks are."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bytescheduler.ddp import sigterm
from lightning_bytescheduler.exceptions import RankFailedError
from tests.support import fit
from tests.support.fit import Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.waiting import until


class Signals(Callback):
    """Has one rank signal itself after a batch, while another one takes its time in the next ones.

    Args:
        rank: The rank that gets the signal.
        batch: The batch after which it comes.
        slow: The slow rank, if any.
    """

    def __init__(self, *, rank: int, batch: int, slow: int = -1) -> None:
        self.rank = rank
        self.batch = batch
        self.slow = slow

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if trainer.global_rank == self.slow and trainer.global_step > self.batch:
            time.sleep(0.5)  # longer than a rank that ends waits here for what is under way

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


class Terminated(Tower):
    """Says what it ended with."""

    expected_error = True


def end(rank: int, arguments: dict[str, Any]) -> Outcome:
    recipe = Recipe(model=Terminated, steps=6, callbacks=(partial(Signals, **arguments),))
    with patch.object(fit, "_LANDING_S", 0.1), patch.object(sigterm, "_BEGUN_S", 0.1):
        return train(rank, recipe, Run(network="plain"))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"rank": 0, "batch": 2, "slow": 1}, id="the other rank is slower"),
        pytest.param({"rank": 1, "batch": 6}, id="after the last batch"),
    ],
)
def test_all_end_with_the_same_weights(two_ranks: RankPool, arguments: dict[str, Any]) -> None:
    first, second = two_ranks.run(end, arguments=arguments)
    assert [one.error for one in (first, second)] == ["SIGTERMException: "] * 2
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name]), name


def evaluate(rank: int) -> tuple[str, int]:
    """Test with a SIGTERM for the second rank in its fifth batch; what it ended with, and batches."""
    seen: list[int] = []

    class Ends(Callback):
        def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
            seen.append(len(seen))
            if rank == 1 and len(seen) == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if rank == 0:
                until(lambda: len(seen) < 8 or trainer.strategy._board.fault is not None)  # type: ignore[attr-defined]

    class Tested(Tower):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.predict(batch[0])

        def test_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.zeros(80, 12), torch.zeros(80, 3)), batch_size=2)

    torch.set_num_threads(1)
    trainer = Trainer(
        strategy="bytescheduler",
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ends()],
    )
    try:
        trainer.test(Tested(), verbose=False)
    except (SystemExit, RankFailedError) as error:
        return f"{type(error).__name__}: {error}", len(seen)
    return "nothing", len(seen)


def test_a_sigterm_in_a_test_ends_that_rank_before_its_next_batch_and_the_others_name_it(two_ranks: RankPool) -> None:
    (first, others), (second, batches) = two_ranks.run(evaluate)
    assert second == "SIGTERMException: "
    assert batches == 5
    assert first.startswith("RankFailedError: Rank 1 failed: SIGTERMException")
    assert others <= 8
