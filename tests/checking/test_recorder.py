from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_bytescheduler.checking.recorder import GateWatch
from lightning_bytescheduler.ddp.partial_step import UpdateState


class Engine:
    """As the engine without ``on_open``: a touch is a call of ``touched``."""

    def __init__(self, module: nn.Module) -> None:
        self._updates = [SimpleNamespace(parameters=[p], state=UpdateState.DUE) for p in module.parameters()]
        self.opened: list[Any] = []

    def touched(self, update: Any, gradient_only: bool) -> None:
        self.opened.append(update)
        update.state = UpdateState.DONE


class TellingEngine(Engine):
    """As the engine that says what opened a gate."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.on_open: Callable[[Any], None] | None = None

    def touched(self, update: Any, gradient_only: bool) -> None:
        super().touched(update, gradient_only)
        if self.on_open is not None:
            self.on_open(SimpleNamespace(parameters=tuple(update.parameters), kind="touch", how="reader"))


def reader(engine: Engine, index: int) -> None:
    engine.touched(engine._updates[index], False)


@pytest.mark.parametrize("kind", [Engine, TellingEngine])
def test_who_touched_and_who_did_not(kind: type[Engine]) -> None:
    module = nn.Linear(2, 2)
    engine = kind(module)
    watch = GateWatch(engine, module)
    watch.begin(7)
    reader(engine, 0)
    reader(engine, 0)
    watch.end()
    assert list(watch.openings) == [7]
    assert list(watch.openings[7]) == ["weight"]
    assert "reader" in watch.openings[7]["weight"]
    assert watch.untouched == {7: ("bias",)}
    assert len(engine.opened) == 2  # it listens, and the engine does what it did


@pytest.mark.parametrize("kind", [Engine, TellingEngine])
def test_a_read_between_steps_belongs_to_the_next_one(kind: type[Engine]) -> None:
    module = nn.Linear(2, 2)
    engine = kind(module)
    watch = GateWatch(engine, module)
    watch.begin(7)
    watch.end()
    reader(engine, 1)
    assert list(watch.openings) == [8]


def test_an_engine_that_tells_nothing_is_no_error() -> None:
    watch = GateWatch(SimpleNamespace(), nn.Linear(2, 2))
    watch.begin(1)
    watch.end()
    assert watch.untouched == {1: ()}
