"""A loader that goes on where a checkpoint stood in an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_bytescheduler.ddp.batches import LateLoader
from lightning_bytescheduler.diloco.loaders import EpochShare, shared_loader


def dealt_loader(rank: int, ranks: int) -> DataLoader[Any]:
    data: Any = list(range(11))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, ranks, rank, seed=3))


def test_batches_are_those_of_the_loader_and_only_the_next_pass_leaves_some_out() -> None:
    for rank in range(2):
        dealt = dealt_loader(rank, 2)
        made: Any = shared_loader(dealt)
        assert isinstance(made, LateLoader)
        batches = [batch.tolist() for batch in dealt]
        assert len(made) == len(batches) == 3
        assert [batch.tolist() for batch in made] == batches
        made.batch_sampler.done = 2
        assert [batch.tolist() for batch in made] == batches[2:]
        assert [batch.tolist() for batch in made] == batches


def test_loaders_of_other_kinds_stay_as_they_are() -> None:
    plain: DataLoader[int] = DataLoader(list(range(8)), batch_size=2)  # type: ignore[arg-type]
    other = object()
    assert shared_loader(plain) is plain
    assert shared_loader(other) is other
    streamed: Any = DataLoader(torch.utils.data.ChainDataset([]), batch_size=2)
    assert shared_loader(streamed) is streamed
    assert isinstance(shared_loader(dealt_loader(0, 2)).batch_sampler, EpochShare)  # type: ignore[attr-defined]
