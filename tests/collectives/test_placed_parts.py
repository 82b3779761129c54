"""Parts of gradients go where the placement says, and the table shows it."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.collectives.push_pull import PLACEMENTS, PlacedParts, mixed_server, server_weights

PARTS = [(tensor, part) for tensor in range(40) for part in range(3)]


def test_parts_are_where_mixed_mode_places_them() -> None:
    placed = PlacedParts("mixed", workers=4, servers=2)
    for _ in range(2):  # a part stays where it is
        for tensor, part in reversed(PARTS):
            placed.expect(tensor, part)
            assert placed.next(8) == mixed_server(tensor, part, 4, 2)
    assert sum(placed.so_far.bytes_per_server) == 2 * 8 * len(PARTS)


def test_by_default_bytes_come_to_the_shares_of_the_formula() -> None:
    placed = PlacedParts("balanced", workers=4, servers=2)
    for tensor, part in PARTS:
        placed.expect(tensor, part)
        placed.next(1000 + 37 * (tensor % 11))
    table = placed.so_far
    assert table.how == "balanced"
    assert sum(table.bytes_per_server[:2]) / sum(table.bytes_per_server) == pytest.approx(0.6, rel=0.02)
    assert str(table).startswith("placement 'balanced': 6 servers\n")


@pytest.mark.parametrize("how", PLACEMENTS)
@pytest.mark.parametrize("servers", [0, 2, 4])
def test_expected_shares_are_those_that_come_out(how: str, servers: int) -> None:
    placed = PlacedParts(how, workers=4, servers=servers)
    for tensor in range(3000):
        placed.expect(tensor, 0)
        placed.next(1)
    shares = [has / 3000 for has in placed.so_far.bytes_per_server]
    assert shares == pytest.approx(server_weights(4, servers), abs=0.08)
