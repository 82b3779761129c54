"""Sizes of what travels between workers."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco.pseudo_gradient_exchange import size_of_parts


@pytest.mark.parametrize(
    ("parameters", "size"),
    [(1, 1), (5_000, 5_000), (2_000_000, 2_000_000), (2_000_001, 1_000_001), (6_000_000, 2_000_000)],
)
def test_parts_are_of_the_same_size(parameters: int, size: int) -> None:
    assert size_of_parts(parameters) == size
