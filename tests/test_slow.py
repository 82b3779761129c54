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


NAMES = ["tests/a.py::quick", "tests/a.py::slow[1]", "tests/a.py::slow[2]", "tests/b.py::slow"]


def left_in(chosen: str, names: list[str]) -> list[str]:
    config: Any = Mock(**{"getoption.return_value": chosen})
    items = [_Item(name, slow="slow" in name) for name in names]
    pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    return [item.nodeid for item in items]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("all", NAMES),
        ("none", NAMES[:1]),
        ("tests/a.py tests/c.py", NAMES[:2]),
        ("tests/b.py", [NAMES[0], NAMES[3]]),
    ],
)
def test_of_files_that_are_named_each_slow_test_has_a_case(chosen: str, names: list[str]) -> None:
    assert left_in(chosen, NAMES) == names


def test_each_slow_test_is_run_on_one_day_of_the_week() -> None:
    names = [f"tests/a.py::slow[{number}]" for number in range(700)]
    days = [left_in(f"{day}/7", ["tests/a.py::quick", *names]) for day in range(7)]
    assert all(day[0] == "tests/a.py::quick" for day in days)
    assert sorted(name for day in days for name in day[1:]) == sorted(names)
    assert max(map(len, days)) < 150
    assert set(left_in("3/7", [*names, "tests/a.py::another_slow"])) >= set(days[3][1:])
