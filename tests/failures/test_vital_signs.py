"""From when on a rank counts as silent."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_bytescheduler.failures import board
from lightning_bytescheduler.failures.board import VitalSigns


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def monotonic(self) -> float:
        return self.now


def test_a_rank_is_silent_when_it_has_missed_five_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store = Clock(), dist.HashStore()
    monkeypatch.setattr(board, "time", clock)
    own, other = VitalSigns(store, 0, [1], 0.25), VitalSigns(store, 1, [0], 0.25)
    assert not own.examining
    with own.examined():
        assert own.examining
        for _ in range(4):  # late, but not silent
            other.beat()
            for _ in range(5):
                own.beat()
                assert own.silent() == []
                clock.now += 0.25
        own.beat()
        assert own.silent() == []
        clock.now += 0.25
        own.beat()
        assert own.silent() == [1]
        assert own.silent(at_least=2.0) == []
        other.beat()
        own.beat()
        assert own.silent() == []
