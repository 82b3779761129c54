"""Options of the strategy for Fabric: what only a fit of the Trainer can do is refused, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_bytescheduler import ByteSchedulerFabricStrategy, OptionError


@pytest.mark.parametrize("option", ["tuning", "compression", "weighting", "batch_size", "servers", "log_metrics"])
def test_what_only_the_trainer_can_do(option: str) -> None:
    says = f"no option '{option}'. It is an option of ByteSchedulerStrategy, for Trainer"
    with pytest.raises(OptionError, match=says):
        ByteSchedulerFabricStrategy(**{option: "x"})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"partition_siz": 4096}, "partition_siz"),
        ({"partition_size": -1}, "partition_size=-1"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ({"timeout": 30}, "timeout=30"),
    ],
)
def test_what_is_not_allowed(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        ByteSchedulerFabricStrategy(**options)


def test_one_process_has_nothing_to_schedule() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ByteSchedulerFabricStrategy())
    assert fabric.strategy.plan is fabric.strategy.statistics is None  # type: ignore[attr-defined]


def test_a_module_that_was_not_set_up_is_named() -> None:
    strategy: Any = ByteSchedulerFabricStrategy()
    strategy._board = SimpleNamespace(fault=None)
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match=r"train the module that fabric\.setup\(model, optimizer\) returns"):
        strategy.backward(weight.sum(), None)
    assert weight.grad is not None
