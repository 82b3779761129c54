"""What a strategy knows of one fit is not what it says of the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from lightning_bytescheduler import ByteSchedulerFabricStrategy, ByteSchedulerStrategy
from lightning_bytescheduler.ddp.fit_report import SchedulerStatistics
from lightning_bytescheduler.ddp.rank_strategy import RankStrategy
from lightning_bytescheduler.lightning_api import DDPStrategy


def test_the_checkpoint_of_a_fit_that_failed_is_none_of_the_next_ones() -> None:
    strategy = RankStrategy()
    with (
        patch.object(DDPStrategy, "load_checkpoint", return_value={"epoch": 1, "global_step": 3}),
        patch.object(DDPStrategy, "setup_environment"),
        patch.object(DDPStrategy, "barrier"),
        patch.object(RankStrategy, "_meet") as meet,
    ):
        strategy.load_checkpoint("last.ckpt")
        strategy.setup_environment()
        strategy.barrier("_CheckpointConnector.resume_end")
    assert meet.call_args.args == ("the checkpoint", {"checkpoint": "none"})


@pytest.mark.parametrize("kind", [ByteSchedulerStrategy, ByteSchedulerFabricStrategy])
def test_counters_are_read_without_making_the_plan(
    kind: type[ByteSchedulerStrategy] | type[ByteSchedulerFabricStrategy],
) -> None:
    """They are read in every step, and the plan walks the whole model."""
    counters, strategy = SchedulerStatistics(), kind()
    strategy.fit = cast(Any, SimpleNamespace(record=SimpleNamespace(statistics=counters)))
    assert strategy.statistics is counters
