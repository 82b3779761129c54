"""ByteScheduler's strategy under DDP's name, so that Lightning's own tests take the one for the other.

Tests look for the class name in reports of the profiler and in messages; that is why it is the same.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import strategies
from lightning.pytorch.strategies import StrategyRegistry, ddp

from lightning_bytescheduler import ByteSchedulerStrategy
from tests.lightning_suite.record import ARCHITECTURE_VARIABLE, Record

__all__ = ["DDPStrategy", "name_test", "take_the_place_of_ddp"]

_current: Record | None = None
_ORIGINAL = ddp.DDPStrategy


class DDPStrategy(ByteSchedulerStrategy):
    """Notes that it was made, and how much it scheduled."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        served = os.environ.get(ARCHITECTURE_VARIABLE, "allreduce") == "ps"
        # By itself it would take steps on loopback as DDP's.
        super().__init__(*args, **{"mode": "overlapped", "servers": 0 if served else None, **kwargs})
        self.record = _current
        self._note("made")

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self.fit is not None:
            self._note("scheduled", ranks=self.world_size)

    def teardown(self) -> None:
        runs = self.fit is not None
        super().teardown()
        if runs and self.statistics is not None:
            self._note("trained", steps=self.statistics.steps, overlapped=self.statistics.overlapped_steps)

    def _note(self, kind: str, **details: Any) -> None:
        if self.record is not None:
            self.record.write(kind, **details)


def name_test(record: Record) -> None:
    """Strategies made from now on belong to this test."""
    global _current
    _current = record


def take_the_place_of_ddp() -> None:
    """From now on ``Trainer(strategy="ddp")`` and ``from lightning.pytorch.strategies import DDPStrategy`` give ours.

    Classes derived from DDPStrategy before (DeepSpeed, XLA) stay what they are, and so does Lightning's ``isinstance``.
    """
    strategies.DDPStrategy = ddp.DDPStrategy = DDPStrategy  # type: ignore[misc]
    for entry in StrategyRegistry.values():
        if entry["strategy"] is _ORIGINAL:
            entry["strategy"] = DDPStrategy
