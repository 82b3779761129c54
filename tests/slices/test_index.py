"""An index is either what was written, or an error that says what to do."""

from __future__ import annotations

import json

import pytest

from lightning_bytescheduler.exceptions import SliceIndexError
from lightning_bytescheduler.slices.make import read_index, write_index
from lightning_bytescheduler.slices.slice import Slice, checksum_of, digests_of

CONTENTS = [b"a\n" * 3, b"b" * 3_000_000]
SLICES = [
    Slice.of(content, key=f"slice-{number}.txt", url=f"memory://data/slice-{number}.txt", samples=samples)
    for number, (content, samples) in enumerate(zip(CONTENTS, (3, 1), strict=True))
]


def test_round_trip():
    slices = read_index(write_index(SLICES), folder="memory://data")
    assert slices == SLICES
    for slice_, content in zip(slices, CONTENTS, strict=True):
        assert slice_.digests == digests_of(content)


def test_an_index_of_an_earlier_release_is_read():
    """It had blanks between its values, and a checksum of each slice."""
    head, *lines = write_index(SLICES).splitlines()
    body = b"".join(json.dumps({**json.loads(line), "checksum": "xxh3_64:2d06"}).encode() + b"\n" for line in lines)
    head = json.dumps({**json.loads(head), "checksum": checksum_of(body)}).encode()
    assert b'"version": 1' in head
    entries = read_index(write_index(SLICES), folder="memory://data")
    assert read_index(head + b"\n" + body, folder="memory://data") == entries


def test_a_slice_that_is_named_twice_is_refused():
    with pytest.raises(SliceIndexError, match="names a slice twice"):
        read_index(write_index([*SLICES, SLICES[0]]), folder="memory://data")


@pytest.mark.parametrize(
    ("name", "value"), [("slices", None), ("chunk_bytes", 0), ("chunk_bytes", True), ("checksum", 1)]
)
def test_a_damaged_first_line_is_an_error(name, value):
    head, _, body = write_index(SLICES).partition(b"\n")
    head = json.dumps({**json.loads(head), name: value}).encode()
    with pytest.raises(SliceIndexError, match="is damaged"):
        read_index(head + b"\n" + body, folder="memory://data")


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", "8"), ("samples", 0), ("samples", True), ("checksum", 1), ("chunks", "x"), ("more", 1)],
)
def test_a_line_that_is_no_slice_is_named(name, value):
    head, _, body = write_index(SLICES[:1]).partition(b"\n")
    body = json.dumps({**json.loads(body), name: value}).encode() + b"\n"
    head = json.dumps({**json.loads(head), "checksum": checksum_of(body)}).encode()
    with pytest.raises(SliceIndexError, match="line 2, does not describe a slice"):
        read_index(head + b"\n" + body, folder="memory://data")


def test_names_follow_the_folder():
    (moved, _) = read_index(write_index(SLICES), folder="zip://::file:///b.zip")
    assert moved.url == "zip://slice-0.txt::file:///b.zip"
    assert moved.key == "slice-0.txt"


@pytest.mark.parametrize("at", [0, 40, 150, 300, -2])
def test_a_flipped_bit_is_noticed(at):
    content = bytearray(write_index(SLICES))
    content[at] ^= 4
    with pytest.raises(SliceIndexError):
        read_index(bytes(content), folder="memory://data")


def test_a_cut_short_or_foreign_index_is_refused():
    content = write_index(SLICES)
    for wrong in (b"", b"{}", b"\xff\x00", content[:-10], content.partition(b"\n")[0]):
        with pytest.raises(SliceIndexError, match=r"slices make|[Mm]ake the slices again"):
            read_index(wrong, folder="memory://data")


def test_another_version_is_named():
    with pytest.raises(SliceIndexError, match="of version 2, and this release reads version 1"):
        read_index(write_index(SLICES).replace(b'"version":1', b'"version":2'), folder="memory://data")


@pytest.mark.parametrize("name", ["/etc/passwd", "../other.txt", "file:///etc/passwd", "a::b", ""])
def test_an_index_cannot_name_files_elsewhere(name):
    head, _, body = write_index(SLICES[:1]).partition(b"\n")
    body = body.replace(b"slice-0.txt", json.dumps(name)[1:-1].encode())
    head = json.dumps({**json.loads(head), "checksum": checksum_of(body)}).encode()
    with pytest.raises(SliceIndexError, match="line 2"):
        read_index(head + b"\n" + body, folder="memory://data")
