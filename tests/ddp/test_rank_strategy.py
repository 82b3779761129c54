"""What a strategy knows of one fit is not what it says of the next one."""

from __future__ import annotations

from unittest.mock import patch

from lightning_bytescheduler.ddp.rank_strategy import RankStrategy
from lightning_bytescheduler.lightning_api import DDPStrategy


def test_the_checkpoint_of_a_fit_that_failed_is_none_of_the_next_ones() -> None:
    strategy = RankStrategy()
    with (
        patch.object(DDPStrategy, "load_checkpoint", return_value={"epoch": 1, "global_step": 3}),
        patch.object(DDPStrategy, "setup_environment"),
        patch.object(DDPStrategy, "barrier"),
        patch.object(RankStrategy, "_compare_checkpoints") as compare,
    ):
        strategy.load_checkpoint("last.ckpt")
        strategy.setup_environment()
        strategy.barrier("_CheckpointConnector.resume_end")
    compare.assert_called_once_with(None, "")
