"""A coordinator's process collects garbage where nobody waits for an answer."""

from __future__ import annotations

import gc

import pytest

from lightning_bytescheduler.coordinator.service import Garbage


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    done: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append(1))
    return done


def test_full_collections_are_left_to_the_coordinator_meanwhile(collected: list[int]) -> None:
    before = gc.get_threshold()
    one = Garbage()
    with Garbage.collected_rarely():
        assert gc.get_threshold()[2] > 100_000
        collected.clear()
        one.collect()
        assert not collected  # no connection has ended
        one.ended()
        one.collect()
        one.collect()
        assert collected == [1]
    assert gc.get_threshold() == before
    one.ended()
    one.collect()
    assert collected == [1]  # the process' own collector does it again


def test_many_connections_that_end_are_not_left_for_long(collected: list[int]) -> None:
    one = Garbage()
    with Garbage.collected_rarely():
        collected.clear()
        for _ in range(2500):
            one.ended()
    assert len(collected) == 2
