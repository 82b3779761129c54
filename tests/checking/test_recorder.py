from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn

from lightning_bytescheduler.checking.recorder import GateWatch


class Engine:
    """All updates are due, until each is touched; as the engine, it says what opened a gate."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.due = list(self.parameters)
        self.opened: list[Any] = []
        self.on_open: Callable[[Any], None] | None = None

    def tell_openings(self, on_open: Callable[[Any], None]) -> None:
        self.on_open = on_open

    def due_parameters(self) -> list[nn.Parameter]:
        return self.due

    def touch(self, parameter: nn.Parameter) -> None:
        self.opened.append(parameter)
        self.due = [p for p in self.due if p is not parameter]
        if self.on_open is not None:
            self.on_open(SimpleNamespace(parameters=(parameter,), kind="touch", how="reader"))


def reader(engine: Engine, index: int) -> None:
    engine.touch(engine.parameters[index])


def test_who_touched_and_who_did_not() -> None:
    module = nn.Linear(2, 2)
    engine = Engine(module)
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


def test_a_read_between_steps_belongs_to_the_next_one() -> None:
    module = nn.Linear(2, 2)
    engine = Engine(module)
    watch = GateWatch(engine, module)
    watch.begin(7)
    watch.end()
    reader(engine, 1)
    assert list(watch.openings) == [8]


def test_where_nothing_is_due_nothing_is_untouched() -> None:
    module = nn.Linear(2, 2)
    engine = Engine(module)
    engine.due = []
    watch = GateWatch(engine, module)
    watch.begin(1)
    watch.end()
    assert watch.untouched == {1: ()}
