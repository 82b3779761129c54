"""A slice says at once what is wrong with it."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import Slice

GOOD = {"key": "a", "url": "memory://a.txt", "start": 0, "size": 10, "samples": 2}


def test_two_slices_of_the_same_range_are_equal_and_usable_as_keys():
    assert {Slice(**GOOD): 1}[Slice(**GOOD)] == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("key", ""), ("url", ""), ("start", -1), ("size", -1), ("samples", 0), ("samples", True), ("samples", 1.0)],
)
def test_misuse_names_the_option_and_the_value(option, value):
    with pytest.raises(OptionError, match=f"{option}={value!r} is not allowed"):
        Slice(**{**GOOD, option: value})
