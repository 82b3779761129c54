"""What is written down, and which strategy takes the place of the one that a script gives its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from lightning_bytescheduler import ByteSchedulerStrategy, UnsupportedError
from lightning_bytescheduler.checking.recorder import Recorder, digest, strategy_for
from lightning_bytescheduler.checking.report import RunSpec


@pytest.mark.parametrize("given", ["ddp", "bytescheduler", "bytescheduler_spawn", "ddp_find_unused_parameters_true"])
def test_a_strategy_may_be_given_by_its_name(given: str) -> None:
    """The registry has this package's strategies as functions that import them."""
    plain = strategy_for(RunSpec(strategy="ddp", steps=3), given)
    assert type(plain) is DDPStrategy
    ours = strategy_for(RunSpec(strategy="configured", steps=3), given)
    assert type(ours) is ByteSchedulerStrategy
    for strategy in (plain, ours):
        assert strategy._start_method == ("spawn" if given.endswith("_spawn") else "popen")
        assert strategy._ddp_kwargs.get("find_unused_parameters", False) == given.endswith("_true")


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "ddp"}, {"policy": "fifo"}, {"tuning": "both"}, {"credit": 1 << 18, "partition_size": 1 << 16}],
)
def test_a_run_is_scheduled_as_the_script_says(options: dict[str, Any]) -> None:
    given = ByteSchedulerStrategy(**options)
    ours = strategy_for(RunSpec(strategy="configured", steps=3), given)
    assert isinstance(ours, ByteSchedulerStrategy)
    assert ours._options == given._options
    strict = strategy_for(RunSpec(strategy="strict", steps=3), given)
    assert isinstance(strict, ByteSchedulerStrategy)
    assert strict._options.mode == "overlapped"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"compression": "int8", "weighting": "samples"}, "compression and weighting"),
        ({"weighting": "samples", "batch_size": "balanced"}, "weighting and batch_size"),
        ({"servers": 0}, "servers"),
    ],
)
def test_what_ddp_does_not_do_is_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(UnsupportedError, match=f"has {names}, which ddp has not.*Leave that out for the check"):
        strategy_for(RunSpec(strategy="ddp", steps=3), ByteSchedulerStrategy(**options))


def test_files_that_belong_to_a_logger_go_to_the_folder_of_the_run(tmp_path: Path) -> None:
    """LightningCLI saves its configuration there, and ends with an error where there is no such folder."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=CSVLogger(tmp_path / "own"), enable_checkpointing=False)
    Recorder(RunSpec(strategy="ddp", steps=3), tmp_path / "run").attach(trainer)
    assert trainer.log_dir == str(tmp_path / "run")


@pytest.mark.parametrize("given", ["diloco", "fsdp"])
def test_what_is_no_ddp_is_not_compared(given: str) -> None:
    with pytest.raises(UnsupportedError, match=f"strategy='{given}'.*not trained with DDP"):
        strategy_for(RunSpec(strategy="ddp", steps=3), given)


def test_a_digest_is_of_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2))
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3))
    assert digest(torch.ones(4, 4, dtype=torch.bfloat16).t()) == digest(torch.ones(4, 4, dtype=torch.bfloat16))
