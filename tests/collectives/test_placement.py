"""Shares of servers, BytePS's mixed mode as it is, and the table of what went where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.collectives.push_pull import (
    Placement,
    chosen_placement,
    mixed_server,
    server_weights,
    spare_share,
)
from lightning_bytescheduler.exceptions import OptionError


def test_shares_are_those_of_byteps() -> None:
    assert spare_share(4, 2) == pytest.approx(0.6)
    assert spare_share(4, 4) == spare_share(4, 9) == spare_share(1, 1) == 1
    assert spare_share(4, 0) == 0
    assert server_weights(4, 2) == pytest.approx((0.3, 0.3, 0.1, 0.1, 0.1, 0.1))


@given(workers=st.integers(1, 64), data=st.data())
def test_the_shares_make_all_links_busy_for_equally_long(workers: int, data: st.DataObject) -> None:
    spare = data.draw(st.integers(0, workers))
    weights = server_weights(workers, spare)
    assert sum(weights) == pytest.approx(1)
    at_spare = [workers * weight for weight in weights[:spare]]  # each worker sends it that share of its gradients
    # Beside a worker: its own gradients but for those it keeps, and the others' that it serves.
    beside = [(1 - weight) + (workers - 1) * weight for weight in weights[spare:]]
    if workers > 1:
        assert [*at_spare, *beside] == pytest.approx([beside[0]] * len(weights))


@pytest.mark.parametrize(("tensor", "expected"), [(0, [1, 0, 3, 4, 7, 8]), (1, [0, 0, 1, 0, 5, 0])])
def test_mixed_mode_is_that_of_byteps(tensor: int, expected: list[int]) -> None:
    networks = [(workers, spare) for workers in (2, 4, 8) for spare in (1, 2)]
    assert [mixed_server(tensor, 0, *network) for network in networks] == expected


def test_mixed_mode_comes_to_about_the_shares() -> None:
    servers = [mixed_server(tensor, 0, 4, 2) for tensor in range(2000)]
    assert sum(server < 2 for server in servers) / 2000 == pytest.approx(0.6, abs=0.05)
    assert all(mixed_server(tensor, part, 4, 9) < 4 for tensor in range(40) for part in range(3)), "the spare ones only"


def test_a_table_shows_bytes_per_server() -> None:
    placement = Placement("balanced", 2, 1, (600, 400, 0))
    assert str(placement).splitlines() == [
        "placement 'balanced': 3 servers",
        "spare server 0                  600 bytes   60.0% of  50.0%",
        "server of worker 0              400 bytes   40.0% of  25.0%",
        "server of worker 1                0 bytes    0.0% of  25.0%",
    ]
    assert str(Placement("balanced", 1, 1, (1, 0))).splitlines()[1:] == [
        "spare server 0                    1 bytes  100.0% of 100.0%"
    ]


def test_the_variable_of_byteps_asks_for_mixed_mode() -> None:
    variable = "BYTEPS_ENABLE_MIXED_MODE"
    assert chosen_placement(None, {}) == chosen_placement(None, {variable: "0"}) == "balanced"
    assert chosen_placement(None, {variable: "1"}) == "mixed"
    assert chosen_placement("balanced", {variable: "1"}) == "balanced"
    with pytest.raises(OptionError, match=f"{variable}='yes' is not allowed: {variable} must be 0 or 1"):
        chosen_placement(None, {variable: "yes"})
    with pytest.raises(OptionError, match=r"must be one of 'balanced', 'mixed'\."):
        chosen_placement("djb2", {})
