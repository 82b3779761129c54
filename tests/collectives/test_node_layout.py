"""Which ranks are on which node, by what each rank says; what does not fit together is refused on all ranks."""

from __future__ import annotations

import re

import pytest

from lightning_bytescheduler.collectives.server_meeting import lay_out
from lightning_bytescheduler.exceptions import UnsupportedError


def test_each_node_has_its_ranks_by_their_number_there() -> None:
    assert lay_out([(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 3), (1, 1, 3), (1, 2, 3)]) == ((0, 1, 2), (3, 4, 5))


def test_ranks_may_be_numbered_in_turns_over_nodes() -> None:
    """As SLURM does with --distribution=cyclic; nodes may have any numbers."""
    assert lay_out([(7, 0, 2), (9, 0, 2), (7, 1, 2), (9, 1, 2)]) == ((0, 2), (1, 3))


def test_one_rank_on_each_node_is_as_without_nodes() -> None:
    assert lay_out([(9, 0, 1), (7, 0, 1), (8, 0, 1)]) == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("places", "said"),
    [
        pytest.param(
            [(0, 0, 2), (0, 1, 2), (1, 0, 1)],
            "rank 1: number 1 of 2 on node 0, rank 2: number 0 of 1 on node 1",
            id="unequal nodes",
        ),
        pytest.param(
            [(0, 0, 1), (0, 0, 1)],
            "rank 0: number 0 of 1 on node 0, rank 1: number 0 of 1 on node 0",
            id="all say that they are the first of one node",
        ),
        pytest.param(
            [(0, 0, 2), (0, 2, 2)],
            "rank 0: number 0 of 2 on node 0, rank 1: number 2 of 2 on node 0",
            id="a number is missing",
        ),
        pytest.param(
            [(0, 0, 4), (0, 1, 4)],
            "rank 0: number 0 of 4 on node 0",
            id="devices=4",
        ),
    ],
)
def test_what_cannot_be_is_refused(places: list[tuple[int, int, int]], said: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(said)) as error:
        lay_out(places)
    assert "Leave group out" in str(error.value)
