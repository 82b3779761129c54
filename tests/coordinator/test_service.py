"""A coordinator's process collects garbage while no request waits for an answer."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_bytescheduler.coordinator.service import CoordinatorService, collected_rarely


def test_full_collections_are_left_to_the_coordinator_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append(1))
    before = gc.get_threshold()
    service: Any = SimpleNamespace(_ended_connections=0)
    with collected_rarely():
        assert gc.get_threshold()[2] > 100_000
        done.clear()
        CoordinatorService._collect(service)
        assert not done  # no connection has ended
        service._ended_connections = 3
        CoordinatorService._collect(service)
        CoordinatorService._collect(service)
        assert done == [1]
    assert gc.get_threshold() == before
    service._ended_connections = 3
    CoordinatorService._collect(service)
    assert done == [1]  # the process' own collector does it again
