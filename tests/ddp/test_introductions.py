"""What ranks compare before they train together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.rank_strategy import introduce, model_facts

TYPES = (torch.float32, torch.float64)


def test_models_are_compared_by_shapes_and_types() -> None:
    one, other = nn.Linear(4, 2), nn.Linear(2, 4)
    assert model_facts(one.parameters()) == model_facts(nn.Linear(4, 2).parameters())
    assert model_facts(one.parameters()) != model_facts(other.parameters())


def test_types_of_models_are_named() -> None:
    (single,), (double,) = [model_facts(nn.Linear(4, 2, dtype=one).parameters()).values() for one in TYPES]
    assert single.startswith("2 tensors of 10 values, of type torch.float32 (")
    assert double.startswith("2 tensors of 10 values, of type torch.float64 (")


def test_a_model_without_shapes_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match="Call `forward` to initialize the parameters"):
        model_facts(nn.LazyLinear(2).parameters())


def test_what_is_frozen_is_not_compared() -> None:
    layer = nn.Linear(4, 2)
    layer.weight.requires_grad_(False)
    assert model_facts(layer.parameters()) == model_facts([layer.bias])


def test_what_differs_by_design_or_is_secret_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEBUG", "LIGHTNING", "COORDINATOR_TOKEN", "SLICES_TOKEN"):
        monkeypatch.setenv(f"BYTESCHEDULER_{name}", "1")
    noted = introduce(0, "bytescheduler", {}).noted
    assert [name for name in noted if "BYTESCHEDULER" in name] == ["BYTESCHEDULER_DEBUG"]
