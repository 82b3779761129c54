from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from lightning_bytescheduler.gradients.kept_state import state_is_kept


def stepped(kind: type[Optimizer]) -> Optimizer:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = kind(parameters, lr=0.1)  # type: ignore[call-arg]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_an_optimizer_alone_with_its_state(kind: type[Optimizer]) -> None:
    optimizer = stepped(kind)
    for _ in range(3):
        assert not state_is_kept(optimizer)
        optimizer.state_dict()
        optimizer.step()


@pytest.mark.parametrize(
    "keep",
    [
        lambda optimizer: optimizer.state,
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: next(iter(optimizer.state.values())),
        lambda optimizer: list(optimizer.state.values())[-1],
    ],
)
def test_whoever_keeps_it_is_found_as_long_as_he_does(keep: Callable[[Any], Any]) -> None:
    optimizer = stepped(Adam)
    kept = keep(optimizer)
    assert state_is_kept(optimizer)
    del kept
    assert not state_is_kept(optimizer)


def test_a_copy_is_nothing_to_wait_for() -> None:
    optimizer = stepped(Adam)
    kept = {key: dict(value) for key, value in optimizer.state.items()}
    assert not state_is_kept(optimizer)
    assert kept
