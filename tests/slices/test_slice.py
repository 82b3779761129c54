"""A slice says at once what is wrong with it."""

from __future__ import annotations

from lightning_bytescheduler.slices.slice import Slice

GOOD = {"key": "a", "url": "memory://a.txt", "size": 10, "samples": 2}


def test_two_slices_of_the_same_file_are_equal_and_usable_as_keys():
    assert {Slice(**GOOD): 1}[Slice(**GOOD)] == 1
