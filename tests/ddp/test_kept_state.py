from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from lightning_bytescheduler.ddp.deferred_optimizer import state_is_kept


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
        lambda optimizer: {key: dict(value) for key, value in optimizer.state.items()},
        lambda optimizer: list(optimizer.state.values())[1]["exp_avg"],
        lambda optimizer: list(optimizer.state.values())[2]["exp_avg_sq"].detach()[:1],
        lambda optimizer: list(optimizer.state.values())[3]["exp_avg_sq"].numpy(),
        lambda optimizer: next(iter(optimizer.state.values()))["step"],
    ],
)
def test_an_object_that_keeps_it_is_found_as_long_as_it_does(keep: Callable[[Any], Any]) -> None:
    optimizer = stepped(Adam)
    kept = keep(optimizer)
    assert state_is_kept(optimizer)
    del kept
    assert not state_is_kept(optimizer)


def test_a_copy_is_nothing_to_wait_for() -> None:
    optimizer = stepped(Adam)
    kept = copy.deepcopy(optimizer.state_dict())
    assert not state_is_kept(optimizer)
    assert kept


def test_a_state_that_other_processes_share() -> None:
    optimizer = stepped(Adam)
    next(iter(optimizer.state.values()))["exp_avg"].share_memory_()
    assert state_is_kept(optimizer)


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_optimizers_hold_their_state_once(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this version of torch has no {name}")
    parameters = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(3, 3)
        optimizer.step()
        assert not state_is_kept(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not state_is_kept(optimizer)
