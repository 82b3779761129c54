"""Fits that are workers of a coordinator: each rank of a pool as an independent Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch.utils.data import DataLoader

from lightning_bytescheduler.coordinator.run import CoordinatorOptions
from lightning_bytescheduler.diloco.coordinator_protocol import run_options
from lightning_bytescheduler.diloco.round_end import RoundOptions
from tests.diloco.fits import Result, fit_diloco, plain_sgd
from tests.support.models import Tower
from tests.support.rank_pool import free_port

__all__ = ["OwnData", "alone", "coordinator_options", "fit_coordinated", "own_data", "together"]


class OwnData(Tower):
    """Goes through data of its own in order, the same however many processes there are."""

    def __init__(self, rank: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rank = rank

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._data(self.samples, seed=10 + self.rank), batch_size=self.batch_size)


def own_data(rank: int, **arguments: Any) -> OwnData:
    return OwnData(rank, optimizer=plain_sgd, dropout=0.0, **arguments)


def coordinator_options(
    *, rounds: Mapping[str, Any] | None = None, lease: float = 30.0, **given: Any
) -> CoordinatorOptions:
    return CoordinatorOptions(
        run=run_options(**given), rounds=RoundOptions(**{"quorum": 0.0, "grace": 30.0, **(rounds or {})}), lease=lease
    )


@contextmanager
def alone() -> Iterator[None]:
    """This process is the only one of its training."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    with patch.dict(os.environ, one):
        yield


@contextmanager
def together(rank: int, *, ranks: int, port: int) -> Iterator[None]:
    """This process is one of a training of its own, whose ranks are a pool's first ones."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    with patch.dict(os.environ, {**own, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}):
        yield


def fit_coordinated(
    rank: int,
    *,
    url: str,
    options: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Result:
    """On a rank of a pool: fit as a worker of its own."""
    with alone():
        return fit_diloco(
            0,
            options={"coordinator": {"url": url, "name": f"w{rank}"}, **(options or {})},
            model=partial(own_data, rank, **(model or {})),
            same_seed=True,
            use_distributed_sampler=False,
            **arguments,
        )


def fit_together(
    rank: int, *, options: Mapping[str, Any], model: Mapping[str, Any] | None = None, **arguments: Any
) -> Result:
    """On a rank of a pool: the same without a coordinator."""
    return fit_diloco(
        rank,
        options=options,
        model=partial(own_data, rank, **(model or {})),
        same_seed=True,
        use_distributed_sampler=False,
        **arguments,
    )
