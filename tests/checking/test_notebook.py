"""``check()`` in a process that goes on: what is found, what is refused, and that nothing is left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_bytescheduler import CheckReport, OptionError, UnsupportedError, check, registration
from tests.checking.hidden_reads import ByAddress
from tests.support.models import Tower

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 5,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
BARE: dict[str, Any] = {**QUIET, "logger": False, "enable_checkpointing": False, "limit_val_batches": 0}


def run(model: Any, steps: int = 6, **options: Any) -> CheckReport:
    return check(Trainer(**{**BARE, **options}), model, steps=steps)


def test_what_is_the_same_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the user's folders nor in this process, for which it is decided whose Lightning it uses."""
    monkeypatch.setenv(registration.VARIABLE, os.environ.get(registration.VARIABLE) or "lightning")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "last.ckpt").write_text("kept")
    checkpoints = ModelCheckpoint(tmp_path / "mine", every_n_train_steps=2, save_last=True)
    trainer = Trainer(
        **{**QUIET, "max_epochs": 1},
        callbacks=checkpoints,
        logger=CSVLogger(tmp_path / "logs"),
        default_root_dir=tmp_path / "root",
        log_every_n_steps=2,
        limit_train_batches=6,
        strategy=DDPStrategy(find_unused_parameters=True),
    )
    model = Tower(depth=2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    environment, threads, strategy = dict(os.environ), threading.active_count(), trainer.strategy
    report = check(trainer, model, steps=40)
    assert report.verdict == "identical", report.text()
    assert report.equal
    assert str(report) == report.text()
    assert "40 steps were asked for; the fit ended before" in report.text()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "last.ckpt"]
    assert (tmp_path / "mine" / "last.ckpt").read_text() == "kept"
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert trainer.strategy is strategy
    assert trainer.global_step == 0
    assert dict(os.environ) == environment
    assert threading.active_count() == threads
    first = report.runs[0].first
    assert first.steps == 6
    assert "validation_loss" in first.metrics


def test_a_read_through_an_address_is_found() -> None:
    report = run(ByAddress())
    assert report.exit_code == 1, report.text()
    assert not report.equal
    first = report.first
    assert first is not None
    assert (first.step, first.tensors[:1]) == (4, ("first.weight",)), report.text()
    assert "with no update deferred nothing differs: a weight is read before the update of the last" in report.cause


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_trainer_with_one_device_trains_on_two(strategy: str) -> None:
    report = check(Trainer(**{**BARE, "devices": 1}, strategy=strategy), Tower(depth=1), steps=3, devices=2)
    assert report.equal, report.text()
    assert len(report.runs[0].ranks) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [({"devices": 1}, "devices=2"), ({"num_nodes": 2, "strategy": "ddp"}, "num_nodes=2")],
)
def test_what_cannot_be_checked_says_so(options: dict[str, Any], said: str) -> None:
    report = run(Tower(depth=1), steps=3, **options)
    assert report.exit_code == 2
    assert said in report.headline()


@pytest.mark.parametrize(
    ("options", "name"),
    [({"steps": 0}, "steps"), ({"devices": 1}, "devices"), ({"timeout": -1}, "timeout")],
)
def test_options_are_checked(options: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError, match=name):
        check(Trainer(**BARE), Tower(), **options)


def test_a_model_in_the_place_of_the_trainer_is_named() -> None:
    with pytest.raises(OptionError, match=r"trainer must be a Trainer, as in check\(trainer, model"):
        check(Tower(), Trainer(**BARE))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", ["RANK", "LOCAL_RANK"])
def test_one_of_several_ranks_is_refused(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(**BARE)
    monkeypatch.setenv(rank, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="is one of several or has trained with ddp"):
        check(trainer, Tower())
