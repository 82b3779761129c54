from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.ranks import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery
