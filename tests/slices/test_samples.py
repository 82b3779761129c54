"""Samples by their numbers: those that are asked for are made, and no others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import SliceCorruptError
from lightning_bytescheduler.slices.formats import SliceSamples, format_of
from lightning_bytescheduler.slices.make import npy_slice
from lightning_bytescheduler.slices.slice import Slice, SliceStream
from tests.slices.test_formats import pieces

COUNT = 23
CONTENTS = {
    "a.txt": "".join(f"line {number}\r\n" for number in range(COUNT)).encode(),
    "a.jsonl": "".join(f'{{"x": {number}}}\n' + "\n" * (number % 3 == 0) for number in range(COUNT)).encode(),
    "a.npy": npy_slice(np.arange(COUNT * 2).reshape(COUNT, 2)),
}


def slice_of(url: str, content: bytes, samples: int = COUNT) -> Slice:
    return Slice(key="s", url=url, size=len(content), samples=samples)


def opened(url: str, content: bytes, size: int, samples: int = COUNT) -> SliceSamples:
    return SliceSamples(slice_of(url, content, samples), format_of(url), lambda: pieces(content, size))


def plain(parts: Iterator[Any]) -> list[Any]:
    return [np.asarray(sample).tolist() for sample in itertools.chain.from_iterable(parts)]


@pytest.mark.parametrize("url", list(CONTENTS))
@settings(max_examples=25)
@given(size=st.sampled_from([7, 50, 10_000]), data=st.data())
def test_any_stretches_and_any_picks(url: str, size: int, data: st.DataObject) -> None:
    content = CONTENTS[url]
    whole = plain(opened(url, content, size).take(0, COUNT))
    assert len(whole) == COUNT
    bounds = sorted(data.draw(st.lists(st.integers(0, COUNT), min_size=2, max_size=8, unique=True)))
    samples = opened(url, content, size)
    for start, stop in itertools.pairwise(bounds):
        if (stop - start) % 2:  # others are passed over
            assert plain(samples.take(start, stop)) == whole[start:stop]
    numbers = np.array(data.draw(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=9)))
    assert plain(opened(url, content, size).pick(numbers)) == [whole[number] for number in numbers]


@pytest.mark.parametrize("url", list(CONTENTS))
@pytest.mark.parametrize("samples", [COUNT - 1, COUNT + 1])
def test_a_wrong_count_is_an_error_at_the_end(url: str, samples: int) -> None:
    content = CONTENTS[url]
    with pytest.raises(SliceCorruptError, match="it holds"):
        list(opened(url, content, 50, samples).take(samples - 3, samples))
    with pytest.raises(SliceCorruptError, match="it holds"):
        list(opened(url, content, 50, samples).pick(np.array([0])))


def test_what_is_before_a_malformed_sample_is_right() -> None:
    content = b"1\n2\n?\n4\n"
    read: list[Any] = []
    with pytest.raises(SliceCorruptError, match="after sample 2"):
        read.extend(itertools.chain.from_iterable(opened("a.jsonl", content, 100, 4).take(0, 4)))
    assert read == [1, 2]
    # A reader that skips the damage does not notice it.
    assert plain(opened("a.jsonl", content, 100, 4).take(3, 4)) == [4]


def test_json_as_any_program_writes_it() -> None:
    content = b'\xef\xbb\xbf"first"\n \t \n  "second"\n"\\ud800"\n'
    assert list(itertools.chain.from_iterable(opened("a.jsonl", content, 100, 3).take(0, 3))) == [
        "first",
        "second",
        json.loads('"\\ud800"'),
    ]


def counted(made: list[int], *, malformed: int = COUNT) -> SliceSamples:
    def read(stream: SliceStream) -> Iterator[int]:
        for number in range(COUNT):
            if number == malformed:
                raise SliceCorruptError("s", "s", "it is malformed.")
            made.append(number)
            yield number

    return SliceSamples(slice_of("s", b""), format_of("s", read), lambda: iter(()))


def test_a_users_reader_makes_each_sample_once() -> None:
    made: list[int] = []
    samples = counted(made)
    for start in range(3, COUNT, 8):
        stop = min(start + 4, COUNT)
        assert plain(samples.take(start, stop)) == list(range(start, stop))
    assert made == [*range(COUNT)]


def test_a_users_reader_yields_what_is_before_a_malformed_sample() -> None:
    read: list[int] = []
    with pytest.raises(SliceCorruptError):
        read.extend(itertools.chain.from_iterable(counted([], malformed=6).take(4, 8)))
    assert read == [4, 5]
