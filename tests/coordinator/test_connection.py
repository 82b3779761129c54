"""A burst, then a steady rate; a message that is held back for too long is not counted."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.coordinator.connection import RateLimit


def test_a_burst_then_a_steady_rate() -> None:
    now = 0.0
    limit = RateLimit(lambda: now)
    assert {limit.take() for _ in range(200)} == {0.0}
    assert [limit.take() for _ in range(3)] == pytest.approx([0.01, 0.02, 0.03])
    now = 0.1
    assert limit.take() == 0.0
    now = 100.0
    assert {limit.take() for _ in range(200)} == {0.0}


def test_what_would_be_held_back_for_too_long_is_not_counted() -> None:
    limit = RateLimit(lambda: 0.0)
    for _ in range(200):
        limit.take(longest=0.02)
    assert [limit.take(longest=0.02) for _ in range(4)] == [pytest.approx(0.01), pytest.approx(0.02), None, None]
