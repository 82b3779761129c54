from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lightning_bytescheduler.advice import profiled_fit
from lightning_bytescheduler.advice.profiled_fit import RepeatedData


def test_it_begins_again() -> None:
    assert list(itertools.islice(RepeatedData([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(("batches", "expected"), [([], []), (iter([1, 2]), [1, 2])])
def test_it_ends_where_nothing_comes(batches: list[int], expected: list[int]) -> None:
    assert list(RepeatedData(batches)) == expected


def test_it_counts_the_time_in_which_batches_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def batches() -> Iterator[int]:
        nonlocal now
        for batch in range(3):
            now += 2.0
            yield batch

    monkeypatch.setattr(profiled_fit, "time", SimpleNamespace(perf_counter=lambda: now))
    data = RepeatedData(batches())
    for _ in data:
        now += 100.0  # training
    assert data.waited == 6.0
