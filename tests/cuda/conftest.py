from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.steps import Case, train_both
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[Any]]:
    """Trains a case on a pool with DDP and with the engine, see :func:`train_both`."""
    meetings = count()

    def run(pool: RankPool, case: Case, **more: Any) -> list[Any]:
        meeting = str(tmp_path / f"meeting-{next(meetings)}")
        return pool.run(train_both, world_size=pool.world_size, meeting=meeting, case=case, **more)

    return run
