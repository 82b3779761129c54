"""Sparse gradients: DDP's bits, one all-reduce at a time, and no rank that waits for one that has failed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import SGD

from lightning_bytescheduler.collectives.groups import _gloo_of_one_thread
from lightning_bytescheduler.ddp.reduction import SparseGradients, sparse_layers
from tests.parity.checks import DDP, assert_same, train_on
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.waiting import WAIT, until

ROWS = 7
PATIENCE = timedelta(seconds=WAIT)


class Tables(Tower):
    """Two tables with sparse gradients among layers with dense ones."""

    def __init__(self) -> None:
        super().__init__(depth=1, dropout=0.0, optimizer=partial(SGD, lr=0.05))
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 24, sparse=True) for _ in range(2))

    def predict(self, inputs: Tensor) -> Tensor:
        rows = (inputs[:, 0].abs() * 10).long() % ROWS
        return self.last(self.layers[0](self.first(inputs) + self.tables[0](rows)) + self.tables[1](rows))


class NotesGroups(Tables):
    """Notes which groups sparse tensors travel on."""

    def on_train_start(self) -> None:
        reduce = SparseGradients.reduce

        def noted(sparse: SparseGradients, *how: Any) -> Any:
            group = sparse._group
            self.notes.append("default" if group is None else dist.get_backend(group))
            return reduce(sparse, *how)

        self._patched = patch.object(SparseGradients, "reduce", noted)
        self._patched.start()

    def on_train_end(self) -> None:
        self._patched.stop()


def test_layers_are_found_as_ddp_finds_them() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True))
    assert sparse_layers(model) == ["1", "2"]


@pytest.mark.parametrize("mode", ["ddp", "overlapped"])
def test_the_training_is_ddps(two_ranks: RankPool, mode: str) -> None:
    ddp, ours = train_on(two_ranks, Recipe(model=Tables, steps=5), DDP, Run(options={**SIZES, "mode": mode}))
    assert_same(ddp, ours)


def test_they_have_a_group_of_one_thread(two_ranks: RankPool) -> None:
    (ours,) = train_on(two_ranks, Recipe(model=NotesGroups, steps=3), Run(options=SIZES))
    for outcome in ours:
        assert outcome.notes == ["bytescheduler_gloo_of_one_thread"] * 6, "two tables, three steps"


def _threads() -> set[str]:
    return {thread.name for thread in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux says which threads a process has")
def test_the_group_has_one_thread_less_than_gloo_has() -> None:
    counts = []
    for make in (_gloo_of_one_thread, dist.ProcessGroupGloo):
        before = _threads()
        group = make(dist.HashStore(), 0, 1, PATIENCE)
        counts.append(len(_threads() - before))  # whatever ends meanwhile
        del group
    assert counts[0] == counts[1] - 1


def _pair() -> list[Any]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: _gloo_of_one_thread(store, rank, 2, PATIENCE), range(2)))


def _bucket(value: float) -> Tensor:
    return torch.sparse_coo_tensor([[1]], [[value]], (3, 1), check_invariants=True)


def test_what_waits_for_a_bucket_can_be_called_off() -> None:
    groups = _pair()
    ours = SparseGradients(groups[0])
    first = ours.reduce(_bucket(2.0), 0.5)
    other = SparseGradients(groups[1]).reduce(_bucket(4.0), 0.5)
    assert torch.equal(first.wait().to_dense(), other.wait().to_dense())
    assert first.wait().to_dense()[1].item() == 3.0
    until(lambda: not ours.under_way)  # torch completes the future first
    ours.call_off()  # nothing is under way, and nothing breaks
    alone = ours.reduce(_bucket(1.0), 0.5)
    assert ours.under_way
    caller = threading.Timer(0.05, ours.call_off)
    caller.start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        alone.wait()
    assert time.monotonic() - begin < WAIT / 2
    caller.join()


class Fails(Tables):
    """Rank 1 raises where rank 0 goes on to its backward pass."""

    expected_error = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == 1:
            raise RuntimeError("there is no more")
        return super().training_step(batch, batch_idx)


def _raises_nothing_more(trainer: Trainer, model: Any) -> None:
    raise AssertionError("the training ended as if nothing had happened")


def test_a_rank_that_fails_is_named_by_who_waits_for_its_sparse_gradients() -> None:
    recipe = Recipe(model=Fails, steps=8, after=_raises_nothing_more)
    with RankPool(2) as pool:
        ((first, second),) = train_on(pool, recipe, Run(options=SIZES, network="plain"))
    assert first.error is not None
    assert "Rank 1 failed" in first.error
    assert "there is no more" in first.error
    assert second.error is not None
    assert "there is no more" in second.error
