"""What checkpoints have after a fit of diloco, and what one that fails says of them; several ranks of torchrun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_bytescheduler import DiLoCoStrategy, OptionError
from lightning_bytescheduler.ddp.rank_strategy import OUTER_STATE, RankStrategy


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


def trainer_of(folder: Any, max_steps: int) -> Trainer:
    return Trainer(
        strategy=DiLoCoStrategy(inner_steps=4),
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        default_root_dir=folder,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.filterwarnings("ignore:The `srun` command")
def test_a_checkpoint_after_the_fit_has_the_outer_state(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    trainer, path = trainer_of(tmp_path, 8), tmp_path / "after.ckpt"
    trainer.fit(BoringModel())
    strategy: Any = trainer.strategy
    momentum = strategy._last_state["outer"]["optimizer"]["state"][0]["momentum_buffer"]
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)[OUTER_STATE]
    assert saved["rounds"] == {"round": 2}
    assert torch.equal(saved["outer"]["optimizer"]["state"][0]["momentum_buffer"], momentum)
    assert momentum.any()
    again = trainer_of(tmp_path, 12)
    again.fit(BoringModel(), ckpt_path=path)
    later: Any = again.strategy
    assert later._last_state["rounds"] == {"round": 3}


def test_ranks_of_torchrun_that_no_inner_puts_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    DiLoCoStrategy(coordinator="http://127.0.0.1:7077", inner="ddp")
    DiLoCoStrategy()
    with pytest.raises(OptionError, match=r"processes of torchrun=2 is not allowed: .*inner='ddp'"):
        DiLoCoStrategy(coordinator="http://127.0.0.1:7077")
