from __future__ import annotations

import copy
import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from lightning_bytescheduler.ddp.deferred_optimizer import (
    attributes_of,
    can_have_a_gate,
    close_state,
    is_closed,
    kind_of,
    open_state,
)


class Flushed:
    """Counts flushes; opens the gate, as the engine does."""

    def __init__(self, optimizer: Adam) -> None:
        self.optimizer = optimizer
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        open_state(self.optimizer)


@pytest.fixture
def stepped() -> Iterator[Adam]:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Adam([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    yield optimizer
    open_state(optimizer)


USES: dict[str, Callable[[Adam], Any]] = {
    "by key": lambda o: next(iter(o.state.values()))["step"],
    "length": lambda o: len(o.state),
    "type": lambda o: (isinstance(o.state, defaultdict), type(o.state)),
    "equality": lambda o: o.state == attributes_of(o)["state"],
    "json": lambda o: json.dumps([v["step"].item() for v in o.state.values()]),
    "union": lambda o: len(o.state | {}),
    "copy of the state": lambda o: len(copy.deepcopy(o.state)),
    "vars": lambda o: len(vars(o)["state"]),
    "dict": lambda o: len(o.__dict__["state"]),
    "state_dict": lambda o: o.state_dict()["state"][0]["step"],
    "load_state_dict": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "getstate": lambda o: len(o.__getstate__()["state"]),
    "setstate": lambda o: o.__setstate__({"state": defaultdict(dict)}),
    "replaced": lambda o: setattr(o, "state", defaultdict(dict)),
    "deleted": lambda o: delattr(o, "state"),
    "cleared": lambda o: o.state.clear(),
    "new class": lambda o: setattr(o, "__class__", AdamW),
    "copy": lambda o: (type(copy.copy(o)), len(copy.copy(o).state)),
    "deepcopy": lambda o: (type(copy.deepcopy(o)), len(copy.deepcopy(o).state)),
    "pickle": lambda o: (type(pickle.loads(pickle.dumps(o))), len(pickle.loads(pickle.dumps(o)).state)),
    "update of the dict": lambda o: o.__dict__.update(state=defaultdict(dict)),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
def test_whatever_shows_the_state_flushes_first_and_is_what_it_always_is(
    stepped: Adam, use: Callable[[Any], Any]
) -> None:
    expected = use(copy.deepcopy(stepped))
    flushed = Flushed(stepped)
    close_state(stepped, flushed)
    close_state(stepped, flushed)
    assert is_closed(stepped)
    assert repr(use(stepped)) == repr(expected)
    assert flushed.count == 1
    assert not is_closed(stepped)


def test_the_rest_is_as_ever_and_flushes_nothing(stepped: Adam) -> None:
    flushed = Flushed(stepped)
    text = repr(stepped)
    close_state(stepped, flushed)
    assert isinstance(stepped, Adam)
    assert stepped.__class__ is Adam
    assert kind_of(stepped) is Adam
    assert repr(stepped) == text
    stepped.param_groups[0]["lr"] = 0.5
    stepped.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    stepped.param_groups = list(stepped.param_groups)
    stepped.note = 1  # type: ignore[attr-defined]
    del stepped.note  # type: ignore[attr-defined]
    stepped.zero_grad()
    assert len(attributes_of(stepped)["state"]) == 1
    assert flushed.count == 0
    assert is_closed(stepped)


def test_a_gate_is_on_one_optimizer_only(stepped: Adam) -> None:
    close_state(stepped, Flushed(stepped))
    assert type(Adam([nn.Parameter(torch.zeros(1))])) is Adam


class HidesGroups(SGD):
    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.hidden

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.hidden = value


class LooksAtAttributes(SGD):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class WantsNoSubclass(SGD):
    def __init_subclass__(cls) -> None:
        raise TypeError("final")


@pytest.mark.parametrize("kind", [HidesGroups, LooksAtAttributes, WantsNoSubclass])
def test_where_there_can_be_no_gate(kind: type[SGD]) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert not can_have_a_gate(optimizer)
    assert can_have_a_gate(SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
