"""What the benchmark of parameter servers compares with."""

from __future__ import annotations

import pytest

from benchmarks.parameter_servers import crossings


@pytest.mark.parametrize("servers", range(5))
def test_with_one_rank_on_each_host_the_formula_is_byteps(servers: int) -> None:
    n, k = 4, servers
    assert crossings(n, 1, k, by_node=False) == pytest.approx(2 * n * (n - 1) / (n * n + k * n - 2 * k))
    assert crossings(n, 1, k, by_node=True) == pytest.approx(crossings(n, 1, k, by_node=False))


def test_ranks_of_a_host_share_its_link() -> None:
    assert crossings(4, 2, 0, by_node=False) == 2.0
    assert crossings(4, 2, 4, by_node=False) == 2.0
    assert crossings(4, 2, 0, by_node=True) == 1.0
    assert crossings(8, 4, 0, by_node=True) == crossings(4, 2, 0, by_node=True)
