"""A standstill is believed once it has been seen for a while, on ranks that are seen to live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_bytescheduler.failures import standstill
from lightning_bytescheduler.failures.standstill import Standing, StandstillWatch

GRADIENTS = Standing(steps=4, awaited_step=4, launched=20, batches=4)
COLLECTIVE = Standing(steps=3, launched=21, collective="barrier", batches=3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Other:
    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def beat(self) -> None:
        self.store.add("alive/1", 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(standstill, "time", clock)
    return clock


def watches() -> tuple[StandstillWatch, StandstillWatch, Other]:
    store = dist.HashStore()
    return StandstillWatch(store, 0, [1], 0.25), StandstillWatch(store, 1, [0], 0.25), Other(store)


def seen_after(
    clock: Clock, own: StandstillWatch, other: Other, *, limit: float = 30.0, beats: bool = True, **changes: Any
) -> float | None:
    """Seconds until it is believed."""
    start = clock.now
    while clock.now < start + limit:
        if beats:
            other.beat()
        own.tell(replace(GRADIENTS, **changes))
        if own.look() is not None:
            return clock.now - start
        clock.now += 0.25
    return None


def test_what_the_numbers_prove_is_believed_after_seconds(clock: Clock) -> None:
    own, others, other = watches()
    others.tell(COLLECTIVE)
    after = seen_after(clock, own, other)
    assert after is not None
    assert 3.0 <= after <= 5.5


def test_what_a_dead_network_could_look_like_is_watched_for_longer(clock: Clock) -> None:
    own, others, other = watches()
    others.tell(replace(COLLECTIVE, launched=19))
    after = seen_after(clock, own, other)
    assert after is not None
    assert 15.0 <= after <= 17.5


def test_every_change_begins_it_anew(clock: Clock) -> None:
    own, others, other = watches()
    others.tell(COLLECTIVE)
    assert seen_after(clock, own, other, limit=3.0) is None
    others.tell(replace(COLLECTIVE, launched=22))
    after = seen_after(clock, own, other)
    assert after is not None
    assert after >= 2.9
    assert seen_after(clock, own, other, limit=2.9, launched=19) is None


def test_a_rank_without_a_beat_is_not_believed(clock: Clock) -> None:
    own, others, other = watches()
    others.tell(COLLECTIVE)
    other.beat()
    assert seen_after(clock, own, other, limit=1.0) is None
    assert seen_after(clock, own, other, beats=False) is None


def test_one_that_has_ended_needs_no_beat(clock: Clock) -> None:
    own, others, other = watches()
    others.tell(replace(COLLECTIVE, collective="", ended=True))
    assert seen_after(clock, own, other, beats=False) is not None


def test_nobody_is_looked_at_without_need(clock: Clock) -> None:
    own, others, other = watches()
    others.tell(COLLECTIVE)
    assert seen_after(clock, own, other, awaited_step=0) is None
    assert own._stands == {}


def test_a_rank_that_has_told_nothing_yet_is_waited_for(clock: Clock) -> None:
    own, _, other = watches()
    assert seen_after(clock, own, other) is None


def test_a_survey_has_what_all_told_last(clock: Clock) -> None:
    own, others, _ = watches()
    own.tell(GRADIENTS)
    own.survey()
    assert own.told == {}
    others.tell(COLLECTIVE)
    own.survey()
    assert own.told == {0: GRADIENTS, 1: COLLECTIVE}
