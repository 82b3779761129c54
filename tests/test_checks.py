"""Each check lets through what is allowed, and names option, value and what would have been allowed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_bytescheduler import checks
from lightning_bytescheduler.exceptions import OptionError

NAN, INF = float("nan"), float("inf")
NO_NUMBERS = [True, False, None, "1", [1], NAN, INF, -INF]


@pytest.mark.parametrize(
    ("check", "allowed", "refused", "words"),
    [
        (checks.require_bool, [True, False], [0, 1, None, "True"], "True or False"),
        (partial(checks.require_whole, least=2), [2, 10**9], [1, 2.0, *NO_NUMBERS], "a whole number, 2 or more"),
        (checks.require_size, [1, 10**9], [0, -1, 1.0, *NO_NUMBERS], "a positive whole number of parameters"),
        (checks.require_not_negative, [0, 0.0, 2.5], [-1, -1e-9, *NO_NUMBERS], "a finite number, 0 or more"),
        (checks.require_positive, [1, 1e-9], [0, 0.0, -1, *NO_NUMBERS], "a finite number, more than 0"),
        (
            partial(checks.require_positive, of="bytes per second"),
            [1],
            [0],
            "a finite number of bytes per second, more than 0",
        ),
        (checks.require_seconds, [0, 0.5], [-0.5, *NO_NUMBERS], "a finite number of seconds, 0 or more"),
        (checks.require_share, [0, 1, 0.5], [-0.1, 1.1, *NO_NUMBERS], "a number from 0 to 1"),
        (partial(checks.require_one_of, allowed=(None, "a")), [None, "a"], ["", "A", 0], "one of None, 'a'"),
        (checks.require_text, ["", "a"], [None, b"a", 1], "a text"),
        (checks.require_path, ["a", "a/b.json"], ["", None, b"a", 1], "a file path"),
    ],
)
def test_what_is_let_through_and_what_is_refused(
    check: Callable[..., Any], allowed: list[object], refused: list[object], words: str
) -> None:
    for value in allowed:
        assert check("option", value) is value
    for value in refused:
        with pytest.raises(OptionError) as caught:
            check("option", value)
        assert str(caught.value) == f"option={value!r} is not allowed: option must be {words}."


def test_paths_become_text() -> None:
    assert checks.require_path("timeline", Path("a/b")) == "a/b"


def test_suffixes_count_in_any_case() -> None:
    assert checks.require_suffix("out", "a/b.PNG", ["png", "svg"]) == Path("a/b.PNG")
    for name in ("a", "a.", "png", "a.pdf"):
        with pytest.raises(OptionError, match="out must be a file name with one of the suffixes png, svg"):
            checks.require_suffix("out", name, ["png", "svg"])


def test_truth_values_are_no_numbers() -> None:
    assert checks.is_whole(0)
    assert not checks.is_whole(0, 1)
    assert not any(map(checks.is_whole, [*NO_NUMBERS, 1.0]))
    assert not any(map(checks.is_finite, NO_NUMBERS))
