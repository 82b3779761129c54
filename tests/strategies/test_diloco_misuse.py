"""Bad input fails when the strategy is made, and the message names option, value and way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim import SGD
from torch.utils.data import DataLoader, RandomSampler

from lightning_bytescheduler import DiLoCoStrategy, OptionError, UnsupportedError
from lightning_bytescheduler.diloco import FastestSteps, FixedSteps, SampleTarget
from lightning_bytescheduler.strategies.batch_sizes import with_batch_size


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("samples_per_round", 0),
        ("samples_per_round", 1.5),
        ("inner_steps", 0),
        ("inner_steps", True),
        ("equal_steps", "yes"),
        ("outer_steps", 0),
        ("outer_lr", -1.0),
        ("outer_lr", float("nan")),
        ("outer_momentum", 2.0),
        ("outer_optimizer", "sgd"),
        ("weighting", "loss"),
        ("fragments", 0),
        ("overlap_steps", -1),
        ("mixing", 1.5),
        ("wire_dtype", "fp16"),
        ("lead_steps", 0),
        ("batch_size", 0),
        ("batch_size", []),
        ("batch_size", [4, 0]),
        ("batch_size", "large"),
        ("batch_size", [4, "many"]),
        ("partition_size", 0),
        ("credit", 0),
        ("rounds_file", ""),
    ],
)
def test_values_are_named(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        DiLoCoStrategy(**{option: value})
    assert option in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"samples_per_round": 100, "inner_steps": 10},
        {"samples_per_round": 100, "equal_steps": True},
        {"outer_optimizer": SGD, "outer_lr": 0.1},
        {"outer_optimizer": SGD, "outer_momentum": 0.1},
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="left out where"):
        DiLoCoStrategy(**options)


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, FastestSteps(100)),
        ({"inner_steps": 7}, FastestSteps(7)),
        ({"inner_steps": 7, "equal_steps": True}, FixedSteps(7)),
        ({"samples_per_round": 64}, SampleTarget(64)),
    ],
)
def test_what_ends_a_round(options: dict[str, Any], target: object) -> None:
    assert DiLoCoStrategy(**options)._options.target == target


@pytest.mark.parametrize("suffix", ["", "_spawn", "_fork", "_notebook"])
def test_each_name_makes_the_strategy(suffix: str) -> None:
    strategy = Trainer(accelerator="cpu", devices=2, strategy=f"diloco{suffix}").strategy
    assert type(strategy) is DiLoCoStrategy
    assert strategy.workers == 2
    assert strategy.world_size == 1


@pytest.mark.filterwarnings(r"ignore:[\s\S]*JSONARGPARSE_DEPRECATION_WARNINGS")
def test_options_come_from_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setattr("sys.argv", ["train.py"])
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 2\n  logger: false\n  strategy:\n"
        "    class_path: lightning_bytescheduler.DiLoCoStrategy\n"
        "    init_args:\n      samples_per_round: 64\n      wire_dtype: int8\n      batch_size: [8, 2]\n"
    )
    cli = LightningCLI(BoringModel, run=False, seed_everything_default=1, args=["--config", str(path)])
    options = cli.trainer.strategy._options
    assert (options.samples_per_round, options.wire_dtype, list(options.batch_size)) == (64, "int8", [8, 2])


def test_a_loader_gets_another_batch_size() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = with_batch_size(DataLoader(data, batch_size=2, drop_last=True), 5)
    assert [len(batch[0]) for batch in loader] == [5, 5]


def test_a_loader_that_cannot_have_another_is_named() -> None:
    class Own(DataLoader[Any]):
        pass

    with pytest.raises(UnsupportedError, match=r"batch size of a Own.*trainer\.global_rank"):
        with_batch_size(Own([1, 2, 3]), 2)
    with pytest.raises(UnsupportedError, match="DataLoader"):
        with_batch_size(DataLoader([1, 2, 3], batch_size=None, sampler=RandomSampler([1, 2, 3])), 2)


def test_a_list_of_batch_sizes_is_for_all_workers() -> None:
    with pytest.raises(OptionError, match="one for each worker, of which there are 2"):
        DiLoCoStrategy(batch_size=[1, 2, 3])._check_batch_sizes(2)
