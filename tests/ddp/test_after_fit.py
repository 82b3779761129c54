"""A collective that one rank alone calls outside of a fit says what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lightning_bytescheduler.ddp.rank_strategy import JoinedRanks
from lightning_bytescheduler.exceptions import RankFailedError
from lightning_bytescheduler.failures import board
from tests.support.waiting import until


class Connections:
    """Stands for DDP's strategy, whose barrier breaks when the other rank has ended."""

    def __init__(self, ended: Callable[[], bool] = lambda: True) -> None:
        self.global_rank = 0
        self.ended = ended

    def barrier(self, *_: Any) -> None:
        until(self.ended)
        raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer")


class Rank(JoinedRanks, Connections):
    pass


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)


def test_it_says_so_while_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(board, "_LATER_S", 0.0)
    with pytest.raises(RankFailedError):
        Rank(lambda: bool(caplog.messages)).barrier("Trainer.save_checkpoint")
    assert caplog.messages[0].startswith(
        "bytescheduler: rank 0 waits in barrier Trainer.save_checkpoint. All ranks have to call it, outside of fit, too"
    )


def test_it_says_so_if_the_other_ranks_end() -> None:
    with pytest.raises(RankFailedError, match=r"not come to barrier Trainer\.save_checkpoint\. All ranks have to"):
        Rank().barrier("Trainer.save_checkpoint")
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "bytescheduler-late-word"])
