from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="session")
def diloco_ranks() -> Iterator[RankPool]:
    """Two ranks without a default process group of another strategy."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def diloco_four_ranks() -> Iterator[RankPool]:
    """Four such ranks."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def three_plain_ranks() -> Iterator[RankPool]:
    """Three ranks without a default process group of another test."""
    with RankPool(3) as pool:
        yield pool
