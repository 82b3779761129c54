"""Which slow tests ``--slow`` leaves in."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from tests.conftest import pytest_collection_modifyitems


class _Item:
    def __init__(self, nodeid: str, *, slow: bool) -> None:
        self.nodeid = nodeid
        self.slow = slow

    def get_closest_marker(self, name: str) -> bool:
        return name == "slow" and self.slow


@pytest.mark.parametrize(
    ("chosen", "left_in"),
    [
        ("all", ["tests/a.py::quick", "tests/a.py::slow[1]", "tests/b.py::slow"]),
        ("none", ["tests/a.py::quick"]),
        ("tests/b.py tests/c.py", ["tests/a.py::quick", "tests/b.py::slow"]),
    ],
)
def test_slow_tests_of_files_that_are_not_named_are_left_out(chosen: str, left_in: list[str]) -> None:
    config: Any = Mock(**{"getoption.return_value": chosen})
    items = [
        _Item("tests/a.py::quick", slow=False),
        _Item("tests/a.py::slow[1]", slow=True),
        _Item("tests/b.py::slow", slow=True),
    ]
    pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == left_in
