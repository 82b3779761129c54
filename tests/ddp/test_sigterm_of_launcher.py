"""A launcher ends all ranks by SIGTERM when one of them has died, which is then named."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist

from lightning_bytescheduler.ddp.rank_strategy import JoinedRanks
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.standstill import Sign, Standing
from lightning_bytescheduler.lightning_api import SIGTERMException


class Rank(JoinedRanks):
    """A rank that is about to end."""

    def __init__(self, board: FaultBoard) -> None:
        self._board = board


def test_a_rank_that_has_died_before_a_sigterm_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set("signs/1", Sign(beat=3, standing=Standing(place="in batch 1 of the validation")).encode())
    board = FaultBoard(store, rank=0, world_size=2)
    with caplog.at_level(logging.ERROR):
        Rank(board).publish_failure(SIGTERMException())
    assert "Rank 1 failed: it shows no sign of life" in caplog.text
    assert "rank 1 is in batch 1 of the validation" in caplog.text
    assert b"no sign of life" in store.get("fault")


def test_a_sigterm_to_ranks_that_live_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    boards = [FaultBoard(store, rank=rank, world_size=2) for rank in range(2)]
    with caplog.at_level(logging.ERROR):
        Rank(boards[0]).publish_failure(SIGTERMException())
    assert "no sign of life" not in caplog.text
    assert b"SIGTERMException" in store.get("fault")
    boards[1].close()
