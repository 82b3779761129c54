"""Sizes of what travels between workers: the same on all ranks, unless they are given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler import DiLoCoStrategy
from lightning_bytescheduler.diloco.pseudo_gradient_exchange import outer_sizes
from lightning_bytescheduler.exceptions import OptionError

VARIABLES = ("BYTESCHEDULER_PARTITION", "BYTESCHEDULER_CREDIT", "BYTESCHEDULER_TIMELINE")


@pytest.mark.parametrize(
    ("parameters", "sizes"),
    [(5_000, (5_000, 10_000)), (2_000_000, (2_000_000, 4_000_000)), (2_000_001, (1_000_001, 2_000_002))],
)
def test_parts_are_of_the_same_size_and_two_are_on_their_way(parameters: int, sizes: tuple[int, int]) -> None:
    assert outer_sizes(parameters) == sizes


@given(
    parameters=st.integers(1, 2_000_000_000),
    partition_size=st.none() | st.integers(1, 10**9),
    credit=st.none() | st.integers(1, 10**9),
)
def test_what_is_given_holds(parameters: int, partition_size: int | None, credit: int | None) -> None:
    found = outer_sizes(parameters, partition_size=partition_size, credit=credit)
    assert 0 < found[0] <= (2_000_000 if partition_size is None else partition_size)
    assert found[1] >= (found[0] if credit is None else 1)
    assert partition_size in (None, found[0])
    assert credit in (None, found[1])
    assert partition_size is not None or found[0] <= parameters


def options_of(**given: Any) -> tuple[Any, ...]:
    options = DiLoCoStrategy(**given)._options
    return options.partition_size, options.credit, options.timeline


def test_an_argument_beats_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert options_of() == (None, None, None)
    for variable, value in zip(VARIABLES, ("3e5", "6e5", "its.json"), strict=True):
        monkeypatch.setenv(variable, value)
    assert options_of() == (300_000, 600_000, "its.json")
    assert options_of(timeline="mine.json") == (300_000, 600_000, "mine.json")
    inside = {"inner": {"strategy": "bytescheduler", "size": 2}}
    assert options_of(**inside) == (300_000, 600_000, "its.outer.json")
    with pytest.raises(OptionError, match=r"^timeline='its\.json' is not allowed"):
        options_of(**inside, timeline="its.json")
    monkeypatch.setenv("BYTESCHEDULER_PARTITION", "4MB")
    with pytest.raises(OptionError, match="BYTESCHEDULER_PARTITION"):
        options_of()
