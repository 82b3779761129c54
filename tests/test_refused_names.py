"""Names that are nearly right, and Fabric: the error says what is right, when the Trainer is made."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from lightning_bytescheduler import ByteSchedulerFabricStrategy, ByteSchedulerStrategy, OptionError, UnsupportedError
from lightning_bytescheduler.refused_names import _misspelt


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("bytescheduler_find_unused", "bytescheduler_find_unused_parameters_true"),
        ("bytescheduler_spawn_find_unused_parameters", "bytescheduler_spawn_find_unused_parameters_true"),
        ("byte_scheduler", "bytescheduler"),
        ("diloco_find_unused_parameters_true", "diloco"),
        ("diloco_ddp", "diloco"),
    ],
)
def test_a_misspelt_name(name: str, right: str) -> None:
    with pytest.raises(OptionError, match=rf"^There is no strategy '{name}'\. Did you mean '{right}'\?"):
        Trainer(accelerator="cpu", devices=2, strategy=name, logger=False)


def test_what_is_meant_is_there() -> None:
    for name, right, _ in _misspelt():
        assert StrategyRegistry[name]["strategy"] is not StrategyRegistry[right]["strategy"]


@pytest.mark.parametrize("name", ["diloco", "diloco_notebook"])
def test_fabric(name: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"strategy='{name}' is for Trainer, and not for Fabric"):
        Fabric(accelerator="cpu", devices=2, strategy=name)


@pytest.mark.parametrize("name", ["bytescheduler", "bytescheduler_spawn", "bytescheduler_find_unused_parameters_true"])
def test_fabric_has_the_same_names(name: Any) -> None:
    assert type(Fabric(accelerator="cpu", devices=2, strategy=name).strategy) is ByteSchedulerFabricStrategy


def test_the_right_name_in_any_case() -> None:
    assert type(Trainer(accelerator="cpu", devices=2, strategy="ByteScheduler").strategy) is ByteSchedulerStrategy
