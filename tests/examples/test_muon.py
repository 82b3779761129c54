"""Two optimizers as one: it steps as they do, and goes on from a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

if not hasattr(torch.optim, "Muon"):
    pytest.skip("This torch has no Muon.", allow_module_level=True)

from examples.muon import MuonAndAdamW

RATE = 0.01


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6))


def matrix_of(layers: nn.Sequential) -> nn.Parameter:
    matrix = layers[1].weight
    assert isinstance(matrix, nn.Parameter)
    return matrix


def optimizer_of(layers: nn.Sequential) -> MuonAndAdamW:
    return MuonAndAdamW(layers.parameters(), matrices=[matrix_of(layers)], lr=RATE)


def losses(layers: nn.Sequential, *optimizers: torch.optim.Optimizer, steps: int, rate: float = RATE) -> list[float]:
    found = []
    for _ in range(steps):
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] = rate  # as a schedule sets it
        layers.zero_grad()
        loss = (layers(torch.arange(8)) - 1).pow(2).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    return found


def test_it_steps_as_both_do() -> None:
    together, apart = model(), model()
    matrix = matrix_of(apart)
    others = [parameter for parameter in apart.parameters() if parameter is not matrix]
    muon = torch.optim.Muon([matrix], lr=RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=RATE)
    one = optimizer_of(together)
    for rate in (RATE, RATE / 10):
        assert losses(together, one, steps=3, rate=rate) == losses(apart, muon, adamw, steps=3, rate=rate)
    assert set(one.state) == set(together.parameters())


def test_it_goes_on_from_a_checkpoint() -> None:
    first = model()
    optimizer = optimizer_of(first)
    losses(first, optimizer, steps=3)
    weights, state = copy.deepcopy(first.state_dict()), copy.deepcopy(optimizer.state_dict())
    second = model()
    second.load_state_dict(weights)
    resumed = optimizer_of(second)
    resumed.load_state_dict(state)
    assert losses(second, resumed, steps=3, rate=RATE / 2) == losses(first, optimizer, steps=3, rate=RATE / 2)


def test_a_closure_is_called_once_with_gradients() -> None:
    layers = model()
    calls = []

    def closure() -> torch.Tensor:
        layers.zero_grad()
        loss = layers(torch.arange(8)).pow(2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    optimizer = optimizer_of(layers)
    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
