from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from lightning_bytescheduler.gradients.gate import GatedState, close_state, open_state


class Flushed:
    """Counts flushes; opens the state, as the engine does."""

    def __init__(self, optimizer: Adam) -> None:
        self.optimizer = optimizer
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        open_state(self.optimizer)


@pytest.fixture
def stepped() -> Adam:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Adam([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    return optimizer


STATE_READS: dict[str, Callable[[Any], Any]] = {
    "by key": lambda state: next(iter(state.values()))["step"],
    "items": lambda state: list(state.items()),
    "length": len,
    "iteration": list,
    "copy": copy.deepcopy,
    "dict": dict,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "text": repr,
    "get": lambda state: state.get(None),
    "write": lambda state: state.setdefault("extra", {}),
    "clear": lambda state: state.clear(),
}


@pytest.mark.parametrize("read", STATE_READS.values(), ids=STATE_READS)
def test_use_of_the_state_flushes_first(stepped: Adam, read: Callable[[Any], Any]) -> None:
    own, flushed = stepped.state, Flushed(stepped)
    expected = read(copy.copy(own))
    close_state(stepped, flushed)
    close_state(stepped, flushed)
    assert isinstance(stepped.state, GatedState)
    assert flushed.count == 0
    actual = read(stepped.state)
    assert flushed.count >= 1
    assert stepped.state is own
    assert type(actual) is type(expected)
    if not isinstance(actual, (dict, str)):
        assert repr(actual) == repr(expected)


def test_state_of_a_parameter_that_has_none_yet_appears_as_ever(stepped: Adam) -> None:
    assert isinstance(stepped.state, defaultdict)
    close_state(stepped, Flushed(stepped))
    assert stepped.state[nn.Parameter(torch.zeros(1))] == {}
