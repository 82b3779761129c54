"""What ranks compare before they train together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bytescheduler.ddp.rank_strategy import model_facts, optimizer_facts
from lightning_bytescheduler.exceptions import UnsupportedError

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
    with pytest.raises(UnsupportedError, match=r"nn\.LazyLinear.*Run a forward pass .* before fit"):
        model_facts(nn.LazyLinear(2).parameters())


def test_what_is_frozen_is_not_compared() -> None:
    layer = nn.Linear(4, 2)
    layer.weight.requires_grad_(False)
    assert model_facts(layer.parameters()) == model_facts([layer.bias])


def test_optimizers_are_compared_by_class_and_numbers() -> None:
    layer = nn.Linear(4, 2)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.5, "name": "biases"}]
    facts, numbers = optimizer_facts([torch.optim.Adam(groups, lr=0.1), torch.optim.SGD([layer.bias], lr=1.0)])
    assert facts == {"optimizers": "Adam with 2 groups, SGD with 1 groups"}
    assert numbers["lr in group 0 of optimizer 0"] == "0.1"
    assert numbers["lr in group 1 of optimizer 0"] == "0.5"
    assert numbers["betas in group 0 of optimizer 0"] == "(0.9, 0.999)"
    assert numbers["lr of optimizer 1"] == "1.0"
    assert not [name for name in numbers if name.startswith("params")]


def test_no_optimizer_is_said() -> None:
    assert optimizer_facts([])[0] == {"optimizers": "none"}
