"""What a fit of diloco that fails says of checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_bytescheduler import DiLoCoStrategy
from lightning_bytescheduler.ddp.rank_strategy import RankStrategy


def test_callbacks_that_would_save_say_that_none_is_written(tmp_path: Any) -> None:
    strategy: Any = DiLoCoStrategy()
    passive, active = ModelCheckpoint(), [ModelCheckpoint(save_on_exception=True), OnExceptionCheckpoint(tmp_path)]
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(checkpoint_callbacks=[passive, *active]))
    DiLoCoStrategy._end_with(strategy, RuntimeError())
    assert "on_exception" not in vars(passive)
    assert all("on_exception" in vars(callback) for callback in active)
    strategy._open.close()
    assert not any("on_exception" in vars(callback) for callback in active)


def test_a_checkpoint_of_the_fit_before_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = DiLoCoStrategy()
    monkeypatch.setattr(RankStrategy, "setup_environment", lambda self: None)
    strategy._last_whole = "before.ckpt"
    strategy.setup_environment()
    with pytest.warns(UserWarning, match=r"of different moments\.$"):
        strategy._say_not_written()
    strategy._last_whole = "last.ckpt"
    with pytest.warns(UserWarning, match=r"The last whole one is last\.ckpt\.$"):
        strategy._say_not_written()
